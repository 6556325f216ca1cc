"""Kalman filters at particles of outer latents, and moves of the outer latents that replay a window of rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.collapsed.outer import given
from ppl_bandit.engines.exact.certificate.certificate import is_affine
from ppl_bandit.engines.exact.families.derivation import derive
from ppl_bandit.engines.exact.families.gaussian import reals_of
from ppl_bandit.engines.exact.families.posterior import (
    Coordinates,
    Natural,
    Posterior,
    absorb,
    coordinates_at,
    latents_at,
    log_mass,
    posterior_of,
    relative_to,
)
from ppl_bandit.engines.moving import kalman
from ppl_bandit.engines.moving.linear_step import LinearStep, derive_step, invert_blocks, predict
from ppl_bandit.engines.moving.outer_split import FilterSplit
from ppl_bandit.engines.moving.random_walk import blank_rows, fit_gaussian, log_gaussian_kernel, random_walk
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, Key

__all__ = ["Filters", "Replay", "each_particle", "filters_of"]

_SCALES = (1.5, 0.7)  # of the proposals of the moves, in standard deviations, divided by sqrt(K)


class Replay(NamedTuple):
    """The rows since the start of a window, and what is known at its start.

    Attributes:
        rows, elapsed: of W places, without a mask; the time before each row, 0 for no step.
        length: number of places in use.
        is_first: whether the window starts at the prior.
        laws: each particle's filter at the start.
        mean, root: the Gaussian law of the outer latents at the start of a later window, by set of particles.
    """

    rows: Interaction
    elapsed: Float[Array, " W"]
    length: Int[Array, ""]
    is_first: Bool[Array, ""]
    laws: Posterior
    mean: Float[Array, "2 K"]
    root: Float[Array, "2 K K"]


class Filters(NamedTuple):
    """The functions of the filters of a program; `at` is a position (K,) of the outer latents.

    Attributes:
        start: at -> the law at the first step, and the log density of the position under the prior.
        step: at -> the step, for a program without a clock.
        predict: (positions, steps, laws, elapsed) -> laws, of all particles.
        absorb: (at, law, row) -> the law after a row, and the log predictive density of the row.
        is_certified: (at, law, row) -> whether the row's likelihood is Gaussian at the position.
        draw: (key, at, law) -> {site: value}.
        empty_replay: laws -> the empty window.
        extend: (replay, positions, laws, weights, row, elapsed) -> the window with one more row.
        move: (key, replay, positions, laws, steps) -> moved positions, and their laws and steps.
    """

    start: Callable[..., tuple[Posterior, Array]]
    step: Callable[[Array], LinearStep]
    predict: Callable[..., Posterior]
    absorb: Callable[..., tuple[Posterior, Array]]
    is_certified: Callable[..., Array]
    draw: Callable[..., dict[str, Array]]
    empty_replay: Callable[[Posterior], Replay]
    extend: Callable[..., Replay]
    move: Callable[..., tuple[Array, tuple[Posterior, LinearStep | None]]]


def each_particle(function: Callable) -> Callable:
    """Return a function of one particle as a function of (2, H) particles."""
    return jax.vmap(jax.vmap(function))


def filters_of(model: RewardModel, split: FilterSplit, size: int) -> Filters:
    """Return the filters of a program that is linear Gaussian given the outer latents of a split.

    Args:
        size: number of rows W of a window.
    """
    layout, space = split.layout, split.space

    def centre() -> Coordinates:
        return Coordinates({}, jnp.asarray(split.centre, jnp.result_type(float)))

    def start(at: Float[Array, " K"]) -> tuple[Posterior, Float[Array, ""]]:
        values, log_jacobian = space.constrain(at)
        view = given(model, values)
        natural = derive(layout, lambda point: view.log_prior(latents_at(layout, point)), centre())
        law = posterior_of(layout, natural, centre())
        return law, log_mass(layout, law) + log_jacobian

    def step(at: Float[Array, " K"], elapsed: Array | None = None) -> LinearStep:
        return derive_step(model, layout, elapsed, space.constrain(at)[0])

    def predict_one(at: Array, own: LinearStep | None, law: Posterior, elapsed: Float[Array, ""]) -> Posterior:
        taken = step(at, jnp.where(elapsed > 0.0, elapsed, 1.0)) if own is None else own
        return jax.tree.map(lambda new, old: jnp.where(elapsed > 0.0, new, old), predict(taken, law), law)

    def predict_all(
        positions: Array, steps: LinearStep | None, laws: Posterior, elapsed: Float[Array, ""]
    ) -> Posterior:
        return each_particle(lambda at, own, law: predict_one(at, own, law, elapsed))(positions, steps, laws)

    def form_of(at: Float[Array, " K"], row: Interaction) -> Natural:
        """Return the log likelihood of a row as a quadratic form about the centre."""
        view, single = given(model, space.constrain(at)[0]), jax.tree.map(lambda leaf: leaf[None], row)
        return derive(layout, lambda point: view.log_likelihood(latents_at(layout, point), single)[0], centre())

    def absorb_form(law: Posterior, form: Natural) -> tuple[Posterior, Float[Array, ""]]:
        after = absorb(layout, law, relative_to(layout, form, centre(), coordinates_at(layout, law)), 1)
        return after, log_mass(layout, after) - log_mass(layout, law)

    def absorb_row(at: Float[Array, " K"], law: Posterior, row: Interaction) -> tuple[Posterior, Float[Array, ""]]:
        return absorb_form(law, form_of(at, row))

    def is_certified(at: Float[Array, " K"], law: Posterior, row: Interaction) -> Bool[Array, ""]:
        view = given(model, space.constrain(at)[0])
        _, residual, is_held = kalman.absorb_row(view, layout, law, jax.tree.map(lambda leaf: leaf[None], row))
        return is_affine(residual) & is_held

    def draw(key: Key, at: Float[Array, " K"], law: Posterior) -> dict[str, Array]:
        noise = jr.normal(key, law.mean.shape, law.mean.dtype)
        covariance = invert_blocks(law.precision)
        if covariance.shape[-1] == 1:
            steps = jnp.sqrt(covariance[..., 0]) * noise
        else:
            steps = jnp.einsum("rst,rt->rs", jnp.linalg.cholesky(covariance), noise)
        inner = latents_at(layout, Coordinates({}, reals_of(layout, law.mean + steps)))
        return {**inner, **space.constrain(at)[0]}

    def empty_replay(laws: Posterior) -> Replay:
        num = len(laws.mean)
        flags = jnp.zeros(size), jnp.zeros((), int), jnp.array(True)
        roots = jnp.zeros((num, space.size, space.size)) + jnp.eye(space.size)
        return Replay(blank_rows(model, size), *flags, laws, jnp.zeros((num, space.size)), roots)

    def extend(
        replay: Replay,
        positions: Float[Array, "2 H K"],
        laws: Posterior,
        weights: Float[Array, "2 H"],
        row: Interaction,
        elapsed: Float[Array, ""],
    ) -> Replay:
        def put(buffer: Array, value: Array) -> Array:
            return buffer.at[replay.length].set(jnp.asarray(value, buffer.dtype))

        longer = replay._replace(
            rows=jax.tree.map(put, replay.rows, row._replace(mask=None)),
            elapsed=put(replay.elapsed, elapsed),
            length=replay.length + 1,
        )

        def restart() -> Replay:
            mean, root = jax.vmap(fit_gaussian)(positions, weights)
            zero, no = jnp.zeros_like(longer.length), jnp.zeros_like(longer.is_first)
            return longer._replace(length=zero, is_first=no, laws=laws, mean=mean, root=root)

        return jax.lax.cond(longer.length >= size, restart, lambda: longer)

    def replay_rows(
        replay: Replay, mean: Array, root: Array, base: Posterior, at: Float[Array, " K"]
    ) -> tuple[Float[Array, ""], tuple[Posterior, LinearStep | None]]:
        """Return the log target of a position, its filter after the rows of the window, and its step without a clock."""
        forms = jax.vmap(lambda row: form_of(at, row))(replay.rows)
        own = None if model.has_clock else step(at)
        first, log_prior = start(at)
        log_base = jnp.where(replay.is_first, log_prior, log_gaussian_kernel(mean, root, at))
        law = jax.tree.map(lambda new, old: jnp.where(replay.is_first, new, old), first, base)

        def absorb_place(carry: tuple[Posterior, Array], place: Any) -> tuple[tuple[Posterior, Array], None]:
            law, total = carry
            form, elapsed, is_used = place
            after, log_density = absorb_form(predict_one(at, own, law, elapsed), form)
            kept = jax.tree.map(lambda new, old: jnp.where(is_used, new, old), after, law)
            return (kept, total + jnp.where(is_used, log_density, 0.0)), None

        is_used = jnp.arange(size) < replay.length
        (law, total), _ = jax.lax.scan(absorb_place, (law, log_base), (forms, replay.elapsed, is_used))
        return total, (law, own)

    def move_set(
        key: Key, replay: Replay, mean: Array, base: Array, bases: Posterior, positions: Array, derived: Any
    ) -> tuple[Array, Any]:
        each = jax.vmap(lambda own, at: replay_rows(replay, mean, base, own, at))
        return random_walk(key, lambda proposed: each(bases, proposed), positions, derived, _SCALES)

    def move(
        key: Key, replay: Replay, positions: Float[Array, "2 H K"], laws: Posterior, steps: LinearStep | None
    ) -> tuple[Float[Array, "2 H K"], tuple[Posterior, LinearStep | None]]:
        each = jax.vmap(move_set, in_axes=(0, None, 0, 0, 0, 0, 0))
        keys = jr.split(key, len(positions))
        return each(keys, replay, replay.mean, replay.root, replay.laws, positions, (laws, steps))

    return Filters(start, step, predict_all, absorb_row, is_certified, draw, empty_replay, extend, move)
