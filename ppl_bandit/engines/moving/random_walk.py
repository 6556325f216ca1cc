"""Metropolis-Hastings moves of many particles over a window of rows: the window at its start, and the random walk."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from ppl_bandit.engines.particles.covariance import mean_and_covariance, mean_and_root
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, Key

__all__ = ["blank_rows", "fit_gaussian", "log_gaussian_kernel", "random_walk"]


def blank_rows(model: RewardModel, size: int) -> Interaction:
    """Return rows of no meaning, without a mask: the places of a window."""
    outcomes = model.zero_outcomes(size)
    reward = outcomes if len(model.outcomes) > 1 else outcomes[model.outcomes[0]]
    return Interaction(jnp.zeros(size, int), reward, jax.tree.map(jnp.asarray, model.context_rows(size)))


def fit_gaussian(
    positions: Float[Array, "H k"], weights: Float[Array, " H"]
) -> tuple[Float[Array, " k"], Float[Array, "k k"]]:
    """Return mean and root covariance of the Gaussian law at the start of a later window."""
    return mean_and_root(positions, jnp.eye(positions.shape[1]), jnp.asarray(1e6), weights)


def log_gaussian_kernel(
    mean: Float[Array, " k"], root: Float[Array, "k k"], position: Float[Array, " k"]
) -> Float[Array, ""]:
    """Return the log density of that law less its largest value."""
    steps = jax.scipy.linalg.solve_triangular(root, position - mean, lower=True)
    return -0.5 * jnp.sum(jnp.square(steps))


def random_walk(
    key: Key,
    target: Callable[[Float[Array, "H K"]], tuple[Float[Array, " H"], Any]],
    positions: Float[Array, "H K"],
    derived: Any,
    scales: tuple[float, ...],
) -> tuple[Float[Array, "H K"], Any]:
    """Move every particle once for each scale; return the positions and what is derived from them.

    Args:
        target: positions -> the log density at each, and a pytree derived from them, with a leading axis H.
        derived: the pytree at `positions`; kept where the log density is not finite.
        scales: of the proposals, in standard deviations of the particles, divided by sqrt(K).
    """
    num, size = positions.shape
    _, covariance = mean_and_covariance(positions)
    _, root = mean_and_root(positions, covariance + 1e-12 * jnp.eye(size), jnp.asarray(float(num)))

    def move(carry: tuple[Array, Array, Any], place: tuple[Array, Array]) -> tuple[tuple[Array, Array, Any], None]:
        positions, log_densities, derived = carry
        number, scale = place
        key_step, key_accept = jr.split(jr.fold_in(key, number))
        proposed = positions + scale * jr.normal(key_step, positions.shape) @ root.T
        found, new = target(proposed)
        is_accepted = jnp.log(jr.uniform(key_accept, (num,))) < found - log_densities
        pick = jax.vmap(lambda is_new, new, old: jax.tree.map(partial(jnp.where, is_new), new, old))
        return pick(is_accepted, (proposed, found, new), carry), None

    # The first move has scale 0 and is accepted: it evaluates the density at the start, so that the target is compiled once.
    steps = jnp.asarray([0.0, *scales]) / size**0.5
    start = positions, jnp.full(num, -jnp.inf, positions.dtype), derived
    (positions, _, derived), _ = jax.lax.scan(move, start, (jnp.arange(len(steps)), steps))
    return positions, derived
