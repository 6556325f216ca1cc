"""The law of each arm's expected reward under the exact engine, if it has a closed form.

An expected reward that is affine in the latents inherits their family: one Beta or Gamma element scaled and shifted, or a
linear form of a Gaussian block. `program.jaxpr.entry_reads` finds the elements on which it depends; other expected rewards
have no closed form here.

The variance of one reward given the latents: the numerator of the number of rewards that a posterior is worth.

n = E Var(reward | latents) / Var E(reward | latents), which is a + b for Beta(a, b) and Bernoulli rewards. The denominator
belongs to the marginal law of the expected reward. The numerator has a closed form, or a one-dimensional quadrature, where the
variance of an arm's reward depends on no latent but the one that determines its mean, or the one that scales both. On which
latents it depends is found by derivatives at one generic point; for other programs n is not available here.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.inner.density import Posterior, generic_point, latents_at
from ppl_bandit.engines.inner.gaussian import blocks_of, reals_of
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, Layout
from ppl_bandit.engines.inner.registry import FAMILIES
from ppl_bandit.numerics import best_arm_probs, marginal_laws, sampling
from ppl_bandit.numerics.joint_events import joint_events
from ppl_bandit.numerics.tail_excess import tail
from ppl_bandit.program.jaxpr.entry_reads import Affine, affine_reads
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import outside_trace
from ppl_bandit.types import Key, Marginals


def constant_noise(model: RewardModel, layout: Layout) -> Callable[[Any], Float[Array, " A"]] | None:
    """Return context -> the variance of each arm's reward; None if the variance depends on a latent."""
    if not _reads_only(model, layout):
        return None
    return lambda context: _variances(model, _generic_latents(layout), context)


def scaled_noise(model: RewardModel, layout: Layout, owners: np.ndarray) -> Callable[[Any], Float[Array, " A"]] | None:
    """Return context -> u Var(reward | u) of each arm; None unless the variance is proportional to 1 / u.

    Args:
        owners: the positive element u that scales each arm's reals, (A,).
    """
    if not _reads_only(model, layout, POSITIVE, owners):
        return None

    def variances(u: float, context: Any) -> Array:
        latents = _generic_latents(layout)
        for site in layout.of(POSITIVE):
            power = layout.power[site.span].reshape(site.shape)
            latents[site.name] = jnp.asarray(site.low + u ** (1.0 / power))
        return u * _variances(model, latents, context)

    once, twice = run_once(lambda: (variances(1.0, model.context), variances(2.0, model.context)))
    if not np.allclose(once, twice, rtol=1e-4):
        return None
    return lambda context: variances(1.0, context)


def element_noise(
    model: RewardModel, layout: Layout, kind: str, elements: np.ndarray
) -> Callable[[Float[Array, "G A"], Any], Float[Array, "G A"]] | None:
    """Return (values of the element that each arm's mean depends on, context) -> Var(reward | value), or None.

    Args:
        elements: the element of the kind that each arm's mean depends on, (A,).
    """
    if not _reads_only(model, layout, kind, elements):
        return None

    def noise(values: Float[Array, "G A"], context: Any) -> Float[Array, "G A"]:
        latents = _generic_latents(layout)
        draws = {name: jnp.broadcast_to(value, (values.shape[0], *value.shape)) for name, value in latents.items()}
        for site in layout.of(kind):
            in_site = site.start + np.arange(site.size)
            arms = np.array([np.flatnonzero(elements == element)[:1].sum() for element in in_site], int)
            flat = draws[site.name].reshape(values.shape[0], -1).astype(values.dtype)
            # A gather costs more than the rest; it is not needed if element a belongs to arm a.
            own = values if np.array_equal(arms, np.arange(values.shape[1])) else values[:, arms]
            draws[site.name] = jnp.where(np.isin(in_site, elements), own, flat).reshape(-1, *site.shape)
        return model.reward_variances(draws, context)

    return noise


def _reads_only(model: RewardModel, layout: Layout, kind: str = "", elements: np.ndarray | None = None) -> bool:
    """Return whether the variance of each arm's reward is known and depends on no element but one of a kind, or on none.

    Args:
        elements: that element for each arm, (A,).
    """

    def measure() -> tuple[dict[str, Array], Array]:
        def variances(latents: dict[str, Array]) -> Array:
            return _variances(model, latents, model.context)

        # In reverse mode, which a proved program has; custom_vjp has no forward mode.
        return jax.jacrev(variances)(_generic_latents(layout)), variances(_generic_latents(layout))

    try:
        slopes, values = run_once(measure)
    except NotImplementedError:
        return False
    for site in layout.sites:
        is_read = np.asarray(slopes[site.name]).reshape(model.num_arms, -1) != 0
        if elements is not None and site.kind == kind:
            is_read &= site.start + np.arange(site.size) != elements[:, None]
        if is_read.any():
            return False
    return bool(np.all(np.isfinite(values)))


