"""Random draws for the engines: fast on CPUs and accelerators alike, and right far into the tails.

Gamma draws follow Marsaglia and Tsang (2000, "A simple method for generating gamma variables"), in lockstep: all
elements propose together, and rejected ones propose again. `jax.random.gamma` runs one loop per element instead, which
costs a CPU tens of times as much. Beta and Dirichlet draws are ratios of gamma draws, taken in logs, so that shapes far
below one do not underflow.

Random bits are the Threefry-2x32 hash (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of an
element's index and attempt under the caller's key: the hash of `jax.random`, written out in full, because jax keeps it
in a loop on CPUs and a loop does not fuse with the arithmetic around it.

Every function takes a key first and spends it, follows the floating-point type of its parameters, and runs under
`jit`, `vmap` and `scan`. Gradients do not flow through gamma, beta and Dirichlet draws.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, UInt32

from ppl_bandit.types import Key

__all__ = [
    "beta",
    "binomial",
    "dirichlet",
    "fold_key",
    "gamma",
    "log_gamma",
    "multinomial",
    "multivariate_normal_precision",
    "normal",
    "normal_inverse_gamma",
    "student_t",
    "uniform",
]

_WIDENINGS = 8  # of a binomial's search, between two looks at whether it is over: looking costs an accelerator dearly

_Shape: TypeAlias = tuple[int, ...]
_Search: TypeAlias = tuple[Array, Array, Array, Array, Array]
_Words: TypeAlias = tuple[UInt32[Array, ""], UInt32[Array, ""]]  # a Threefry key


def log_gamma(key: Key, concentration: Float[Array, "..."], sample_shape: _Shape = ()) -> Float[Array, "..."]:
    """Draw the logarithm of Gamma(concentration, 1) variables.

    A draw of shape 1e-3 is typically e^-1000, which only its logarithm can hold.

    Args:
        concentration: shape parameters, positive; a draw of any other is nan.
        sample_shape: axes of independent draws, put in front of those of `concentration`.

    Returns:
        Draws of shape `sample_shape + concentration.shape`.
    """
    concentration = _as_float(concentration)
    return _log_gamma_over(key, concentration, jnp.ones_like(concentration), sample_shape)


def gamma(key: Key, concentration: Float[Array, "..."], sample_shape: _Shape = ()) -> Float[Array, "..."]:
    """Draw Gamma(concentration, 1) variables; divide by a rate, or multiply by a scale, for others.

    Args:
        concentration: shape parameters, positive.
        sample_shape: axes of independent draws, put in front of those of `concentration`.

    Returns:
        Draws of shape `sample_shape + concentration.shape`; zero where a draw is below the smallest float.
    """
    concentration = _as_float(concentration)
    return _mode(concentration) * jnp.exp(_log_gamma_ratio(key, concentration, sample_shape))


def beta(
    key: Key,
    concentration1: Float[Array, "..."],
    concentration0: Float[Array, "..."],
    sample_shape: _Shape = (),
) -> Float[Array, "..."]:
    """Draw Beta(concentration1, concentration0) variables.

    Args:
        concentration1: weight of one, positive; broadcasts against `concentration0`.
        concentration0: weight of zero, positive.
        sample_shape: axes of independent draws, put in front of those of the parameters.

    Returns:
        Draws in [0, 1]; exactly 0 or 1 where a draw is closer to it than floats can tell.
    """
    both = jnp.stack(jnp.broadcast_arrays(_as_float(concentration1), _as_float(concentration0)))
    ratios = jnp.moveaxis(_log_gamma_ratio(key, both, sample_shape), len(sample_shape), 0)
    modes = _mode(both)
    # The modes enter as a ratio: the difference of two large logarithms would lose the digits that the draws vary in.
    return jax.nn.sigmoid(jnp.log(modes[0] / modes[1]) + (ratios[0] - ratios[1]))


def dirichlet(key: Key, concentration: Float[Array, "... K"], sample_shape: _Shape = ()) -> Float[Array, "... K"]:
    """Draw Dirichlet(concentration) vectors; the last axis holds the categories.

    Args:
        concentration: weights of the categories, positive.
        sample_shape: axes of independent draws, put in front of those of `concentration`.

    Returns:
        Draws whose last axis sums to one.
    """
    concentration = _as_float(concentration)
    modes = _mode(concentration)
    relative = jnp.log(modes / jnp.max(modes, axis=-1, keepdims=True))
    return jax.nn.softmax(relative + _log_gamma_ratio(key, concentration, sample_shape), axis=-1)


def normal(
    key: Key, mean: Float[Array, "..."], scale: Float[Array, "..."], sample_shape: _Shape = ()
) -> Float[Array, "..."]:
    """Draw Normal(mean, scale) variables.

    Args:
        mean: broadcasts against `scale`.
        scale: standard deviations; zero gives the mean.
        sample_shape: axes of independent draws, put in front of those of the parameters.

    Returns:
        Draws of shape `sample_shape` + the parameters' shape.
    """
    mean, scale = jnp.broadcast_arrays(_as_float(mean), _as_float(scale))
    dtype = jnp.result_type(mean, scale)
    return mean + scale * _standard_normal(key, sample_shape + mean.shape, dtype)


def multivariate_normal_precision(
    key: Key,
    mean: Float[Array, "... D"],
    precision_cholesky: Float[Array, "... D D"],
    sample_shape: _Shape = (),
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
    mean, factor = _as_float(mean), _as_float(precision_cholesky)
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
    sample_shape: _Shape = (),
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
    df, loc, scale = jnp.broadcast_arrays(*map(_as_float, (df, loc, scale)))
    key_precision, key_noise = jr.split(key)
    is_normal = jnp.isinf(df)
    half = jnp.where(is_normal, 1.0, 0.5 * df)
    log_precision = jnp.where(is_normal, 0.0, _log_gamma_over(key_precision, half, half, sample_shape))
    noise = _standard_normal(key_noise, sample_shape + loc.shape, jnp.result_type(df, loc, scale))
    return loc + scale * noise * jnp.exp(-0.5 * log_precision)


def normal_inverse_gamma(
    key: Key,
    mean: Float[Array, "... D"],
    precision_cholesky: Float[Array, "... D D"],
    concentration: Float[Array, "..."],
    rate: Float[Array, "..."],
    sample_shape: _Shape = (),
) -> tuple[Float[Array, "..."], Float[Array, "... D"]]:
    """Draw variances from InverseGamma(concentration, rate), and Gaussian vectors of that variance.

    Given its variance v, a vector has covariance v (L L')^-1; over all variances it is a multivariate Student-t.

    Args:
        mean: location of each vector.
        precision_cholesky: lower-triangular L.
        concentration: of each variance, positive.
        rate: of each variance, positive.
        sample_shape: axes of independent draws, put in front of those of the parameters.

    Returns:
        The logarithms of 1 / v, which hold variances that floats cannot, and the vectors.
    """
    key_precision, key_vector = jr.split(key)
    log_precision = _log_gamma_over(key_precision, _as_float(concentration), _as_float(rate), sample_shape)
    spread = multivariate_normal_precision(key_vector, jnp.zeros_like(mean), precision_cholesky, sample_shape)
    return log_precision, mean + jnp.exp(-0.5 * log_precision)[..., None] * spread


def binomial(key: Key, num: Float[Array, "..."], prob: Float[Array, "..."]) -> Float[Array, "..."]:
    """Draw Binomial(num, prob) variables, as floats.

    By inversion from the mode outwards: a handful of standard deviations of additions, all elements in lockstep.

    Args:
        num: whole numbers of at least 0; broadcasts against `prob`.
        prob: in [0, 1].
    """
    prob = _as_float(prob)
    num, prob = jnp.broadcast_arrays(jnp.asarray(num, prob.dtype), prob)
    return _binomial(uniform(key, prob.shape, prob.dtype), num, prob)


def _binomial(uniform: Array, num: Array, prob: Array) -> Array:
    inside = jnp.clip(prob, jnp.finfo(prob.dtype).tiny, 1.0 - jnp.finfo(prob.dtype).epsneg)
    odds = inside / (1.0 - inside)
    mode = jnp.minimum(jnp.floor((num + 1.0) * inside), num)
    at_mode = _binomial_mass_near_mean(mode, num, inside)

    def widen(state: _Search) -> _Search:
        distance, rest, above, below, found = state
        up, down = mode + distance, mode - distance
        above = above * odds * (num - up + 1.0) / up
        below = below * (down + 1.0) / (odds * jnp.maximum(num - down, 1.0))
        above, below = jnp.where(up <= num, above, 0.0), jnp.where(down >= 0, below, 0.0)
        is_open = found < 0
        found = jnp.where(is_open & (rest < above), up, found)
        found = jnp.where((found < 0) & (rest < above + below), down, found)
        rest = jnp.where(is_open, rest - above - below, rest)
        # At most num values are left, none of them likelier than these two. What all of them cannot use up is a rounding
        # error, and belongs to the mode: one element that ran to the ends of its range would hold up all others.
        found = jnp.where((found < 0) & (rest >= num * (above + below)), mode, found)
        return distance + 1.0, rest, above, below, found

    first = jnp.where(uniform < at_mode, mode, -1.0)
    start = (jnp.ones_like(prob), uniform - at_mode, at_mode, at_mode, first)

    # A small loop is one piece of machine code on a CPU.
    num_widenings = 1 if jax.default_backend() == "cpu" else _WIDENINGS

    def widen_often(state: _Search) -> _Search:
        for _ in range(num_widenings):
            state = widen(state)
        return state

    found = lax.while_loop(lambda state: jnp.any(state[-1] < 0), widen_often, start)[-1]
    return jnp.where(prob <= 0, 0.0, jnp.where(prob >= 1, num, found))


def _binomial_mass_near_mean(count: Array, num: Array, prob: Array) -> Array:
    """Return the probability of `count`, within one of its mean, under Binomial(num, prob), to full relative precision.

    By Loader (2000, "Fast and accurate computation of binomial probabilities"): what Stirling's formula lacks of each
    factorial, and the deviance. Log factorials themselves are thousands, and their difference keeps few digits.
    """
    others = num - count
    lacking = _stirling_error(num) - _stirling_error(count) - _stirling_error(others)
    deviance = _deviance(count, num * prob) + _deviance(others, num * (1.0 - prob))
    inner = jnp.sqrt(num / (2.0 * jnp.pi * jnp.maximum(count * others, 1.0))) * jnp.exp(lacking - deviance)
    edge = jnp.exp(num * jnp.where(count == 0, jnp.log1p(-prob), jnp.log(prob)))
    return jnp.where((count == 0) | (others == 0), edge, inner)


_TABLED = 16
_STIRLING_ERRORS = tuple(
    0.0 if n == 0 else math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    for n in range(_TABLED)
)


def _stirling_error(num: Array) -> Array:
    """Return log(n!) less Stirling's formula for it, for whole n."""
    inverse = 1.0 / jnp.maximum(num, float(_TABLED))
    square = inverse * inverse
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188))))
    tabled = jnp.asarray(_STIRLING_ERRORS, num.dtype)[jnp.clip(num, 0, _TABLED - 1).astype(jnp.int32)]
    return jnp.where(num < _TABLED, tabled, series)


