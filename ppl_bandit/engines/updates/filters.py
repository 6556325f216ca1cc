"""Two filters of the same rows: particles that take a step, are weighted by a row, and are renewed when few of them count.

`FilterParts` says what a particle is: values of all latents, which take the program's own step (`particle_filter`), or values
of a few static latents with the Kalman filter of the others given them (`collapsed_kalman`). Everything else is here. How far
the two filters disagree is evidence that can fail. The state has a fixed size: neither memory nor time grows with the steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.checks import CHECKS, Info, make_info, worst_values
from ppl_bandit.engines.particles.diagnostics import notable_k_hat
from ppl_bandit.engines.particles.weights import finite_log_weights, normalize_weights, resample, weight_ess
from ppl_bandit.engines.proof.linear_step import elapsed_until, first_clock
from ppl_bandit.engines.state import Particles, State, stored_evidence
from ppl_bandit.engines.updates.window import Window, extend
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Explanation, Interaction, Key

NUM_FILTERS = 2  # the fewest whose difference shows their error
_RESAMPLE_SHARE = CHECKS["weight_ess"].bound  # of the effective sample size, below which the filters are resampled


class Weighed(NamedTuple):
    """A row at every particle.

    Attributes:
        particles: after the row.
        log_densities: of the row, given the rows before it.
        means, variances: of the latents at each particle.
        failure: of the row, in terms of the check of `FilterParts`.
        place: what a window keeps beside the row.
    """

    particles: Any
    log_densities: Float[Array, "2 H"]
    means: Float[Array, "2 H D"]
    variances: Float[Array, "2 H D"] | float
    failure: Array
    place: Any


class FilterParts(NamedTuple):
    """What a particle is.

    Attributes:
        start: key -> particles of both filters drawn from the prior, and the empty window.
        predict: (key, particles, elapsed) -> particles after a step that takes the time, or the same if it is 0.
        weigh: (particles, weights, row, elapsed) -> `Weighed`.
        known: particles -> what each knows at the start of a later window, and positions in the coordinates of its law.
        move: (key, window, particles) -> particles with moved static latents.
        draw: (key, particles (M, ...)) -> {site: (M, ...)}.
        row_check: name of the check of each row; "certificate" refuses a batch with a row that fails it.
        mean_check: name of the check of the difference of the two filters' means.
        shortest: a step up to this time is none; see `elapsed_until`.
    """

    start: Callable[[Key], tuple[Any, Window | None]]
    predict: Callable[[Key, Any, Array], Any]
    weigh: Callable[..., Weighed]
    known: Callable[[Any], tuple[Any, Array]]
    move: Callable[[Key, Window, Any], Any]
    draw: Callable[[Key, Any], Draws]
    row_check: str
    mean_check: str
    shortest: float = 0.0


def filter_engine(
    model: RewardModel, parts: FilterParts, explanation: Explanation, *, num_particles: int, window: int
) -> Engine:
    """Return the engine of two filters."""

    def init(key: Key) -> State:
        particles, first_window = parts.start(key)
        num_own = jax.tree.leaves(particles)[0].shape[1]
        weights, evidences = jnp.zeros((NUM_FILTERS, num_own)), jnp.zeros(NUM_FILTERS)
        own = Particles(particles, weights, evidences, num_refreshes=jnp.zeros((), int))
        return State(particles=own, clock=first_clock(), window=first_window)

    def advance(key: Key, state: State, context: Any) -> State:
        elapsed, clock = elapsed_until(model, state.clock, context, parts.shortest)
        positions = parts.predict(key, state.particles.positions, elapsed)
        return state._replace(particles=state.particles._replace(positions=positions), clock=clock)

    def learn(key: Key, state: State, row: Interaction) -> tuple[State, Info]:
        key_step, key_renew = jr.split(key)
        elapsed, _ = elapsed_until(model, state.clock, row.context, parts.shortest)
        before = advance(key_step, state, row.context)
        positions, log_weights, log_evidence = before.particles[:3]
        found = parts.weigh(positions, jax.nn.softmax(log_weights, axis=1), row, elapsed)
        new = _reweigh(log_weights, found.log_densities)
        difference = _disagreement(found.means, new.weights, found.variances)
        checks = {
            "ess": new.ess / new.weights.size,
            "k_hat": new.k_hat,
            parts.mean_check: difference,
            parts.row_check: found.failure,
        }
        after = before._replace(
            particles=before.particles._replace(
                positions=found.particles,
                log_weights=new.log_weights,
                log_evidence=log_evidence + new.log_densities,
            ),
            clock=before.clock.after_row(),
        )
        if state.window is not None:
            known = parts.known(found.particles)
            after = after._replace(window=extend(state.window, row, elapsed, found.place, *known, new.weights))
        renewed = jax.lax.cond(new.is_uneven, lambda: renew(key_renew, after), lambda: after)
        return renewed, make_info(checks, permanent=[parts.row_check], ess=new.ess)

    def renew(key: Key, state: State) -> State:
        """Resample both filters, and move their static latents."""
        key_resample, key_move = jr.split(key)
        offsets = jr.uniform(key_resample, (NUM_FILTERS,))
        old, window = state.particles, state.window
        num_own = old.log_weights.shape[1]
        index = jax.vmap(lambda offset, own: resample(offset, own, num_own))(offsets, old.log_weights)
        positions = _pick(old.positions, index)
        if window is not None:
            # Only what every particle has a place of its own for is picked: the paths, not the centres of rows.
            places = jax.tree.map(
                lambda leaf: jax.vmap(lambda own: _pick(own, index))(leaf) if leaf.ndim > 2 else leaf, window.places
            )
            window = window._replace(places=places, base=_pick(window.base, index))
            positions = parts.move(key_move, window, positions)
        renewed = old._replace(
            positions=positions, log_weights=jnp.zeros_like(old.log_weights), num_refreshes=old.num_refreshes + 1
        )
        return state._replace(particles=renewed, window=window)

    def update(key: Key, state: State, interaction: Interaction) -> tuple[State, Info]:
        after, info = _learn_in_order(learn, key, state, interaction, parts.row_check)
        if parts.row_check == "certificate":
            after = jax.tree.map(lambda new, old: jnp.where(info.may_recover, new, old), after, state)
        log_evidence, error = after.evidence()
        num_refreshes = after.particles.num_refreshes
        return after, info._replace(num_refreshes=num_refreshes, log_evidence=log_evidence, log_evidence_error=error)

    def sample(key: Key, state: State, num_samples: int) -> Draws:
        key_pick, key_step, key_draw = jr.split(key, 3)
        # Both filters have the same total weight.
        log_weights = state.particles.log_weights
        log_weights = (log_weights - logsumexp(log_weights, axis=1, keepdims=True)).ravel()
        picks = resample(jr.uniform(key_pick), log_weights, num_samples)
        chosen = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[picks][None], state.particles.positions)
        elapsed, _ = elapsed_until(model, state.clock, None, parts.shortest)
        now = parts.predict(key_step, chosen, elapsed)
        return parts.draw(key_draw, jax.tree.map(lambda leaf: leaf[0], now))

    return Engine(
        init,
        update,
        sample,
        explanation,
        settings={"num_particles": num_particles, "window": window},
        # Without a clock every decision reads the next step, and `sample` takes it for the particles that it draws alone.
        capabilities=Capabilities(advance=advance if model.has_clock else None, log_evidence=stored_evidence),
    )


class _Reweighted(NamedTuple):
    """Weights of the particles after a row.

    Attributes:
        log_weights: the largest of each filter is 0.
        weights: normalised, by filter.
        ess: effective sample size of all particles, twice that of the worse filter.
        k_hat: Pareto k-hat of all weights.
        log_densities: log predictive density of the row, by filter.
        is_uneven: whether the filters should be resampled.
    """

    log_weights: Float[Array, "2 H"]
    weights: Float[Array, "2 H"]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    log_densities: Float[Array, " 2"]
    is_uneven: Bool[Array, ""]


def _reweigh(log_weights: Float[Array, "2 H"], log_likelihoods: Float[Array, "2 H"]) -> _Reweighted:
    """Weight particles by the likelihood of a row."""
    later = jax.vmap(finite_log_weights)(log_weights + log_likelihoods)
    old, new = (jax.vmap(normalize_weights)(own) for own in (log_weights, later))
    # Of all weights at once: under `vmap` a branch that is rarely needed would always run.
    pooled = finite_log_weights(jnp.log(new.weights).ravel())
    least = jnp.min(new.ess)
    return _Reweighted(
        later - jnp.max(later, axis=1, keepdims=True),
        new.weights,
        NUM_FILTERS * least,
        notable_k_hat(pooled, normalize_weights(pooled)),
        new.log_mean - old.log_mean,
        least < _RESAMPLE_SHARE * log_weights.shape[1],
    )


def _pick(particles: Any, index: Int[Array, "2 H"]) -> Any:
    """Return the particles of each filter at its own indices; every array is (2, H, ...)."""
    return jax.tree.map(lambda leaf: jax.vmap(lambda own, at: own[at])(leaf, index), particles)


def _disagreement(
    values: Float[Array, "2 H D"], weights: Float[Array, "2 H"], variances: Float[Array, "2 H D"] | float
) -> Float[Array, ""]:
    """Return the largest difference of the filters' means, in standard deviations.

    Args:
        variances: of the law at each particle, whose mean is its value.
    """
    mean = jnp.einsum("fh,fhd->fd", weights, values)
    spread = variances + jnp.square(values - mean[:, None])
    variance = jnp.einsum("fh,fhd->fd", weights, spread).mean(axis=0)
    return jnp.max(jnp.abs(mean[0] - mean[1]) / jnp.sqrt(jnp.maximum(variance, 1e-300)))


def _learn_in_order(
    learn: Callable[[Key, Any, Interaction], tuple[Any, Info]],
    key: Key,
    state: Any,
    interaction: Interaction,
    row_check: str,
) -> tuple[Any, Info]:
    """Learn rows one after another; return the state and the measures of the last row, with the worst of `row_check`.

    Masked rows pass no time.

    Args:
        learn: (key, state, one row without a leading axis) -> (state, info).
    """
    rows, num_rows = jax.tree.map(jnp.asarray, interaction), interaction.arm.shape[0]
    if num_rows == 1 and interaction.mask is None:
        return learn(key, state, jax.tree.map(lambda leaf: leaf[0], rows))
    mask = jnp.ones(num_rows, bool) if interaction.mask is None else rows.mask

    def learn_one(key: Key, carry: tuple[Any, Info], row: Interaction) -> tuple[Any, Info]:
        before, past = carry
        after, info = learn(key, before, row)
        both = {row_check: jnp.stack([past.checks[row_check], info.checks[row_check]])}
        checks = {**info.checks, **worst_values(both)}
        is_trusted, may_recover = info.is_trusted & past.may_recover, info.may_recover & past.may_recover
        return after, info._replace(checks=checks, is_trusted=is_trusted, may_recover=may_recover)

    def step(carry: tuple[Any, Info], place: tuple[Array, Array, Interaction]) -> tuple[tuple[Any, Info], None]:
        number, is_counted, row = place
        return jax.lax.cond(is_counted, lambda: learn_one(jr.fold_in(key, number), carry, row), lambda: carry), None

    names = jax.eval_shape(learn, key, state, jax.tree.map(lambda leaf: leaf[0], rows._replace(mask=None)))[1].checks
    # Nothing has failed before the first row: values that just pass, and the particles' own effective sample size.
    passing = {name: CHECKS[name].bound for name in names}
    info = make_info(passing, ess=NUM_FILTERS * jnp.min(jax.vmap(weight_ess)(state.particles.log_weights)))
    return jax.lax.scan(step, (state, info), (jnp.arange(num_rows), mask, rows._replace(mask=None)))[0]