def _variances(model: RewardModel, latents: dict[str, Array], context: Any) -> Float[Array, " A"]:
    return model.reward_variances({name: value[None] for name, value in latents.items()}, context)[0]


def _generic_latents(layout: Layout) -> dict[str, Array]:
    """Return latents inside their supports, at no special value."""
    point = generic_point(layout)
    return latents_at(layout, point._replace(real=jnp.full_like(point.real, 0.7)))


MarginalsOf: TypeAlias = Callable[[Posterior, Any], Marginals]  # (state, context) -> marginals
Table: TypeAlias = Callable[[Key, int], Array]  # (key, M) -> (M, A)

_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round to 10 bits


def marginals_of(model: RewardModel, layout: Layout) -> Callable[[Posterior, Any], Marginals | None]:
    """Return (state, context) -> the law of every arm's expected reward, or None where it has no closed form.

    The program is analysed at the first call, which most bandits never make.
    """
    find = _find_once(lambda: _find_marginals(model, layout))

    def marginals(state: Posterior, context: Any) -> Marginals | None:
        found = find()
        return None if found is None else found(state, context)

    return marginals


def _find_once(find: Callable[[], Callable | None]) -> Callable[[], Callable | None]:
    """Return a function that computes a value at its first call, possibly while a decision is traced, and caches it."""

    @functools.cache
    def found() -> Callable | None:
        with outside_trace():
            return find()

    return found


def _find_marginals(model: RewardModel, layout: Layout) -> MarginalsOf | None:
    found = _reads_of_rewards(model, layout)
    if found is None:
        return None
    reads_of_arms, power = found.reads, found.power
    kinds = np.concatenate([np.full(site.size, site.kind, dtype=object) for site in layout.sites])
    # 32 bits: JAX refuses an index of 64 bits that it has read with x64 before, where x64 is off.
    elements = np.concatenate([site.start + np.arange(site.size, dtype=np.int32) for site in layout.sites])
    kinds_read = set(kinds[np.any(reads_of_arms, axis=0)])
    if len(kinds_read) != 1:
        return None
    (kind,) = kinds_read
    # An arm that depends on no latent has a known reward: it gets an element that no other arm depends on, with slope 0.
    spare = iter(np.flatnonzero((kinds == kind) & ~np.any(reads_of_arms, axis=0))[:, None])
    reads = [np.flatnonzero(row) if row.any() else next(spare, row[:0]) for row in reads_of_arms]
    if any(row.size == 0 for row in reads):
        return None
    own = [elements[row] for row in reads]
    if kind == REAL:
        return _gaussian_marginals(model, layout, own) if power == 1 else None
    if FAMILIES[kind].marginal_law is None or any(row.size != 1 for row in own):
        return None
    return _element_marginals(model, layout, kind, np.concatenate(own), power)


def _reads_of_rewards(model: RewardModel, layout: Layout) -> Affine | None:
    """Return the expected reward of each arm as an affine function of all elements, in the order of the layout's sites."""
    shapes = {site.name: jax.ShapeDtypeStruct(site.shape, jnp.result_type(float)) for site in layout.sites}
    closed = jax.make_jaxpr(functools.partial(_expected_rewards, model))(shapes, model.context)
    sizes = [site.size for site in layout.sites]
    elements = dict(zip(shapes, np.split(np.eye(sum(sizes), dtype=bool), np.cumsum(sizes)[:-1]), strict=True))
    # A dict is flattened in the order of its sorted keys.
    return affine_reads(closed, [elements[name].reshape(*shapes[name].shape, -1) for name in sorted(shapes)])


