"""Exact where it can be, draws only where it must: integrate the conjugate sites out, and let particles hold the others.

With psi the outer sites and theta the rest, which is conjugate given psi, p(psi | y) has a closed form up to a constant, in the
few dimensions of psi. Particles follow it from row to row (`particles`); theta is drawn from its exact law given psi.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.collapsed.collapsed_posterior import (
    MAX_ROUNDING,
    CollapsedPosterior,
    CollapsedState,
    as_matrices,
    first_state,
    laws_of,
    roundings_of,
)
from ppl_bandit.engines.collapsed.data_summaries import WeightedRows, separable_summary, shared_summary
from ppl_bandit.engines.collapsed.explanation import explain_collapsed
from ppl_bandit.engines.collapsed.learning import learn_by_rows, learn_by_sums, read_new
from ppl_bandit.engines.collapsed.mixture import mixture_of, spread_out
from ppl_bandit.engines.collapsed.split import find_split
from ppl_bandit.engines.exact.families.drawing import sample_each
from ppl_bandit.engines.exact.families.families import Posterior
from ppl_bandit.engines.particles.diagnostics import (
    MAX_K_HAT,
    finite_log_weights,
    normalize_weights,
    notable_k_hat,
    resample,
    variance_of_mean,
)
from ppl_bandit.engines.particles.tempering import TemperingResult, follow, max_memory
from ppl_bandit.engines.row_buffer import has_room_for, reserve, row_mask
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

__all__ = ["CollapsedInfo", "collapsed"]

_MAX_ROUNDED = 0.1  # of the weight may lie on particles whose log targets are rounded by more than the limit


class CollapsedInfo(NamedTuple):
    """Evidence of an update.

    Attributes:
        is_trusted: whether every row is certified, the weights are even and the last refresh was sound.
        may_recover: whether all that lacks, if anything does, is what the next refresh may bring: even weights, or particles
            that have forgotten where they started.
        ess: effective sample size of the particles' weights.
        k_hat: Pareto k-hat of the weights; 0 where none stands out.
        memory: how far particles still resembled where they started when the last refresh ended.
        acceptance: share of its proposals that were accepted.
        num_refreshes: refreshes so far.
        log_evidence, log_evidence_error: log p(data) so far, and its standard error.
        is_certified: whether each row's likelihood is proved analytic and found affine; if one is not, nothing is absorbed.
        excess: how close each row comes to failing its certificate; at most 1 if it does not.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    may_recover: Bool[Array, ""]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    memory: Float[Array, ""]
    acceptance: Float[Array, ""]
    num_refreshes: Int[Array, ""]
    log_evidence: Float[Array, ""]
    log_evidence_error: Float[Array, ""]
    is_certified: Bool[Array, " N"]
    excess: Float[Array, " N"]
    is_full: Bool[Array, ""]


def collapsed(
    model: RewardModel,
    outer: Sequence[str] | None = None,
    *,
    num_particles: int = 1000,
    capacity: int = 64,
    discount: float = 1.0,
    examples: Interaction | None = None,
    is_selective: bool = False,
) -> Engine:
    """Return the engine that is exact given a few outer sites, and holds particles of those; or refuse.

    Args:
        outer: the outer sites; None finds the smallest set that leaves the rest conjugate, of at most three sites.
        num_particles: weighted draws of the outer sites held in the state.
        capacity: rows of data that the first state has room for, where they must be read again.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.
        examples: rows for which the rest has to be conjugate, beside those that are made up to find out: a datum that the
            exact engine refused.
        is_selective: whether to refuse, where outer sites are looked for, those that have more dimensions than the rest, and
            more than four: particles of most of a program are no better than draws of all of it. So does `engines.choose`.

    Raises:
        NotConjugate: if no split leaves the rest conjugate, or not provably so; its message lists what was tried.
        ValueError: if `outer` names what is no latent site, or every one.
    """
    check_settings(discount, num_particles=num_particles, capacity=capacity)
    if num_particles < 20:
        raise ValueError(f"num_particles must be at least 20, got {num_particles}; weights of fewer say nothing")
    with jax.enable_x64(True):
        split = find_split(model, outer, examples, is_selective)
        is_shared = split.has_shared_statistics
        summary = shared_summary(model, split) if is_shared else separable_summary(model, split, examples)
    posterior = CollapsedPosterior(model, split, summary, discount)

    def init(key: Key) -> CollapsedState:
        return first_state(posterior, key, num_particles, capacity)

    def update(key: Key, state: CollapsedState, rows: Interaction) -> tuple[CollapsedState, CollapsedInfo]:
        # An accelerator's shortened products would pass for deviations, and rows would be turned away.
        with jax.default_matmul_precision("highest"):
            return _update(posterior, key, state, rows)

    def draw(key: Key, state: CollapsedState, num_samples: int) -> Draws:
        return _sample(posterior, key, state, num_samples)

    def laws(state: CollapsedState) -> tuple[Any, Posterior]:
        picks = spread_out(state.particles, finite_log_weights(state.log_weights))
        values, found = laws_of(posterior, state, picks)
        return values, as_matrices(found)

    example = {name: value[0] for name, value in split.values.items()}
    return Engine(
        init,
        update,
        draw,
        explain_collapsed(model, split, None if summary is None else summary.description, num_particles, discount),
        settings={
            "outer": list(split.values),
            "num_particles": num_particles,
            "capacity": capacity,
            "discount": discount,
        },
        capabilities=Capabilities(
            reserve=reserve if summary is None else None,
            marginals=mixture_of(model, split.layout, example, laws),
        ),
    )


