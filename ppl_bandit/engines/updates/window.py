"""The latest rows of two filters, and Metropolis-Hastings moves of their static latents over them.

Propagation gives moving latents new values at every step, but a static latent keeps the values that survived. So after a
resampling the static latents move: their target is their density at the start of the window, times what the rows in it say.
Until the window is full for the first time, the density at its start is the prior, and the moves are exact. Then a new window
starts: with a Gaussian law fitted to the particles, and with what every particle knows of the moving latents.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.weights import mean_and_covariance, mean_and_root
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, Key


class Window(NamedTuple):
    """The latest rows of two sets of H particles, in W places.

    Attributes:
        rows: without a mask.
        elapsed: time before each row; 0 where no step is part of the window.
        has_row: whether the place has a row; the first place of a later window has none, what is known there includes that row.
        places: what else is known of each row, a pytree with leading axis W, such as the path of every particle (W, 2, H, ...).
        length: number of places in use.
        is_first: whether the window starts at the prior.
        base: what each particle knows of the moving latents at the start of a later window, (2, H, ...).
        mean, root: of a Gaussian law at the start of a later window, by set of particles.
    """

    rows: Interaction
    elapsed: Float[Array, " W"]
    has_row: Bool[Array, " W"]
    places: Any
    length: Int[Array, ""]
    is_first: Bool[Array, ""]
    base: Any
    mean: Float[Array, "2 k"]
    root: Float[Array, "2 k k"]

    @property
    def is_read(self) -> Bool[Array, " W"]:
        """Whether a place holds a row of the window."""
        return self.has_row & (jnp.arange(self.elapsed.shape[0]) < self.length)


def empty_window(model: RewardModel, size: int, place: Any, base: Any, positions: Float[Array, "2 H k"]) -> Window:
    """Return a window of `size` places without rows.

    Args:
        place: what a place will hold beside its row.
        base: what each particle will know at the start of a later window.
        positions: of the particles, in the coordinates of its Gaussian law.
    """
    outcomes, (num_sets, _, num) = model.zero_outcomes(size), positions.shape
    reward = outcomes if len(model.outcomes) > 1 else outcomes[model.outcomes[0]]
    return Window(
        Interaction(jnp.zeros(size, int), reward, jax.tree.map(jnp.asarray, model.context_rows(size))),
        jnp.zeros(size),
        jnp.zeros(size, bool),
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), place),
        jnp.zeros((), int),
        jnp.array(True),
        base,
        jnp.zeros((num_sets, num)),
        jnp.zeros((num_sets, num, num)) + jnp.eye(num),
    )


def extend(
    window: Window,
    row: Interaction,
    elapsed: Float[Array, ""],
    place: Any,
    base: Any,
    positions: Float[Array, "2 H k"],
    weights: Float[Array, "2 H"],
) -> Window:
    """Return a window with one more row; a full one starts again after that row.

    Args:
        place, base, positions: as in `empty_window`, after the row.
    """
    is_full = window.length >= window.elapsed.shape[0]
    length = jnp.where(is_full, 0, window.length)

    def restart() -> tuple[Array, Array]:
        return jax.vmap(lambda own, by: mean_and_root(own, jnp.eye(own.shape[1]), jnp.asarray(1e6), by))(
            positions, weights
        )

    mean, root = jax.lax.cond(is_full, restart, lambda: (window.mean, window.root))

    def put(buffer: Array, value: Array) -> Array:
        return buffer.at[length].set(jnp.asarray(value, buffer.dtype))

    return Window(
        jax.tree.map(put, window.rows, row._replace(mask=None)),
        put(window.elapsed, jnp.where(is_full, 0.0, elapsed)),
        put(window.has_row, ~is_full),
        jax.tree.map(put, window.places, place),
        length + 1,
        window.is_first & ~is_full,
        jax.tree.map(lambda new, old: jnp.where(is_full, new, old), base, window.base),
        mean,
        root,
    )


def log_base(
    window: Window, mean: Array, root: Array, position: Float[Array, " k"], log_prior: Array
) -> Float[Array, ""]:
    """Return the log density at the start of a window, up to a constant: the prior's, or that of the Gaussian law of a set.

    Args:
        mean, root: of the set.
    """
    steps = jax.scipy.linalg.solve_triangular(root, position - mean, lower=True)
    return jnp.where(window.is_first, log_prior, -0.5 * jnp.sum(jnp.square(steps)))


def move_each(
    key: Key,
    target: Callable[..., tuple[Float[Array, " H"], Any]],
    particles: Any,
    positions: Float[Array, "2 H K"],
    derived: Any,
    scales: tuple[float, ...],
) -> tuple[Float[Array, "2 H K"], Any]:
    """Move every particle of both sets once for each scale; return the positions and what is derived from them.

    Args:
        target: (what is fixed in a set of particles, positions (H, K)) -> the log density at each, and a pytree derived from
            them, with a leading axis H.
        particles: what is fixed, with a leading axis 2.
        derived: the pytree at `positions`; kept where the log density is not finite.
        scales: of the proposals, in standard deviations of the particles, divided by sqrt(K).
    """

    def move_set(key: Key, own: Any, positions: Array, derived: Any) -> tuple[Array, Any]:
        return _random_walk(key, partial(target, own), positions, derived, scales)

    return jax.vmap(move_set)(jr.split(key, len(positions)), particles, positions, derived)


def _random_walk(
    key: Key, target: Callable[[Array], tuple[Array, Any]], positions: Array, derived: Any, scales: tuple[float, ...]
) -> tuple[Float[Array, "H K"], Any]:
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
