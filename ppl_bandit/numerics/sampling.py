"""Continuous random draws for the engines: fast on CPUs and accelerators alike, and right far into the tails.

Gamma draws follow Marsaglia and Tsang (2000, "A simple method for generating gamma variables"), many at once: all
elements propose together, and rejected ones propose again. `jax.random.gamma` runs one loop per element instead, which
costs a CPU tens of times as much. Beta and Dirichlet draws are ratios of gamma draws, taken in logs, so that shapes far
below one do not underflow.

Every function takes a key first and spends it, follows the floating-point type of its parameters, and runs under
`jit`, `vmap` and `scan`. Gradients do not flow through gamma, beta and Dirichlet draws.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from ppl_bandit.numerics.random_bits import Shape, Words, as_float, key_words, threefry, to_normal, to_unit_interval
from ppl_bandit.runtime.devices import is_on_cpu
from ppl_bandit.types import Key

__all__ = [
    "beta",
    "dirichlet",
    "gamma",
    "log_gamma",
    "multivariate_normal_precision",
    "normal",
    "student_t",
]

# (index, turn, parameters) -> draws, infinite where they are rejected
_Propose: TypeAlias = Callable[[Array, Array, Array], Array]
_GROUP = 32
_FEWEST_WITH_SPARES = 64  # elements of a row: fewer would have as many spare proposals as elements
_WORD = 32
_REJECTED = 0.03  # of the proposals at shape 1; near 0 it is 5 %


def log_gamma(
    key: Key, concentration: Float[Array, "..."], sample_shape: Shape = (), rate: Float[Array, "..."] | float = 1.0
) -> Float[Array, "..."]:
    """Draw the logarithm of Gamma(concentration, rate) variables; both parameters may be large.

    A draw of shape 1e-3 is typically e^-1000, which only its logarithm can hold.

    Args:
        concentration: shape parameters, positive; a draw of any other is nan.
        sample_shape: axes of independent draws, put in front of those of `concentration`.
        rate: of each variable, positive.

    Returns:
        Draws of shape `sample_shape + concentration.shape`.
    """
    concentration = as_float(concentration)
    return jnp.log(_mode(concentration) / rate) + _log_gamma_ratio(key, concentration, sample_shape)


def gamma(key: Key, concentration: Float[Array, "..."], sample_shape: Shape = ()) -> Float[Array, "..."]:
    """Draw Gamma(concentration, 1) variables; divide by a rate, or multiply by a scale, for others.

    Args:
        concentration: shape parameters, positive.
        sample_shape: axes of independent draws, put in front of those of `concentration`.

    Returns:
        Draws of shape `sample_shape + concentration.shape`; zero where a draw is below the smallest float.
    """
    concentration = as_float(concentration)
    return _mode(concentration) * jnp.exp(_log_gamma_ratio(key, concentration, sample_shape))


def beta(
    key: Key,
    concentration1: Float[Array, "..."],
    concentration0: Float[Array, "..."],
    sample_shape: Shape = (),
) -> Float[Array, "..."]:
    """Draw Beta(concentration1, concentration0) variables.

    Args:
        concentration1: weight of one, positive; broadcasts against `concentration0`.
        concentration0: weight of zero, positive.
        sample_shape: axes of independent draws, put in front of those of the parameters.

    Returns:
        Draws in [0, 1]; exactly 0 or 1 where a draw is closer to it than floats can tell.
    """
    both = jnp.stack(jnp.broadcast_arrays(as_float(concentration1), as_float(concentration0)))
    ratios = jnp.moveaxis(_log_gamma_ratio(key, both, sample_shape), len(sample_shape), 0)
    modes = _mode(both)
    # The modes enter as a ratio: the difference of two large logarithms would lose the digits that the draws vary in.
    return jax.nn.sigmoid(jnp.log(modes[0] / modes[1]) + (ratios[0] - ratios[1]))


def dirichlet(key: Key, concentration: Float[Array, "... K"], sample_shape: Shape = ()) -> Float[Array, "... K"]:
    """Draw Dirichlet(concentration) vectors; the last axis holds the categories.

    Args:
        concentration: weights of the categories, positive.
        sample_shape: axes of independent draws, put in front of those of `concentration`.

    Returns:
        Draws whose last axis sums to one.
    """
    concentration = as_float(concentration)
    modes = _mode(concentration)
    relative = jnp.log(modes / jnp.max(modes, axis=-1, keepdims=True))
    return jax.nn.softmax(relative + _log_gamma_ratio(key, concentration, sample_shape), axis=-1)


def normal(
    key: Key, mean: Float[Array, "..."], scale: Float[Array, "..."], sample_shape: Shape = ()
) -> Float[Array, "..."]:
    """Draw Normal(mean, scale) variables.

    Args:
        mean: broadcasts against `scale`.
        scale: standard deviations; zero gives the mean.
        sample_shape: axes of independent draws, put in front of those of the parameters.

    Returns:
        Draws of shape `sample_shape` + the parameters' shape.
    """
    mean, scale = jnp.broadcast_arrays(as_float(mean), as_float(scale))
    dtype = jnp.result_type(mean, scale)
    return mean + scale * _standard_normal(key, sample_shape + mean.shape, dtype)


def multivariate_normal_precision(
    key: Key,
    mean: Float[Array, "... D"],
    precision_cholesky: Float[Array, "... D D"],
    sample_shape: Shape = (),
) -> Float[Array, "... D"]:
    """Draw Gaussian vectors whose precision matrix is L L', given its Cholesky factor L.

    A draw is mean + L'^-1 z with z standard normal: its covariance is (L L')^-1.

    Args:
        mean: location of each vector.
        precision_cholesky: lower-triangular L of each precision; its leading axes broadcast against those of `mean`.
        sample_shape: axes of independent draws, put in front of those of the parameters.

    Returns:
        Draws of shape `sample_shape` + the parameters' leading axes + (D,).
    """
    mean, factor = as_float(mean), as_float(precision_cholesky)
    batch = jnp.broadcast_shapes(mean.shape[:-1], factor.shape[:-2])
    num_features = mean.shape[-1]
    factor = jnp.broadcast_to(factor, batch + factor.shape[-2:])
    noise = _standard_normal(key, (*batch, num_features, math.prod(sample_shape)), jnp.result_type(mean, factor))
    # L is inverted once and multiplies all draws: a triangular solve with a thousand right-hand sides goes to a threaded
    # library, which took up to a thousand times as long on a busy CPU. Highest precision: accelerators round to 10 bits.
    identity = jnp.broadcast_to(jnp.eye(num_features, dtype=factor.dtype), factor.shape)
    inverse = lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    shifts = jnp.matmul(inverse.mT, noise, precision=lax.Precision.HIGHEST)
    return mean + jnp.moveaxis(shifts, -1, 0).reshape(*sample_shape, *batch, num_features)


def student_t(
    key: Key,
    df: Float[Array, "..."],
    loc: Float[Array, "..."],
    scale: Float[Array, "..."],
    sample_shape: Shape = (),
) -> Float[Array, "..."]:
    """Draw Student-t variables.

    Args:
        df: degrees of freedom, positive; infinitely many give Normal(loc, scale).
        loc: broadcasts against `df` and `scale`.
        scale: nonnegative.
        sample_shape: axes of independent draws, put in front of those of the parameters.

    Returns:
        Draws of shape `sample_shape` + the parameters' shape; infinite where a draw is beyond the largest float.
    """
    df, loc, scale = jnp.broadcast_arrays(*map(as_float, (df, loc, scale)))
    key_precision, key_noise = jr.split(key)
    is_normal = jnp.isinf(df)
    half = jnp.where(is_normal, 1.0, 0.5 * df)
    log_precision = jnp.where(is_normal, 0.0, log_gamma(key_precision, half, sample_shape, half))
    noise = _standard_normal(key_noise, sample_shape + loc.shape, jnp.result_type(df, loc, scale))
    return loc + scale * noise * jnp.exp(-0.5 * log_precision)


def _mode(concentration: Array) -> Array:
    # Marsaglia and Tsang's d, of the shape that is proposed: concentration + 1.
    return concentration + 2.0 / 3.0


@functools.partial(jax.jit, static_argnames="sample_shape")  # outside jit, a loop would compile at every call
def _log_gamma_ratio(key: Key, concentration: Array, sample_shape: Shape) -> Array:
    """Draw log(G / d) for G ~ Gamma(concentration, 1) and d its `_mode`; near 0 and precise for large shapes."""
    # Samples lie along the last axis while drawing: a few parameters along it would leave vector units idle.
    flat = concentration.reshape(-1, 1)
    # A proposal with a nan parameter is a nan, not a rejection; a parameter below zero might be rejected for ever.
    flat = jnp.where(flat > 0, flat, jnp.nan)
    words, shape = key_words(key), (flat.size, math.prod(sample_shape))
    if not math.prod(shape):
        return jnp.zeros(sample_shape + concentration.shape, concentration.dtype)
    if is_on_cpu():
        draw = _draw_in_groups
    else:
        draw = _draw_with_spares if shape[1] >= _FEWEST_WITH_SPARES else _draw_in_lockstep
    ratios = draw(functools.partial(_propose_log_gamma_ratio, words), shape, flat)
    return ratios.T.reshape(sample_shape + concentration.shape)


def _draw_in_groups(propose: _Propose, shape: Shape, parameters: Float[Array, "R 1"]) -> Float[Array, "R S"]:
    """Propose once for all elements, and then for one rejected element at a time of every group of them, until none is left.

    Few are rejected, and to propose for all of them again would take as long as the first time: longer, since a loop that keeps
    in place what was accepted is not computed in vectors.
    """
    num_elements = math.prod(shape)
    num_groups = max(1, -(-num_elements // _GROUP))

    def propose_all(turn: Array) -> Array:
        return propose(lax.iota(jnp.uint32, num_elements).reshape(shape), turn, parameters)

    first = _apart(propose_all, shape, parameters.dtype).reshape(-1)
    first = jnp.pad(first, (0, _GROUP * num_groups - num_elements)).reshape(_GROUP, num_groups)
    group, member = lax.iota(jnp.int32, num_groups), lax.broadcasted_iota(jnp.int32, first.shape, 0)

    def propose_again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        turn, draws = carry
        which = jnp.min(jnp.where(draws == jnp.inf, member, _GROUP), axis=0)  # none: beyond the last, and dropped
        element = jnp.minimum(group + which * num_groups, num_elements - 1)
        again = propose(element.astype(jnp.uint32), turn, parameters[element // shape[1], 0])
        return turn + 1, draws.at[which, group].set(again, mode="drop", unique_indices=True)

    draws = lax.while_loop(lambda carry: jnp.any(carry[1] == jnp.inf), propose_again, (jnp.uint32(1), first))[1]
    return draws.reshape(-1)[:num_elements].reshape(shape)


def _draw_with_spares(propose: _Propose, shape: Shape, parameters: Float[Array, "R 1"]) -> Float[Array, "R S"]:
    """Propose once for all elements, and a few times more for each row: its rejected elements get these, one after another.

    The elements of a row have the same parameters. Of the millions of elements that an accelerator draws some are always
    rejected: to propose for all of them again, until none is, took more than twice as long as the first time.
    """
    num_rows, num_elements = shape
    num_wanted = num_elements + math.ceil(_REJECTED * num_elements + 6.0 * math.sqrt(_REJECTED * num_elements))
    num_words = -(-num_wanted // _WORD)
    num_spares = num_words * _WORD - num_elements
    index = lax.iota(jnp.uint32, num_rows * num_words * _WORD).reshape(num_rows, -1)
    proposals = propose(index, jnp.uint32(0), parameters)
    is_rejected = proposals == jnp.inf
    # How many are rejected before each: in a word of bits they are counted at once, and take no memory.
    bit = jnp.uint32(1) << lax.iota(jnp.uint32, _WORD)
    words = jnp.sum(jnp.where(is_rejected.reshape(num_rows, num_words, _WORD), bit, 0), axis=2, dtype=jnp.uint32)
    counts = lax.population_count(words)
    earlier = (jnp.cumsum(counts, axis=1) - counts)[:, :, None] + lax.population_count(words[:, :, None] & (bit - 1))
    rank = earlier.reshape(proposals.shape).astype(jnp.int32)
    first, spares = proposals[:, :num_elements], proposals[:, num_elements:]
    number = lax.iota(jnp.int32, num_spares) - (rank[:, num_elements:] - rank[:, num_elements, None])
    place = jnp.where(spares != jnp.inf, number, num_spares)
    row = lax.broadcasted_iota(jnp.int32, place.shape, 0)
    spares = jnp.full_like(spares, jnp.inf).at[row, place].set(spares, mode="drop", unique_indices=True)
    rank = rank[:, :num_elements]
    given = jnp.take_along_axis(spares, jnp.minimum(rank, num_spares - 1), axis=1)
    given = jnp.where(rank < num_spares, given, jnp.inf)
    draws = jnp.where(is_rejected[:, :num_elements], given, first)
    return _propose_until_kept(propose, parameters, draws, jnp.any(jnp.sum(counts, axis=1) > num_spares))


def _draw_in_lockstep(propose: _Propose, shape: Shape, parameters: Float[Array, "R 1"]) -> Float[Array, "R S"]:
    """Propose for all elements at once until none of them is rejected."""
    draws = propose(lax.iota(jnp.uint32, math.prod(shape)).reshape(shape), jnp.uint32(0), parameters)
    return _propose_until_kept(propose, parameters, draws, jnp.any(draws == jnp.inf))


def _propose_until_kept(propose: _Propose, parameters: Array, draws: Array, is_short: Array) -> Array:
    """Propose again for all elements that were rejected until none is, if there are any."""
    index = lax.iota(jnp.uint32, draws.size).reshape(draws.shape)

    def propose_again(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        turn, draws, _ = carry
        draws = jnp.where(draws == jnp.inf, propose(index, turn, parameters), draws)
        return turn + 1, draws, jnp.any(draws == jnp.inf)

    return lax.while_loop(lambda carry: carry[2], propose_again, (jnp.uint32(1), draws, is_short))[1]


def _apart(compute: Callable[[Array], Array], shape: Shape, dtype: DTypeLike) -> Array:
    """Compute an array in a loop of its own, with one turn, number 0, which the compiler cannot tell.

    A CPU's would fuse the draws with what is done with them otherwise: inside the caller's own loop over (M, A), whose last
    axis is too short for vector units, or once more for every use.
    """
    if not is_on_cpu():
        return compute(jnp.uint32(0))

    def is_first(carry: tuple[Array, Array]) -> Array:
        turn, values = carry
        return (turn < 1) & (values.reshape(-1)[0] == -jnp.inf)

    start = (jnp.uint32(0), jnp.full(shape, -jnp.inf, dtype))
    return lax.while_loop(is_first, lambda carry: (carry[0] + 1, compute(carry[0])), start)[1]


def _propose_log_gamma_ratio(words: Words, index: Array, turn: Array, concentration: Array) -> Array:
    """Propose log(G / d) once for every element; infinity marks a rejection.

    With z standard normal and t = z / (3 sqrt(d)), d (1 + t)^3 is a draw of Gamma(concentration + 1) if it is kept with
    probability exp(3 d r(t)), r(t) = log(1 + t) - t + t^2/2 - t^3/3 <= 0; that is, if an exponential draw exceeds
    -3 d r(t). By its lack of memory, the excess is then itself an exponential draw, independent of t. So it can serve
    again as -log U in Gamma(a) = Gamma(a + 1) U^(1/a), which costs no random bits: every shape is raised by one, and
    between 95 % (shapes near 0) and 100 % (large ones) of proposals are kept; 98 % at shape 1.

    Logarithms are single: a ten-millionth of a draw's distance from d, and double ones are not computed in vectors on a CPU.
    """
    dtype, mode = concentration.dtype, _mode(concentration)
    high, low = threefry(words, index, 2 * turn)
    high2, low2 = threefry(words, index, 2 * turn + 1) if dtype == jnp.float64 else (None, None)
    noise = to_normal(high, high2, dtype)
    exponential = -jnp.log(to_unit_interval(low, low2, dtype).astype(jnp.float32)).astype(dtype)
    step = jnp.maximum(noise * lax.rsqrt(9.0 * mode), -1.0)  # a step below -1 has no cube root: rejected, as -1 is
    log_step = jnp.log1p(step.astype(jnp.float32)).astype(dtype)
    # The logarithm's first terms cancel: a small step needs the series that remains.
    near = step**4 * (-1 / 4 + step * (1 / 5 + step * (-1 / 6 + step * (1 / 7 + step * (-1 / 8 + step / 9)))))
    far = log_step - step + step**2 / 2 - step**3 / 3
    excess = exponential + 3.0 * mode * jnp.where(jnp.abs(step) < 0.1, near, far)
    return jnp.where(excess < 0, jnp.inf, 3.0 * log_step - excess / concentration)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _standard_normal(key: Key, shape: Shape, dtype: DTypeLike) -> Array:
    words, num_elements = key_words(key), math.prod(shape)
    if not num_elements:
        return jnp.zeros(shape, dtype)

    def draw(turn: Array) -> Array:
        high, low = threefry(words, lax.iota(jnp.uint32, num_elements), turn)
        return to_normal(high, low, dtype)

    return _apart(draw, (num_elements,), dtype).reshape(shape)