def _update(
    posterior: CollapsedPosterior, key: Key, state: CollapsedState, interaction: Interaction
) -> tuple[CollapsedState, CollapsedInfo]:
    model, split, summary, discount = posterior
    num_particles = state.particles.shape[0]
    has_room = has_room_for(state.buffer, interaction) if summary is None else jnp.array(True)
    mask = row_mask(interaction) & has_room
    rows = _sound_rows(interaction._replace(reward=model.outcome_values(interaction.reward), mask=mask))

    # By the proof one outer value speaks for all; where the likelihood depends on it, two are asked.
    picks = (state.buffer.num_rows + jnp.arange(1 if split.has_shared_statistics else 2)) % num_particles
    picked, laws = laws_of(posterior, state, picks)

    num_new = jnp.sum(mask)
    age = jnp.where(mask, num_new - jnp.cumsum(mask), 0)
    weights = jnp.where(mask, jnp.asarray(discount, state.particles.dtype) ** age, 0.0)
    keep = jnp.asarray(discount, state.particles.dtype) ** num_new
    learn = learn_by_rows if summary is None else learn_by_sums
    fresh, excess = read_new(posterior, state, picked, laws, WeightedRows(rows, weights))
    is_certified = excess <= 1.0
    learnt = learn(posterior, state, WeightedRows(rows, weights), fresh, keep)

    log_weights = finite_log_weights(learnt.ends - state.log_targets)
    weighed = normalize_weights(log_weights)
    k_hat = notable_k_hat(log_weights, weighed)
    # Particles that have not forgotten where they started are moved again with the next row, whatever it says.
    is_stale = (weighed.ess < num_particles / 2) | (k_hat > MAX_K_HAT) | ~_has_forgotten(state)
    start = TemperingResult(
        state.particles,
        state.log_targets,
        state.log_weights,
        jnp.zeros_like(state.log_evidence),
        state.squared_error,
        state.memory,
        state.acceptance,
        jnp.zeros_like(state.num_refreshes),
    )
    is_sound = jnp.all(is_certified)
    moved = follow(key, learnt.path, learnt.data, start, is_sound & is_stale)
    has_moved = moved.num_stages > 0
    log_weights = jnp.where(has_moved, moved.log_weights, log_weights)
    # Weights that the moves left behind, on a path too long for them, are uneven whatever their tail is.
    weights, ess, log_mean = jax.lax.cond(
        has_moved, lambda: normalize_weights(finite_log_weights(moved.log_weights)), lambda: weighed
    )
    k_hat = jnp.where(has_moved, 0.0, k_hat)
    is_fresh = (ess >= num_particles / 2) & (k_hat <= MAX_K_HAT)
    predictive = moved.log_ratio + log_mean - learnt.before
    after = learnt.settle(moved, has_moved)._replace(
        log_weights=log_weights,
        log_mean=log_mean,
        log_evidence=state.log_evidence + predictive + learnt.common,
        squared_error=moved.squared_error,
        memory=moved.memory,
        acceptance=moved.acceptance,
        num_refreshes=state.num_refreshes + has_moved,
    )
    # A reading is as large as all else, and changes only where particles have moved, which those of unsound rows have not.
    bare = jax.tree.map(
        lambda new, old: jnp.where(is_sound, new, old),
        after._replace(outer_statistics=None),
        state._replace(outer_statistics=None),
    )
    after = bare._replace(outer_statistics=after.outer_statistics)
    is_inside = jnp.all(jax.vmap(lambda x: split.contains(split.space.constrain(x)[0]))(after.particles))
    is_finite = jnp.isfinite(after.log_evidence)
    is_resolved = weights @ (roundings_of(posterior, after) > MAX_ROUNDING).astype(weights.dtype) <= _MAX_ROUNDED
    may_recover = is_sound & has_room & is_inside & is_finite & is_resolved
    return after, CollapsedInfo(
        may_recover & is_fresh & _has_forgotten(after),
        may_recover,
        ess,
        k_hat,
        after.memory,
        after.acceptance,
        after.num_refreshes,
        after.log_evidence,
        jnp.sqrt(after.squared_error + variance_of_mean(ess, num_particles)),  # not anew from all weights
        is_certified,
        excess,
        ~has_room,
    )


def _has_forgotten(state: CollapsedState) -> Bool[Array, ""]:
    """Tell whether the last refresh, if there was one, left particles that do not resemble where they started."""
    return (state.num_refreshes == 0) | (state.memory <= max_memory(state.particles.shape[0]))


def _sound_rows(rows: Interaction) -> Interaction:
    """Return rows whose padding is a copy of one that counts: derivatives flow through masked rows too."""
    assert rows.mask is not None
    source = jnp.where(rows.mask, jnp.arange(rows.mask.shape[0]), jnp.argmax(rows.mask))
    filled = jax.tree.map(lambda leaf: jnp.asarray(leaf)[source], rows._replace(mask=None))
    return filled._replace(mask=rows.mask)


def _sample(posterior: CollapsedPosterior, key: Key, state: CollapsedState, num_samples: int) -> Draws:
    """Draw outer sites from the particles, and inner sites from their exact law given those."""
    key_outer, key_inner = jr.split(key)
    weights = finite_log_weights(state.log_weights)
    index = resample(jr.uniform(key_outer, dtype=weights.dtype), weights, num_samples)

    values, laws = laws_of(posterior, state, index)
    drawn = {**values, **sample_each(posterior.split.layout, key_inner, laws)}
    return {name: drawn[name] for name in posterior.model.latent_shapes}
