"""Test values of latents, rewards and contexts, at which a program is evaluated before there are data."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import biject_to

from ppl_bandit.program.model.tracing import Site, can_produce, repeat_rows, run_program

DTYPE_OF_KIND = {"i": int, "f": float}  # kind of an outcome, integer or real -> its dtype

# Every known support contains some of these values. Small counts and edges come first; values outside a support are skipped.
_CANDIDATE_REWARDS = np.array(
    [0.0, 1.0, 2.0, 3.0, 5.0, 17.0, 0.25, 0.6, 0.9, 1.7, 4.2, 12.9, 101.3, -0.4, -1.0, -2.3, -9.1, -2.0, 1.1, 2.9]
)

_EXTREMES = (3.0, 30.0)  # distances from 0 in unconstrained space: e^30 is larger than any reward
_NUM_SIGNS = 8


def feasible_latents(
    program: Callable,
    latents: tuple[str, ...],
    context: Any,
    seed: int | Int[Array, ""],
    reach: float | Float[Array, ""] = 1.5,
) -> dict[str, Array]:
    """Return one value of every latent from the interior of its support, within `reach` of 0 in unconstrained space."""

    def spread(number: int, shape: tuple[int, ...]) -> Array:
        # Multiples of an irrational number modulo 1 are evenly spread, and compile faster than a random generator.
        steps = jnp.arange(1, int(np.prod(shape)) + 1) + 97 * number
        return reach * (
            2.0 * jnp.modf(0.6180339887 * steps + 0.4142135624 * seed)[0].reshape(shape).astype(float) - 1.0
        )

    return _latents_at(program, latents, context, spread)


def extreme_latents(program: Callable, latents: tuple[str, ...], context: Any) -> dict[str, Array]:
    """Return values far out in the support of every latent, {site: (P, ...)}.

    The union of an outcome's supports at these values covers every reward that the program can produce.
    """
    signs = np.random.default_rng(3).choice([-1.0, 1.0], size=(_NUM_SIGNS, len(latents)))
    signs[0], signs[1] = 1.0, -1.0
    steps = jnp.asarray(np.concatenate([reach * signs for reach in _EXTREMES]))
    return jax.vmap(
        lambda step: _latents_at(program, latents, context, lambda number, shape: jnp.full(shape, step[number]))
    )(steps)


def _latents_at(
    program: Callable, latents: tuple[str, ...], context: Any, position: Callable[[int, tuple[int, ...]], Array]
) -> dict[str, Array]:
    """Return latents given (number of the latent, shape) -> its value in unconstrained space."""

    def choose(site: Site) -> Array | None:
        if site["name"] not in latents or site["type"] != "sample":
            return None
        transform = biject_to(site["fn"].support)
        shape = transform.inverse_shape(site["fn"].shape(site["kwargs"]["sample_shape"]))
        return transform(position(latents.index(site["name"]), shape))

    trace = run_program(program, jnp.zeros(1, int), repeat_rows(context, 1), {}, choose=choose)
    return {name: trace[name]["value"] for name in latents}


def feasible_rewards(
    program: Callable,
    latents: Mapping[str, Array],
    arm: Int[Array, " N"],
    context: Any,
    kinds: Mapping[str, str],
    picks: Int[Array, "N outcomes"],
) -> tuple[dict[str, Array], Bool[Array, " N"]]:
    """Choose a reward for each row among the candidates that its outcome's support allows.

    Args:
        kinds: outcome -> "i" or "f", in the order in which the program samples them.
        picks: which of the allowed candidates to take, modulo their number.

    Returns:
        The rewards, {outcome: (N,)}, and whether each row's are possible.
    """
    values: dict[str, Array] = {name: jnp.zeros(arm.shape, DTYPE_OF_KIND[kind]) for name, kind in kinds.items()}
    is_possible = jnp.ones(arm.shape, bool)
    for position, (name, kind) in enumerate(kinds.items()):  # in order: a support may depend on earlier outcomes
        fn = run_program(program, arm, context, {**latents, **values})[name]["fn"]
        candidates = _candidates(fn, kind)
        fits = jax.vmap(lambda value, fn=fn: can_produce(fn, value))(candidates)
        count = fits.sum(axis=0)
        is_pick = fits & (jnp.cumsum(fits, axis=0) == picks[:, position] % jnp.maximum(count, 1) + 1)
        chosen = jnp.argmax(is_pick, axis=0)
        values[name] = jnp.take_along_axis(candidates, chosen[None], axis=0)[0].astype(DTYPE_OF_KIND[kind])
        is_possible &= count > 0
    return values, is_possible


def vary_contexts(context: Any, largest: Any, rng: np.random.Generator, is_kept: Bool[np.ndarray, " N"]) -> Any:
    """Return variations of the example context: smaller numbers, nonzero numbers in place of 0, and both booleans.

    A 0 in the example would hide what it multiplies: a logistic regression at features of 0 does not depend on its weights.

    Args:
        context: rows of the example.
        largest: for each leaf, the largest integer that may replace a 0; integers may be indices, and 0 leaves them unchanged.
        is_kept: which rows are not changed.
    """

    def varied(leaf: Array, largest: int) -> Array:
        if leaf.dtype == bool:
            other = leaf ^ (rng.integers(0, 2, size=leaf.shape).astype(bool) | (leaf.ndim == 1))
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            share = rng.uniform(0.25, 1.0, size=leaf.shape)
            other = jnp.where(leaf == 0, share, leaf * share)
        elif largest:
            other = jnp.where(leaf == 0, rng.integers(1, largest + 1, size=leaf.shape), leaf).astype(leaf.dtype)
        else:
            return leaf
        return jnp.where(is_kept.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, other)

    return jax.tree.map(varied, context, largest)


def _candidates(fn: Any, kind: str) -> Float[Array, "candidates N"]:
    """Return candidate rewards for each row; for reals also the same numbers of standard deviations from the mean."""
    plain = jnp.broadcast_to(jnp.asarray(_CANDIDATE_REWARDS)[:, None], (_CANDIDATE_REWARDS.size, *fn.batch_shape))
    if kind != "f":
        return plain
    try:
        middle, unit = fn.mean, jnp.sqrt(fn.variance)
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return plain
    return jnp.stack([middle + unit * plain, plain], axis=1).reshape(-1, *fn.batch_shape)
