"""The particle filter of any program whose latents move: propagate by the program's own step, weight, resample.

A particle is a value of every latent, {site: (2, H, ...)}. Static latents move by Markov steps after a resampling, given the
particle's own path of moving latents over the latest rows (`window`).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from ppl_bandit.engines.checks import check_settings, checks_text
from ppl_bandit.engines.explanation import explain
from ppl_bandit.engines.proof.assignment import supports_of
from ppl_bandit.engines.proof.linear_step import require_moving, time_text
from ppl_bandit.engines.proof.outer import OuterSpace, outer_space
from ppl_bandit.engines.updates.filters import NUM_FILTERS, FilterParts, Weighed, filter_engine
from ppl_bandit.engines.updates.window import Window, empty_window, log_base, move_each
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Explanation, Interaction, Key

_SCALES = (1.2, 0.6, 0.3)  # of the proposals of the moves, in standard deviations, divided by sqrt(K)


def particle_filter(model: RewardModel, *, num_particles: int = 4000, window: int = 50) -> Engine:
    """Return the particle filter of a program whose latents move.

    Args:
        num_particles: of both filters together.
        window: rows over which the static latents are moved after a resampling; not used if all latents move.

    Raises:
        ValueError: if no latent moves, or a setting is invalid.
    """
    require_moving(model, "particle_filter")
    check_settings(1.0, num_particles=num_particles, window=window)
    num_own = -(-num_particles // NUM_FILTERS)
    spaces = _spaces(model)

    def start(key: Key) -> tuple[Draws, Window | None]:
        drawn = model.sample_prior(key, NUM_FILTERS * num_own)
        latents = {name: value.reshape(NUM_FILTERS, num_own, *value.shape[1:]) for name, value in drawn.items()}
        if spaces is None:
            return latents, None
        return latents, empty_window(model, window, path_of(latents), *known(latents))

    def path_of(latents: Draws) -> Draws:
        return {name: latents[name] for name in model.moving_sites}

    def predict(key: Key, latents: Draws, elapsed: Float[Array, ""]) -> Draws:
        shape = next(iter(latents.values())).shape[:2]
        given = jnp.where(elapsed > 0.0, elapsed, 1.0) if model.has_clock else None
        keys = jr.split(key, shape)
        later = jax.vmap(jax.vmap(lambda key, own: model.draw_transition(key, own, given)))(keys, latents)
        return {name: jnp.where(elapsed > 0.0, later[name], own) for name, own in latents.items()}

    def weigh(latents: Draws, weights: Array, row: Interaction, elapsed: Float[Array, ""]) -> Weighed:
        single = jax.tree.map(lambda leaf: leaf[None], row._replace(mask=None))
        log_likelihoods = jax.vmap(jax.vmap(lambda own: model.log_likelihood(own, single)[0]))(latents)
        is_finite = jnp.all(jnp.any(jnp.isfinite(log_likelihoods), axis=1))
        flat = [value.reshape(*weights.shape, -1) for value in latents.values()]
        return Weighed(latents, log_likelihoods, jnp.concatenate(flat, axis=-1), 0.0, is_finite, path_of(latents))

    def known(latents: Draws) -> tuple[tuple[()], Float[Array, "2 H k"]]:
        """Return nothing, since the law of a later window is of moving latents too, and positions of all latents."""
        assert spaces is not None
        return (), jax.vmap(jax.vmap(lambda own: jnp.concatenate(_unconstrain(spaces, own))))(latents)

    def log_target(
        window: Window, mean: Array, root: Array, path: Mapping[str, Array], at: Float[Array, " K"]
    ) -> Array:
        """Return the log density of static latents given a path, (W, ...)."""
        assert spaces is not None
        values, log_jacobian = spaces[0].constrain(at)

        def at_place(place: Array, row: Interaction, elapsed: Array, is_read: Array) -> Array:
            here, before = (
                {**values, **{name: own[index] for name, own in path.items()}}
                for index in (place, jnp.maximum(place - 1, 0))
            )
            given = jnp.where(elapsed > 0.0, elapsed, 1.0) if model.has_clock else None
            step = jnp.where((elapsed > 0.0) & (place > 0), model.log_transition(here, before, given), 0.0)
            single = jax.tree.map(lambda leaf: leaf[None], row)
            return step + jnp.where(is_read, model.log_likelihood(here, single)[0], 0.0)

        places = jnp.arange(window.elapsed.shape[0])
        terms = jax.vmap(at_place)(places, window.rows, window.elapsed, window.is_read)
        first = {**values, **{name: own[0] for name, own in path.items()}}
        log_prior = model.log_prior(first) + log_jacobian
        both = jnp.concatenate([at, _unconstrain(spaces, first)[1]])
        base = log_base(window, mean, root, both, log_prior)
        return base + jnp.sum(jnp.where(places < window.length, terms, 0.0))

    def move(key: Key, window: Window, latents: Draws) -> Draws:
        assert spaces is not None
        static = spaces[0]

        def target(own: Any, positions: Float[Array, "H K"]) -> tuple[Float[Array, " H"], tuple[()]]:
            mean, root, paths = own
            return jax.vmap(lambda path, at: log_target(window, mean, root, path, at), in_axes=(1, 0))(
                paths, positions
            ), ()

        paths = {name: jnp.moveaxis(own, 1, 0) for name, own in window.places.items()}  # (2, W, H, ...)
        positions = jax.vmap(jax.vmap(lambda own: _unconstrain(spaces, own)[0]))(latents)
        positions, _ = move_each(key, target, (window.mean, window.root, paths), positions, (), _SCALES)
        return {**latents, **jax.vmap(jax.vmap(lambda at: static.constrain(at)[0]))(positions)}

    parts = FilterParts(start, predict, weigh, known, move, lambda key, latents: latents, "density", "disagreement")
    explanation = _explain(model, num_own, None if spaces is None else window)
    return filter_engine(model, parts, explanation, num_particles=num_particles, window=window)


def _spaces(model: RewardModel) -> tuple[OuterSpace, OuterSpace] | None:
    """Return the unconstrained spaces of static and of moving latents; None if all latents move."""
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
    return outer_space(model, static, supports), outer_space(model, model.moving_sites, supports)


def _unconstrain(spaces: tuple[OuterSpace, OuterSpace], latents: Mapping[str, Any]) -> tuple[Array, Array]:
    """Return static and moving latents in unconstrained space."""
    static, moving = (space.unconstrain({name: latents[name] for name in space.names}) for space in spaces)
    return static, moving


def _explain(model: RewardModel, num_own: int, window: int | None) -> Explanation:
    static = [name for name in model.latent_shapes if name not in model.moving_sites]
    sites = {name: "advanced by the program's own time step" for name in model.moving_sites}
    sites |= {
        name: f"static, renewed by Markov steps after each resampling, over the last rows (at most {window})"
        for name in static
    }
    verdict = f"APPROXIMATE, by a particle filter: {NUM_FILTERS} independent filters of {num_own} particles."
    facts = {"time": time_text(model), "checks": checks_text(("ess", "k_hat", "disagreement"))}
    return explain(model, "particle_filter", verdict, "a particle filter for latents that move", sites, facts)