def _gaussian_marginals(model: RewardModel, layout: Layout, reads: list[np.ndarray]) -> MarginalsOf | None:
    """Return the marginals of linear forms of Gaussian blocks; each reads blocks with one owner, or none with an owner."""
    blocks = [np.unique(layout.block_of_real[row]) for row in reads]
    owners = [np.unique(layout.owner[own]) for own in blocks]
    if any(own.size != 1 for own in owners):
        return None
    owner = np.concatenate(owners)
    if np.unique(owner < 0).size > 1:
        return None
    is_scaled, every = bool(owner[0] >= 0), np.concatenate(blocks)
    is_independent = every.size == np.unique(every).size and (not is_scaled or np.unique(owner).size == owner.size)
    find_noise = _find_once(lambda: scaled_noise(model, layout, owner) if is_scaled else constant_noise(model, layout))

    def marginals(state: Posterior, context: Any) -> Marginals:
        law, table = _joint_law(model, layout, blocks, state, context)

        def pseudo_counts() -> Float[Array, " A"] | None:
            noise = find_noise()
            if noise is None:
                return None
            variance = _rate_over_shape(state)[owner] if is_scaled else 1.0
            return noise(context) * variance / law.width**2

        return _marginals(law, is_independent, pseudo_counts)._replace(table=table)

    return marginals


def _element_marginals(
    model: RewardModel, layout: Layout, kind: str, elements: Int[np.ndarray, " A"], exponent: int
) -> MarginalsOf | None:
    """Return the marginals of offset + slope z^exponent, for one element z of a family per arm."""
    family = FAMILIES[kind]
    assert family.marginal_law is not None
    is_independent = np.unique(elements).size == elements.size
    low, high = (bound[elements] for bound in layout.bounds(kind))
    power = layout.power[elements] if kind == POSITIVE else 1.0
    law_of = functools.partial(family.marginal_law, low=low, high=high, power=power, exponent=exponent)
    ones = np.ones((elements.size, 2))
    if jax.eval_shape(lambda: law_of(ones, offset=0.0, slope=1.0)) is None:
        return None
    find_noise = _find_once(lambda: element_noise(model, layout, kind, elements))
    fixed = None if model.context is not None else run_once(lambda: _coefficients(model, exponent, None))

    def marginals(state: Posterior, context: Any) -> Marginals:
        offset, slope = _coefficients(model, exponent, context) if fixed is None else fixed
        law = law_of(state.elements[kind][elements], offset=offset, slope=slope)
        assert law is not None

        def pseudo_counts() -> Float[Array, " A"] | None:
            noise = find_noise()
            if noise is None:
                return None
            x = marginal_laws.average_nodes(law)
            variances = noise(((x - offset) / slope) ** exponent, context)
            return marginal_laws.average(law, variances) / marginal_laws.average(
                law, (x - marginal_laws.average(law, x)) ** 2
            )

        return _marginals(law, is_independent, pseudo_counts)

    return marginals


def _marginals(
    law: marginal_laws.MarginalLaw, is_independent: bool, pseudo_counts: Callable[[], Array | None]
) -> Marginals:
    found = Marginals(
        functools.partial(marginal_laws.cdf, law),
        functools.partial(marginal_laws.quantile, law),
        tail=functools.partial(tail, law),
        pseudo_counts=pseudo_counts,
    )
    if not is_independent:
        return found
    return found._replace(
        best_arm_probs=functools.partial(best_arm_probs.best_arm_probs, law),
        best_arm_moments=functools.partial(best_arm_probs.best_arm_moments, law),
        joint_events=functools.partial(joint_events, law),
    )


def _rate_over_shape(state: Posterior) -> Float[Array, " G"]:
    return state.elements[POSITIVE][:, 1] / state.elements[POSITIVE][:, 0]


def _joint_law(
    model: RewardModel, layout: Layout, blocks: list[np.ndarray], state: Posterior, context: Any
) -> tuple[marginal_laws.MarginalLaw, Table]:
    """Return the law of each arm's linear form, and a function that draws all of them jointly.

    Args:
        blocks: the Gaussian blocks that each form reads, all scaled by one u, or by none.
    """
    every, (num_blocks, size) = np.concatenate(blocks), layout.members.shape
    is_apart, is_single = np.unique(every).size == every.size, every.size == len(blocks)
    inverse_root, mean = sampling.inverse_root(state.precision), reals_of(layout, state.mean)
    if is_single:  # a step along one column of all blocks changes each form by the slope in its own block
        loc, slopes = _linear_form(model, layout, mean, context, layout.along_columns)
        halves = jnp.einsum("ast,ta->as", inverse_root[every], slopes, precision=_HIGHEST)
    else:
        loc, slopes = _linear_form(model, layout, mean, context, np.eye(layout.count(REAL)))
        slopes = blocks_of(layout, slopes.T)
        halves = jnp.einsum("rst,art->ars", inverse_root, slopes, precision=_HIGHEST).reshape(-1, num_blocks * size)
    width = jnp.sqrt(jnp.sum(halves**2, axis=1))
    owner = np.array([layout.owner[own[0]] for own in blocks])
    is_scaled = bool(owner[0] >= 0)
    scales, which = np.unique(owner, return_inverse=True)
    if is_scaled:
        degrees = 2.0 * state.elements[POSITIVE][owner, 0]
        law = marginal_laws.student_t_law(degrees, loc, width * jnp.sqrt(_rate_over_shape(state)[owner]))
    else:
        law = marginal_laws.student_t_law(jnp.full(loc.shape, jnp.inf), loc, width)

    def table(key: Key, num_samples: int) -> Float[Array, "M A"]:
        key_scale, key_noise = jr.split(key)
        first: Any = np.arange(loc.size)
        if is_apart:
            spread = sampling.normal(key_noise, jnp.zeros_like(width), width, (num_samples,))
        else:
            root = _block_columns(halves, every) if is_single else halves
            spread, first = _correlated(key_noise, root, num_samples), _first_equal_arm(loc, root)
        if is_scaled:
            shape, rate = state.elements[POSITIVE][scales].T
            log_u = sampling.log_gamma(key_scale, shape, (num_samples,), rate)
            spread = jnp.exp(-0.5 * log_u)[:, which] * spread
        return (loc + spread)[:, first]

    return law, table


