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

from ppl_bandit.engines.approximate.blocks import independent_blocks
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.exact import pseudo_counts as counting
from ppl_bandit.engines.exact.families import Layout, Posterior, reals_of
from ppl_bandit.engines.exact.reads import NotAffine, reads_of_rewards
from ppl_bandit.numerics import contests, laws, sampling
from ppl_bandit.numerics.compilation import run_once
from ppl_bandit.numerics.excess import tail
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Contest, Key, Marginals

__all__ = ["marginals_of", "parts_apart"]

Table: TypeAlias = Callable[[Key, int], Array]  # (key, M) -> (M, A)
_Members: TypeAlias = tuple[Int[np.ndarray, "A S"], Bool[np.ndarray, "A S"]]

_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round to 10 bits


def marginals_of(model: RewardModel, layout: Layout) -> Callable[[Posterior, Any], Marginals | None]:
    """Return (state, context) -> the law of every arm's expected reward, or None where it has no closed form.

    The program is looked at when it is first asked for: most bandits never do.
    """

    @functools.cache
    def offer() -> Callable[[Posterior, Any], Marginals] | None:
        with jax.core.eval_context():  # also while a decision is being traced
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
    reads = [np.flatnonzero(row) for row in reads_of_arms]
    if any(row.size == 0 for row in reads) or len({kinds[e] for row in reads for e in row}) != 1:
        return None
    kind = kinds[reads[0][0]]
    if kind == "real":
        owner = _owners(layout)
        own = [{int(owner[places[e]]) for e in row} for row in reads]
        if power != 1 or any(len(groups) != 1 for groups in own):
            return None
        groups = np.array([groups.pop() for groups in own])
        if np.all(groups < 0):
            find_noise = _when_asked(lambda: counting.known_noise(model, layout))
            parts = parts_apart(model, reads, kinds.size)
            apart = None if parts is None else _own_reals(layout, parts, kinds, places)

            def normal_offer(state: Posterior, context: Any) -> Marginals:
                law, table = _joint_normal(model, layout, apart, state, context)

                def counts() -> Float[Array, " A"] | None:
                    noise = find_noise()
                    return None if noise is None else noise(context) / law.width**2

                return _offer(law, apart is not None, counts=counts)._replace(table=table)

            return normal_offer
        if np.any(groups < 0):
            return None
        is_independent = np.unique(groups).size == groups.size
        find_scale = _when_asked(lambda: counting.own_noise(model, layout, groups))

        def student_t_offer(state: Posterior, context: Any) -> Marginals:
            law, table = _joint_student_t(model, layout, groups, state, context)

            def counts() -> Float[Array, " A"] | None:
                scale = find_scale()
                return None if scale is None else scale(context) * (state.rate / state.shape)[groups] / law.width**2

            return _offer(law, is_independent, counts=counts)._replace(table=table)

        return student_t_offer
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
            x = laws.node_values(law)
            noises = spread(((x - offset) / slope) ** power, context)
            return laws.average(law, noises) / laws.average(law, (x - laws.average(law, x)) ** 2)

        return _offer(law, is_independent, counts=counts)

    return offer


def parts_apart(model: RewardModel, reads: list[np.ndarray], num_elements: int) -> list[np.ndarray] | None:
    """Return the elements of the latents that each arm's expected reward is tied to, whatever the data, itself or by others.

    Args:
        reads: the elements that each arm's reads, in the order of the program's latents.

    Returns:
        None unless it is proved that no two arms share any: then their expected rewards are independent.
    """
    space = unconstrained_space(model)
    if space.size != num_elements:  # a simplex has fewer coordinates than elements
        return None
    blocks = independent_blocks(model, space)
    label = np.zeros(space.size + 1, int)
    label[blocks.coordinates] = np.arange(len(blocks.coordinates))[:, None]
    own = [frozenset(label[row].tolist()) for row in reads]
    if sum(map(len, own)) > len(frozenset().union(*own)):
        return None
    return [np.flatnonzero(np.isin(label[:-1], list(labels))) for labels in own]


def _own_reals(layout: Layout, parts: list[np.ndarray], kinds: np.ndarray, places: np.ndarray) -> _Members:
    """Return each arm's part of the free reals, numbered among these and filled up to the longest, and what is not filling."""
    rank = {place: number for number, place in enumerate(layout.free.tolist())}
    found = [[rank[places[e]] for e in part if kinds[e] == "real" and places[e] in rank] for part in parts]
    size = max(map(len, found))
    members, is_member = np.zeros((len(found), size), int), np.zeros((len(found), size), bool)
    for row, mask, own in zip(members, is_member, found, strict=True):
        row[: len(own)], mask[: len(own)] = own, True
    return members, is_member


def _when_asked(find: Callable[[], Callable | None]) -> Callable[[], Callable | None]:
    """Look once, when first asked: few selectors ask, and looking compiles."""

    @functools.cache
    def found() -> Callable | None:
        with jax.core.eval_context():
            return find()

    return found