def _deviance(count: Array, mean: Array) -> Array:
    """Return count log(count / mean) + mean - count, for a count within one of the mean."""
    relative = (count - mean) / mean
    return mean * ((1.0 + relative) * jnp.log1p(relative) - relative)


def multinomial(key: Key, num: int, probs: Float[Array, " K"]) -> Float[Array, " K"]:
    """Draw the counts of `num` independent draws from Cat(probs), as floats: one binomial after another.

    Args:
        probs: nonnegative, and sum to 1.
    """
    probs = _as_float(probs)
    later = jnp.cumsum(probs[::-1])[::-1]  # of this category and those after it
    shares = jnp.where(later > 0, probs / jnp.where(later > 0, later, 1.0), 0.0)
    left = jnp.asarray(num, probs.dtype)
    uniforms = uniform(key, (probs.size - 1,), probs.dtype)
    if probs.size == 2:
        first = _binomial(uniforms[0], left, jnp.clip(shares[0], 0.0, 1.0))
        return jnp.stack([first, num - first])

    def take(left: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        count = _binomial(row[0], left, jnp.clip(row[1], 0.0, 1.0))
        return left - count, count

    left, counts = lax.scan(take, left, (uniforms, shares[:-1]))
    return jnp.append(counts, left)


def fold_key(seed: Int[Array, ""], *numbers: int | Int[Array, ""]) -> Key:
    """Return the key of a seed and of some numbers, such as that of a decision.

    As `jax.random.key` and `fold_in` do, but as plain arithmetic, which a CPU runs in a fraction of the time.
    """
    words = _two_words(seed)
    for number in numbers:
        words = _threefry(words, *_two_words(number))
    return jr.wrap_key_data(jnp.stack(words), impl="threefry2x32")


def _two_words(number: Any) -> _Words:
    number = jnp.asarray(number).astype(jnp.int64)
    return (number >> 32).astype(jnp.uint32), (number & 0xFFFFFFFF).astype(jnp.uint32)


def uniform(key: Key, shape: _Shape, dtype: DTypeLike, turn: Any = 0) -> Float[Array, "..."]:
    """Draw uniform numbers strictly between 0 and 1; another turn of a loop gives others under the same key."""
    turn = jnp.asarray(turn).astype(jnp.uint32)
    index = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    high, low = _threefry(_key_words(key), index, turn)
    below_one = 1.0 - float(jnp.finfo(dtype).epsneg)
    return jnp.minimum(_to_unit_interval(high, low if dtype == jnp.float64 else None, dtype), below_one)


def _as_float(parameter: Array) -> Array:
    """Give a parameter the type that its draws have: at least 32 bits of floating point."""
    parameter = jnp.asarray(parameter)
    return parameter.astype(jnp.promote_types(jnp.result_type(parameter, float), jnp.float32))


def _log_gamma_over(key: Key, concentration: Array, rate: Array, sample_shape: _Shape) -> Array:
    """Draw the logarithm of Gamma(concentration, rate) variables; both parameters may be large."""
    return jnp.log(_mode(concentration) / rate) + _log_gamma_ratio(key, concentration, sample_shape)


def _mode(concentration: Array) -> Array:
    # Marsaglia and Tsang's d, of the shape that is proposed: concentration + 1.
    return concentration + 2.0 / 3.0


@functools.partial(jax.jit, static_argnames="sample_shape")  # outside jit, a loop would compile at every call
def _log_gamma_ratio(key: Key, concentration: Array, sample_shape: _Shape) -> Array:
    """Draw log(G / d) for G ~ Gamma(concentration, 1) and d its `_mode`; near 0 and precise for large shapes."""
    # Samples lie along the last axis while drawing: a few parameters along it would leave vector units idle.
    flat = concentration.reshape(-1, 1)
    # A proposal with a nan parameter is a nan, not a rejection; a parameter below zero might be rejected for ever.
    flat = jnp.where(flat > 0, flat, jnp.nan)

    def propose(words: _Words, index: Array, attempt: Array) -> Array:
        return _propose_log_gamma_ratio(words, index, attempt, flat)

    # Of the millions of elements that an accelerator draws some are always rejected, and looking costs it a sixth of the time.
    # On a CPU the gain is smaller, and each attempt takes a quarter of a second more to compile.
    num_unseen = 0 if jax.default_backend() == "cpu" else 2
    ratios = _draw_in_lockstep(key, propose, (flat.size, math.prod(sample_shape)), concentration.dtype, num_unseen)
    return ratios.T.reshape(sample_shape + concentration.shape)


def _draw_in_lockstep(
    key: Key, propose: Callable[[_Words, Array, Array], Array], shape: _Shape, dtype: DTypeLike, num_unseen: int = 0
) -> Array:
    """Repeat `propose(words, index, attempt)`, for all elements at once, until none of them is infinite (rejected).

    Args:
        num_unseen: attempts before the first look at whether any is.
    """
    words = _key_words(key)
    index = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)

    def propose_where_rejected(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        attempt, draws = carry
        return attempt + 1, jnp.where(draws == jnp.inf, propose(words, index, attempt), draws)

    carry = (jnp.uint32(0), jnp.full(shape, jnp.inf, dtype))
    for _ in range(num_unseen):
        carry = propose_where_rejected(carry)
    return lax.while_loop(lambda carry: jnp.any(carry[1] == jnp.inf), propose_where_rejected, carry)[1]


def _propose_log_gamma_ratio(words: _Words, index: Array, attempt: Array, concentration: Array) -> Array:
    """Propose log(G / d) once for every element; infinity marks a rejection.

    With z standard normal and t = z / (3 sqrt(d)), d (1 + t)^3 is a draw of Gamma(concentration + 1) if it is kept with
    probability exp(3 d r(t)), r(t) = log(1 + t) - t + t^2/2 - t^3/3 <= 0; that is, if an exponential draw exceeds
    -3 d r(t). By its lack of memory, the excess is then itself an exponential draw, independent of t. So it can serve
    again as -log U in Gamma(a) = Gamma(a + 1) U^(1/a), which costs no random bits: every shape is raised by one, and
    between 95 % (shapes near 0) and 100 % (large ones) of proposals are kept; 98 % at shape 1.
    """
    mode = _mode(concentration)
    high, low = _threefry(words, index, 2 * attempt)
    high2, low2 = _threefry(words, index, 2 * attempt + 1) if concentration.dtype == jnp.float64 else (None, None)
    noise = _to_normal(high, high2, concentration.dtype)
    exponential = -jnp.log(_to_unit_interval(low, low2, concentration.dtype))
    step = jnp.maximum(noise * lax.rsqrt(9.0 * mode), -1.0)  # a step below -1 has no cube root: rejected, as -1 is
    log_step = jnp.log1p(step)
    # The logarithm's first terms cancel: a small step needs the series that remains.
    near = step**4 * (-1 / 4 + step * (1 / 5 + step * (-1 / 6 + step / 7)))
    far = log_step - step + step**2 / 2 - step**3 / 3
    excess = exponential + 3.0 * mode * jnp.where(jnp.abs(step) < 0.03, near, far)
    return jnp.where(excess < 0, jnp.inf, 3.0 * log_step - excess / concentration)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _standard_normal(key: Key, shape: _Shape, dtype: DTypeLike) -> Array:
    # Nothing is rejected, but the loop keeps the compiler from drawing inside the caller's own loop over (M, A), whose
    # last axis is too short for vector units: 6 ns a draw and not 39.
    def propose(words: _Words, index: Array, attempt: Array) -> Array:
        high, low = _threefry(words, index, attempt)
        return _to_normal(high, low, dtype)

    return _draw_in_lockstep(key, propose, (math.prod(shape),), dtype).reshape(shape)


def _to_normal(high: Array, low: Array | None, dtype: DTypeLike) -> Array:
    """Turn random words into standard normal draws; `low` adds digits that only float64 can hold."""
    symmetric = lax.bitcast_convert_type(high, jnp.int32).astype(dtype) * 2.0**-31
    if low is not None and dtype == jnp.float64:
        symmetric += low.astype(dtype) * 2.0**-63
    bound = 1.0 - float(jnp.finfo(dtype).epsneg)
    return math.sqrt(2.0) * lax.erf_inv(jnp.clip(symmetric, -bound, bound))


def _to_unit_interval(high: Array, low: Array | None, dtype: DTypeLike) -> Array:
    """Turn random words into uniform draws, never 0 and as fine-grained near 0 as their bits allow."""
    if low is None:
        return (high.astype(dtype) + 0.5) * 2.0**-32
    return high.astype(dtype) * 2.0**-32 + (low.astype(dtype) + 0.5) * 2.0**-64


def _key_words(key: Key) -> _Words:
    """Read a Threefry key as its two words, and draw two from a key of another kind."""
    words = jr.key_data(key)
    if words.shape[-1] != 2:
        words = jr.bits(key, (2,), jnp.uint32)
    return words[0], words[1]


@jax.jit  # traced once per shape, not at every use
def _threefry(
    words: _Words, index: UInt32[Array, "..."], attempt: UInt32[Array, ""]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Hash (index, attempt) under a key to two random words: 20 rounds of Threefry-2x32."""
    schedule = (*words, words[0] ^ words[1] ^ jnp.uint32(0x1BD11BDA))
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    left, right = index + schedule[0], attempt + schedule[1]
    for position in range(20):
        rotation = rotations[position % 8]
        left = left + right
        right = left ^ ((right << rotation) | (right >> (32 - rotation)))
        if position % 4 == 3:
            injection = position // 4 + 1
            left = left + schedule[injection % 3]
            right = right + schedule[(injection + 1) % 3] + jnp.uint32(injection)
    return left, right