def _block_columns(halves: Float[Array, "A S"], blocks: Int[np.ndarray, " A"]) -> Float[Array, "A K"]:
    """Return rows with the columns of each block apart, so that rows of different blocks are orthogonal."""
    _, which = np.unique(blocks, return_inverse=True)
    place = jax.nn.one_hot(which, int(which.max()) + 1, dtype=halves.dtype)
    return (halves[:, None, :] * place[:, :, None]).reshape(halves.shape[0], -1)


def _correlated(key: Key, root: Float[Array, "A F"], num_samples: int) -> Float[Array, "M A"]:
    """Draw Gaussian vectors with covariance root root'."""
    num_arms, num_columns = root.shape
    if num_columns > num_arms:
        root = jnp.linalg.qr(root.T, mode="r").T
    one = jnp.ones((), root.dtype)
    noise = sampling.normal(key, 0.0 * one, one, (root.shape[1], num_samples))
    return jnp.matmul(root, noise, precision=_HIGHEST).T


def _first_equal_arm(loc: Float[Array, " A"], root: Float[Array, "A F"]) -> Int[Array, " A"]:
    """Return, for each arm, the first with the same expected reward: equal arms must tie in spite of rounding."""
    size = jnp.max(jnp.abs(root)) + jnp.max(jnp.abs(loc))
    gap = jnp.max(jnp.abs(root[:, None] - root[None]), axis=2) + jnp.abs(loc[:, None] - loc[None])
    return jnp.argmax(gap <= 64.0 * jnp.finfo(loc.dtype).eps * size, axis=1)


def _linear_form(
    model: RewardModel, layout: Layout, centre: Array, context: Any, steps: Any
) -> tuple[Float[Array, " A"], Float[Array, "K A"]]:
    """Return the expected rewards at a point of the reals, and their derivatives along steps (K, D)."""

    def rewards(real: Array) -> Array:
        latents = {site.name: jnp.ones(site.shape, real.dtype) for site in layout.sites}
        for site in layout.of(REAL):
            latents[site.name] = real[site.start : site.start + site.size].reshape(site.shape)
        return _expected_rewards(model, latents, context)

    steps = jnp.asarray(steps, centre.dtype)
    try:
        value, push = jax.linearize(rewards, centre)
        return value, jax.vmap(push)(steps)
    except TypeError:  # a program with custom_vjp has no forward mode
        value, pull = jax.vjp(rewards, centre)
        jacobian = jax.vmap(lambda row: pull(row)[0])(jnp.eye(value.size, dtype=value.dtype))  # (A, D)
        return value, jnp.matmul(steps, jacobian.T, precision=_HIGHEST)


def _coefficients(model: RewardModel, power: int, context: Any) -> tuple[Array, Array]:
    """Return offset and slope of expected rewards that depend on one element each."""

    def at(value: float) -> Array:
        # With an explicit dtype: constants of the program in single precision would otherwise determine that of the result.
        latents = {name: jnp.full(shape, value, jnp.result_type(float)) for name, shape in model.latent_shapes.items()}
        return _expected_rewards(model, latents, context)

    one = at(1.0)
    return (jnp.zeros_like(one), one) if power == -1 else (at(0.0), one - at(0.0))


def _expected_rewards(model: RewardModel, latents: dict[str, Array], context: Any) -> Float[Array, " A"]:
    return model.expected_rewards({name: value[None] for name, value in latents.items()}, context)[0]