def _offer(law: laws.Law, is_independent: bool, *, counts: Callable[[], Array | None]) -> Marginals:
    def probs(allowed: Bool[Array, " A"] | None = None) -> Float[Array, " A"]:
        return contests.best_arm_probs(law, allowed)

    def contest(allowed: Bool[Array, " A"] | None = None) -> Contest:
        return contests.contest(law, allowed)

    return Marginals(
        lambda x: laws.cdf(law, x),
        lambda order: laws.quantile(law, order),
        probs if is_independent else None,
        lambda: tail(law),
        counts,
        contest=contest if is_independent else None,
    )


def _beta(
    layout: Layout, state: Posterior, places: Any, low: Any, high: Any, offset: Any, slope: Any, power: int
) -> laws.Law:
    del layout, power
    a, b = state.beta[places, 0], state.beta[places, 1]
    return laws.beta_law(a, b, offset + slope * low, slope * (high - low))


def _gamma(
    layout: Layout, state: Posterior, places: Any, low: Any, high: Any, offset: Any, slope: Any, power: int
) -> laws.Law:
    del high
    exponent = power / layout.power[places]
    return laws.gamma_law(state.shape[places], state.rate[places], offset + slope * low, slope, exponent)


def _joint_student_t(
    model: RewardModel, layout: Layout, groups: np.ndarray, state: Posterior, context: Any
) -> tuple[laws.Law, Table]:
    """Return the law of linear forms, and a way to draw them together.

    Each reads one block x | u ~ Normal(mean, inverse(u precision)), u ~ Gamma(shape, rate).
    """
    loc, weights = _linear_form(model, layout, reals_of(layout, state.mean, state.scaled_mean), context)
    own = jnp.where(layout.is_member[groups], jnp.take_along_axis(weights, layout.members[groups], axis=1), 0.0)
    halves = jnp.einsum("ast,at->as", _inverse_root(state.scaled_precision)[groups], own, precision=_HIGHEST)
    shape, rate = state.shape[groups], state.rate[groups]
    law = laws.student_t_law(2.0 * shape, loc, jnp.sqrt(jnp.sum(halves**2, axis=1) * rate / shape))
    kinds, which = np.unique(groups, return_inverse=True)
    root = _apart(halves, which)

    def table(key: Key, num_samples: int) -> Float[Array, "M A"]:
        key_scale, key_noise = jr.split(key)
        log_u = sampling.log_gamma(key_scale, state.shape[kinds], (num_samples,)) - jnp.log(state.rate[kinds])
        spread = jnp.exp(-0.5 * log_u)[:, which] * _correlated(key_noise, root, num_samples)
        return (loc + spread)[:, _twins(loc, root)]

    return law, table


def _joint_normal(
    model: RewardModel, layout: Layout, apart: _Members | None, state: Posterior, context: Any
) -> tuple[laws.Law, Table]:
    """Return the law of linear forms of the free Gaussian block, and a way to draw them together.

    Args:
        apart: the part of the block that each arm is tied to and no other is (`_own_reals`); None where arms share any.
    """
    loc, weights = _linear_form(model, layout, reals_of(layout, state.mean, state.scaled_mean), context)
    weights = weights[:, layout.free]
    if apart is None:
        halves = root = jnp.einsum("st,at->as", _inverse_root(state.precision), weights, precision=_HIGHEST)
    else:
        members, is_member = apart
        both = is_member[:, :, None] & is_member[:, None, :]
        blocks = jnp.where(both, state.precision[members[:, :, None], members[:, None, :]], np.eye(members.shape[1]))
        slopes = jnp.where(is_member, jnp.take_along_axis(weights, members, axis=1), 0.0)
        halves = jnp.einsum("ast,at->as", _inverse_root(blocks), slopes, precision=_HIGHEST)
        root = _apart(halves, np.arange(loc.size))
    law = laws.student_t_law(jnp.full(loc.shape, jnp.inf), loc, jnp.sqrt(jnp.sum(halves**2, axis=1)))

    def table(key: Key, num_samples: int) -> Float[Array, "M A"]:
        return (loc + _correlated(key, root, num_samples))[:, _twins(loc, root)]

    return law, table


def _apart(halves: Float[Array, "A S"], which: Int[np.ndarray, " A"]) -> Float[Array, "A K"]:
    """Return rows side by side: those of different blocks, or arms, are orthogonal."""
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


def _linear_form(model: RewardModel, layout: Layout, centre: Array, context: Any) -> tuple[Array, Array]:
    """Return the expected rewards at the mean of the reals, (A,), and their slopes, (A, D)."""

    def rewards(real: Array) -> Array:
        latents = {site.name: jnp.ones(site.shape, real.dtype) for site in layout.sites}
        for site in layout.of("real"):
            latents[site.name] = real[site.start : site.start + site.size].reshape(site.shape)
        return _expected(model, latents, context)

    value, pull = jax.vjp(rewards, centre)
    return value, jax.vmap(lambda row: pull(row)[0])(jnp.eye(model.num_arms, dtype=value.dtype))


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


def _owners(layout: Layout) -> np.ndarray:
    """Return, for each real element, the positive element that scales it, or -1."""
    owner = np.full(layout.count("real"), -1)
    for group, (members, is_member) in enumerate(zip(layout.members, layout.is_member, strict=True)):
        owner[members[is_member]] = group
    return owner


def _bounds(layout: Layout, kind: str, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = (
        np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)])
        for end in ("low", "high")
    )
    return low[places], high[places]
