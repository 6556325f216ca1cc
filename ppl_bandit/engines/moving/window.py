"""Moves of the static latents of a particle filter, over a window of the latest rows.

Propagation gives moving latents new values at every step, but a static latent keeps the values that survived. So after a
resampling every particle moves its static latents by Metropolis-Hastings steps. Their target is the density of the static
latents given the particle's own path of moving latents: the law at the start of the window, times the steps and the
likelihoods in it. Until the window is full for the first time, the law at its start is the prior, and the moves are exact.
Then a new window starts, with a Gaussian law fitted to all latents in unconstrained space.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.collapsed.outer import OuterSpace, outer_space
from ppl_bandit.engines.exact.proof.assignment import supports_of
from ppl_bandit.engines.moving.random_walk import blank_rows, fit_gaussian, log_gaussian_kernel, random_walk
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, Key

__all__ = ["StaticMoves", "Window", "static_moves"]

_SCALES = (1.2, 0.6, 0.3)  # of the proposals of the moves, in standard deviations, divided by sqrt(K)


class Window(NamedTuple):
    """The latest rows, and the path of each of F x H particles over them; both have W places.

    Attributes:
        path: {moving site: (W, F, H, ...)}.
        rows: without a mask.
        elapsed: time before each row; 0 where no step is part of the window.
        has_row: whether the place has a row; the first place of a later window has none, its law includes that row.
        length: number of places in use.
        is_first: whether the window starts at the prior.
        mean, root: the Gaussian law of static and moving latents at the start of a later window, by filter.
    """

    path: dict[str, Array]
    rows: Interaction
    elapsed: Float[Array, " W"]
    has_row: Bool[Array, " W"]
    length: Int[Array, ""]
    is_first: Bool[Array, ""]
    mean: Float[Array, "F k"]
    root: Float[Array, "F k k"]


class StaticMoves(NamedTuple):
    """The functions of a program with static latents.

    Attributes:
        start: {site: (F, H, ...)} -> the empty window.
        extend: (window, latents, weights, row, elapsed) -> the window with one more row.
        move: (key, window, latents) -> latents with moved static ones.
    """

    start: Callable[[Mapping[str, Array]], Window]
    extend: Callable[..., Window]
    move: Callable[[Key, Window, dict[str, Array]], dict[str, Array]]


def static_moves(model: RewardModel, size: int) -> StaticMoves | None:
    """Return the moves of the static latents of a program; None if all its latents move.

    Args:
        size: number of rows W of a window.

    Raises:
        ValueError: if a support depends on another latent.
    """
    static = tuple(name for name in model.latent_shapes if name not in model.moving_sites)
    if not static:
        return None
    supports = supports_of(model)
    for name, support in supports.items():
        if support is None:
            raise ValueError(
                f"the support of '{name}' depends on another latent, so that static latents cannot be renewed: give it a fixed "
                "support"
            )
    space = outer_space(model, static, supports)
    moving = outer_space(model, model.moving_sites, supports)

    def start(latents: Mapping[str, Array]) -> Window:
        num, num_filters = space.size + moving.size, len(next(iter(latents.values())))
        path = {name: jnp.zeros((size, *latents[name].shape)) + latents[name] for name in model.moving_sites}
        flags = jnp.zeros(size), jnp.zeros(size, bool), jnp.zeros((), int), jnp.array(True)
        return Window(
            path,
            blank_rows(model, size),
            *flags,
            jnp.zeros((num_filters, num)),
            jnp.zeros((num_filters, num, num)) + jnp.eye(num),
        )

    def fit(latents: dict[str, Array], weights: Float[Array, " H"]) -> tuple[Array, Array]:
        positions = jax.vmap(lambda own: jnp.concatenate(_unconstrain(space, moving, own)))(latents)
        return fit_gaussian(positions, weights)

    def extend(
        window: Window, latents: dict[str, Array], weights: Float[Array, "F H"], row: Interaction, elapsed: Array
    ) -> Window:
        is_full = window.length >= size
        length = jnp.where(is_full, 0, window.length)
        mean, root = jax.lax.cond(is_full, lambda: jax.vmap(fit)(latents, weights), lambda: (window.mean, window.root))

        def put(buffer: Array, value: Array) -> Array:
            return buffer.at[length].set(jnp.asarray(value, buffer.dtype))

        return Window(
            {name: put(window.path[name], latents[name]) for name in window.path},
            jax.tree.map(put, window.rows, row._replace(mask=None)),
            put(window.elapsed, jnp.where(is_full, 0.0, elapsed)),
            put(window.has_row, ~is_full),
            length + 1,
            window.is_first & ~is_full,
            mean,
            root,
        )

    def log_target(
        window: Window, mean: Array, root: Array, path: Mapping[str, Array], position: Float[Array, " K"]
    ) -> Float[Array, ""]:
        values, log_jacobian = space.constrain(position)
        in_use = jnp.arange(size) < window.length

        def at_place(place: Array, row: Interaction, elapsed: Array, has_row: Array) -> Array:
            here, before = (
                {**values, **{name: own[index] for name, own in path.items()}}
                for index in (place, jnp.maximum(place - 1, 0))
            )
            given = jnp.where(elapsed > 0.0, elapsed, 1.0) if model.has_clock else None
            step = jnp.where((elapsed > 0.0) & (place > 0), model.log_transition(here, before, given), 0.0)
            single = jax.tree.map(lambda leaf: leaf[None], row)
            return step + jnp.where(has_row, model.log_likelihood(here, single)[0], 0.0)

        terms = jax.vmap(at_place)(jnp.arange(size), window.rows, window.elapsed, window.has_row & in_use)
        first = {**values, **{name: own[0] for name, own in path.items()}}
        at_prior = model.log_prior(first) + log_jacobian
        both = jnp.concatenate([position, _unconstrain(space, moving, first)[1]])
        base = jnp.where(window.is_first, at_prior, log_gaussian_kernel(mean, root, both))
        return base + jnp.sum(jnp.where(in_use, terms, 0.0))

    def move_filter(
        key: Key, window: Window, mean: Array, base: Array, path: dict[str, Array], latents: dict[str, Array]
    ) -> dict[str, Array]:
        positions = jax.vmap(lambda own: _unconstrain(space, moving, own)[0])(latents)
        densities = jax.vmap(lambda own, at: log_target(window, mean, base, own, at), in_axes=(1, 0))
        positions, _ = random_walk(key, lambda proposed: (densities(path, proposed), ()), positions, (), _SCALES)
        return {**latents, **jax.vmap(lambda at: space.constrain(at)[0])(positions)}

    def move(key: Key, window: Window, latents: dict[str, Array]) -> dict[str, Array]:
        paths = {name: jnp.moveaxis(own, 1, 0) for name, own in window.path.items()}  # (F, W, H, ...)
        each = jax.vmap(move_filter, in_axes=(0, None, 0, 0, 0, 0))
        return each(jr.split(key, len(window.mean)), window, window.mean, window.root, paths, latents)

    return StaticMoves(start, extend, move)


def _unconstrain(space: OuterSpace, moving: OuterSpace, latents: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return static and moving latents in unconstrained space."""
    static = space.unconstrain({name: latents[name] for name in space.names})
    return static, moving.unconstrain({name: latents[name] for name in moving.names})
