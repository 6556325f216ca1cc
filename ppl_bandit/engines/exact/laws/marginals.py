"""The law of each arm's expected reward, where the exact engine knows it in closed form.

An expected reward that is affine in the latents inherits their family: one Beta or Gamma element scaled and shifted, a linear
form of a Gaussian block. Which elements it reads is found by `reads`; what is not plainly affine has no closed form here.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact.families.families import Layout, Posterior, blocks_of, reals_of
from ppl_bandit.engines.exact.laws import pseudo_counts as counting
from ppl_bandit.engines.exact.proof.affine_reads import reads_of_rewards
from ppl_bandit.numerics import best_arm_probs, marginal_laws, sampling
from ppl_bandit.numerics.tail_excess import tail
from ppl_bandit.program.jaxpr.affine_reads import NotAffine
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import outside_trace
from ppl_bandit.types import BestArmMoments, Key, Marginals

__all__ = ["marginals_of"]

Table: TypeAlias = Callable[[Key, int], Array]  # (key, M) -> (M, A)

_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round to 10 bits


def marginals_of(model: RewardModel, layout: Layout) -> Callable[[Posterior, Any], Marginals | None]:
    """Return (state, context) -> the law of every arm's expected reward, or None where it has no closed form.

    The program is looked at when it is first asked for: most bandits never do.
    """

    @functools.cache
    def offer() -> Callable[[Posterior, Any], Marginals] | None:
        with outside_trace():  # also while a decision is being traced
            return _offer_of(model, layout)

    def marginals(state: Posterior, context: Any) -> Marginals | None:
        known = offer()
        return None if known is None else known(state, context)

    return marginals


def _offer_of(model: RewardModel, layout: Layout) -> Callable[[Posterior, Any], Marginals] | None:
    try:
        reads_of_arms, power = reads_of_rewards(model, layout)
    except NotAffine:
        return None
    kinds = np.concatenate([np.full(site.size, site.kind, dtype=object) for site in layout.sites])
    places = np.concatenate([site.start + np.arange(site.size) for site in layout.sites])
    read = set(kinds[np.any(reads_of_arms, axis=0)])
    if len(read) != 1:
        return None
    (kind,) = read
    # An arm that reads nothing is sure, like one that is given away: it has an element that nobody reads, with slope 0.
    spare = iter(np.flatnonzero((kinds == kind) & ~np.any(reads_of_arms, axis=0))[:, None])
    reads = [np.flatnonzero(row) if row.any() else next(spare, row[:0]) for row in reads_of_arms]
    if any(row.size == 0 for row in reads):
        return None
    if kind == "real":
        blocks = [np.unique(layout.block_of_real[places[row]]) for row in reads]
        owners = [np.unique(layout.owner[own]) for own in blocks]
        if power != 1 or any(own.size != 1 for own in owners):
            return None
        groups = np.concatenate(owners)
        if np.unique(groups < 0).size > 1:
            return None
        is_scaled = bool(groups[0] >= 0)
        is_apart = np.concatenate(blocks).size == np.unique(np.concatenate(blocks)).size
        is_independent = is_apart and (not is_scaled or np.unique(groups).size == groups.size)
        find_noise = _when_asked(
            lambda: counting.own_noise(model, layout, groups) if is_scaled else counting.known_noise(model, layout)
        )

        def gaussian_offer(state: Posterior, context: Any) -> Marginals:
            law, table = _joint(model, layout, blocks, state, context)

            def counts() -> Float[Array, " A"] | None:
                noise = find_noise()
                if noise is None:
                    return None
                scale = (state.rate / state.shape)[groups] if is_scaled else 1.0
                return noise(context) * scale / law.width**2

            return _offer(law, is_independent, counts=counts)._replace(table=table)

        return gaussian_offer
    if kind not in ("unit", "positive") or any(row.size != 1 for row in reads):
        return None
    places = np.array([places[row[0]] for row in reads])
    is_independent = np.unique(places).size == places.size
    low, high = _bounds(layout, kind, places)
    if power == -1 and np.any(low != 0):
        return None
    make = _beta if kind == "unit" else _gamma
    if power == -1 and kind == "unit":
        return None
    find_spread = _when_asked(lambda: counting.element_noise(model, layout, kind, places))
    fixed = None if model.context is not None else run_once(lambda: _coefficients(model, power, None))

    def offer(state: Posterior, context: Any) -> Marginals:
        offset, slope = _coefficients(model, power, context) if fixed is None else fixed
        law = make(layout, state, places, low, high, offset, slope, power)

        def counts() -> Float[Array, " A"] | None:
            spread = find_spread()
            if spread is None:
                return None
            x = marginal_laws.node_values(law)
            noises = spread(((x - offset) / slope) ** power, context)
            return marginal_laws.average(law, noises) / marginal_laws.average(
                law, (x - marginal_laws.average(law, x)) ** 2
            )

        return _offer(law, is_independent, counts=counts)

    return offer


def _when_asked(find: Callable[[], Callable | None]) -> Callable[[], Callable | None]:
    """Look once, when first asked: few selectors ask, and looking compiles."""

    @functools.cache
    def found() -> Callable | None:
        with outside_trace():
            return find()

    return found


def _offer(law: marginal_laws.MarginalLaw, is_independent: bool, *, counts: Callable[[], Array | None]) -> Marginals:
    def probs(allowed: Bool[Array, " A"] | None = None) -> Float[Array, " A"]:
        return best_arm_probs.best_arm_probs(law, allowed)

    def best_arm_moments(allowed: Bool[Array, " A"] | None = None) -> BestArmMoments:
        return best_arm_probs.best_arm_moments(law, allowed)

    return Marginals(
        lambda x: marginal_laws.cdf(law, x),
        lambda order: marginal_laws.quantile(law, order),
        probs if is_independent else None,
        lambda: tail(law),
        counts,
        best_arm_moments=best_arm_moments if is_independent else None,
    )


def _beta(
    layout: Layout, state: Posterior, places: Any, low: Any, high: Any, offset: Any, slope: Any, power: int
) -> marginal_laws.MarginalLaw:
    del layout, power
    a, b = state.beta[places, 0], state.beta[places, 1]
    return marginal_laws.beta_law(a, b, offset + slope * low, slope * (high - low))


def _gamma(
    layout: Layout, state: Posterior, places: Any, low: Any, high: Any, offset: Any, slope: Any, power: int
) -> marginal_laws.MarginalLaw:
    del high
    exponent = power / layout.power[places]
    return marginal_laws.gamma_law(state.shape[places], state.rate[places], offset + slope * low, slope, exponent)


def _joint(
    model: RewardModel, layout: Layout, blocks: list[np.ndarray], state: Posterior, context: Any
) -> tuple[marginal_laws.MarginalLaw, Table]:
    """Return the law of linear forms, and a way to draw them together.

    Args:
        blocks: those that each form reads, x | u ~ Normal(mean, inverse(u precision)), u ~ Gamma(shape, rate), of one u, or of
            none; and none or all of the forms have one.
    """
    every, (num_blocks, size) = np.concatenate(blocks), layout.members.shape
    is_apart, is_single = np.unique(every).size == every.size, every.size == len(blocks)
    inverse_root, mean = _inverse_root(state.precision), reals_of(layout, state.mean)
    if is_single:  # a step along one place of all blocks moves each form by the slope in its own
        loc, slopes = _linear_form(model, layout, mean, context, layout.along_places)
        halves = jnp.einsum("ast,ta->as", inverse_root[every], slopes, precision=_HIGHEST)
    else:
        loc, slopes = _linear_form(model, layout, mean, context, np.eye(layout.count("real")))
        slopes = blocks_of(layout, slopes.T)
        halves = jnp.einsum("rst,art->ars", inverse_root, slopes, precision=_HIGHEST).reshape(-1, num_blocks * size)
    width = jnp.sqrt(jnp.sum(halves**2, axis=1))
    groups = np.array([layout.owner[own[0]] for own in blocks])
    is_scaled = bool(groups[0] >= 0)
    scales, which = np.unique(groups, return_inverse=True)
    if is_scaled:
        shape, rate = state.shape[groups], state.rate[groups]
        law = marginal_laws.student_t_law(2.0 * shape, loc, width * jnp.sqrt(rate / shape))
    else:
        law = marginal_laws.student_t_law(jnp.full(loc.shape, jnp.inf), loc, width)

    def table(key: Key, num_samples: int) -> Float[Array, "M A"]:
        key_scale, key_noise = jr.split(key)
        first: Any = np.arange(loc.size)
        if is_apart:
            spread = sampling.normal(key_noise, jnp.zeros_like(width), width, (num_samples,))
        else:
            root = _side_by_side(halves, every) if is_single else halves
            spread, first = _correlated(key_noise, root, num_samples), _twins(loc, root)
        if is_scaled:
            log_u = sampling.log_gamma(key_scale, state.shape[scales], (num_samples,), state.rate[scales])
            spread = jnp.exp(-0.5 * log_u)[:, which] * spread
        return (loc + spread)[:, first]

    return law, table


def _side_by_side(halves: Float[Array, "A S"], blocks: Int[np.ndarray, " A"]) -> Float[Array, "A K"]:
    """Return rows side by side: those of different blocks are orthogonal."""
    _, which = np.unique(blocks, return_inverse=True)
    place = jax.nn.one_hot(which, int(which.max()) + 1, dtype=halves.dtype)
    return (halves[:, None, :] * place[:, :, None]).reshape(halves.shape[0], -1)


def _correlated(key: Key, root: Float[Array, "A F"], num_samples: int) -> Float[Array, "M A"]:
    """Draw Gaussian vectors with covariance root root', from as few numbers as there are arms, or columns of the root."""
    num_arms, num_columns = root.shape
    if num_columns > num_arms:
        root = jnp.linalg.qr(root.T, mode="r").T
    one = jnp.ones((), root.dtype)
    noise = sampling.normal(key, 0.0 * one, one, (root.shape[1], num_samples))
    return jnp.matmul(root, noise, precision=_HIGHEST).T


def _twins(loc: Float[Array, " A"], root: Float[Array, "A F"]) -> Int[Array, " A"]:
    """Return, for each arm, the first that is one and the same: they must tie, and rounding would decide between them."""
    size = jnp.max(jnp.abs(root)) + jnp.max(jnp.abs(loc))
    gap = jnp.max(jnp.abs(root[:, None] - root[None]), axis=2) + jnp.abs(loc[:, None] - loc[None])
    return jnp.argmax(gap <= 64.0 * jnp.finfo(loc.dtype).eps * size, axis=1)


def _inverse_root(precision: Float[Array, "*batch D D"]) -> Float[Array, "*batch D D"]:
    """Return inverse(L), with precision = L L'; the square of inverse(L) row is the variance of row' x.

    It depends on the state alone: a batch of contexts shares it.
    """
    if precision.shape[-1] == 1:
        return 1.0 / jnp.sqrt(precision)
    identity = jnp.broadcast_to(jnp.eye(precision.shape[-1], dtype=precision.dtype), precision.shape)
    return jax.lax.linalg.triangular_solve(jnp.linalg.cholesky(precision), identity, left_side=True, lower=True)


def _linear_form(
    model: RewardModel, layout: Layout, centre: Array, context: Any, steps: Float[np.ndarray, "K D"]
) -> tuple[Float[Array, " A"], Float[Array, "K A"]]:
    """Return the expected rewards at a point of the reals, and what they change by along steps from it."""

    def rewards(real: Array) -> Array:
        latents = {site.name: jnp.ones(site.shape, real.dtype) for site in layout.sites}
        for site in layout.of("real"):
            latents[site.name] = real[site.start : site.start + site.size].reshape(site.shape)
        return _expected(model, latents, context)

    value, push = jax.linearize(rewards, centre)
    return value, jax.vmap(push)(jnp.asarray(steps, centre.dtype))


def _coefficients(model: RewardModel, power: int, context: Any) -> tuple[Array, Array]:
    """Return offset and slope of expected rewards that each read one element."""

    def at(value: float) -> Array:
        # With their type spelled out: constants of the program in single precision would otherwise make the result so.
        latents = {name: jnp.full(shape, value, jnp.result_type(float)) for name, shape in model.latent_shapes.items()}
        return _expected(model, latents, context)

    one = at(1.0)
    return (jnp.zeros_like(one), one) if power == -1 else (at(0.0), one - at(0.0))


def _expected(model: RewardModel, latents: dict[str, Array], context: Any) -> Float[Array, " A"]:
    return model.expected_rewards({name: value[None] for name, value in latents.items()}, context)[0]


def _bounds(layout: Layout, kind: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = (
        np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)])
        for end in ("low", "high")
    )
    return low[places], high[places]
