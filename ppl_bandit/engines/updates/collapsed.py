"""The collapsed engine: conjugate sites are integrated out in closed form, and particles represent the other sites.

With psi the outer sites and theta the rest, which is conjugate given psi, p(psi | y) has a closed form up to a constant, in the
few dimensions of psi. Particles follow it from row to row (`particles.tempering`); theta is drawn from its exact law given psi.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.checks import (
    CHECKS,
    Info,
    check_settings,
    checks_text,
    make_info,
    refuse_moving,
)
from ppl_bandit.engines.explanation import explain, family_name, residual_text
from ppl_bandit.engines.inner.data_sums import WeightedRows, separable_summary, shared_summary
from ppl_bandit.engines.inner.density import Posterior, sample_each
from ppl_bandit.engines.laws.mixture import mixture_of, representative_particles
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT, notable_k_hat
from ppl_bandit.engines.particles.log_density import num_operations
from ppl_bandit.engines.particles.tempering import (
    MAX_DIMS_AT_ONCE,
    follow_path,
    max_autocorrelation,
)
from ppl_bandit.engines.particles.weighted_particles import MAX_ROUNDING, MAX_UNSEEN_MASS
from ppl_bandit.engines.particles.weights import finite_log_weights, normalize_weights, resample, variance_of_mean
from ppl_bandit.engines.proof.certificate import Residual
from ppl_bandit.engines.proof.inspection import Split
from ppl_bandit.engines.proof.split import find_split
from ppl_bandit.engines.refusals import KEEP, refusal
from ppl_bandit.engines.rows import reserve, row_mask, rows_that_fit
from ppl_bandit.engines.state import Particles, State, stored_evidence
from ppl_bandit.engines.updates.collapsed_learning import DataUpdate, add_to_buffer, add_to_sums, certify_and_summarize
from ppl_bandit.engines.updates.collapsed_posterior import (
    CollapsedPosterior,
    as_matrices,
    first_state,
    laws_of,
    roundings_of,
)
from ppl_bandit.numerics.sampling import normal
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Explanation, Interaction, Key

# Budget of the moves of one row if there are many outer dimensions: operations (`num_operations`) for each particle. The 15,000
# of a horseshoe regression with 14 outer dimensions give 400 evaluations; the longest update of 80 rows took 1.8 s.
MAX_WORK = 6_000_000
# The next refresh may restore the other checks.
_PERMANENT = ("certificate", "capacity", "proof", "density", "precision")


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
    """Return the engine that is exact given a few outer sites and represents those by particles, or refuse the program.

    Args:
        outer: the outer sites; None finds the smallest set of at most three sites that leaves the rest conjugate.
        num_particles: weighted draws of the outer sites in the state.
        capacity: rows of data that the first state has room for, if rows must be read again.
        discount: weight of a row's log likelihood relative to the next row's; 1 discounts nothing.
        examples: rows for which the rest must be conjugate, such as a datum that the exact engine refused, beside the rows
            that are simulated for the proof.
        is_selective: whether the search refuses outer sites that have a quarter more dimensions than the rest, and more than
            four: then particles of all sites are as good. `engines.choose` sets it.

    Raises:
        NotConjugate: if no split leaves the rest conjugate, or not provably so; its message lists the splits.
        ValueError: if `outer` names something that is not a latent site, or all of them.
    """
    check_settings(discount, num_particles=num_particles, capacity=capacity)
    refuse_moving(model, "collapsed")
    if num_particles < 20:
        raise ValueError(f"num_particles must be at least 20, got {num_particles}; fewer weights have no diagnostics")
    with jax.enable_x64(True):
        split = find_split(model, outer, examples, is_selective)
        is_shared = split.has_shared_statistics
        summary = shared_summary(model, split) if is_shared else separable_summary(model, split, examples)
    if summary is None and split.space.size > MAX_DIMS_AT_ONCE:
        raise refusal(
            model,
            f"has {split.space.size} outer dimensions, {', '.join(split.space.names)}, and rows that must be read again at "
            f"each of their values; at most {MAX_DIMS_AT_ONCE} are supported then",
            KEEP,
        )
    posterior = CollapsedPosterior(model, split, summary, discount)

    def init(key: Key) -> State:
        return first_state(posterior, key, num_particles, capacity)

    def update(key: Key, state: State, rows: Interaction) -> tuple[State, Info]:
        # With the reduced matmul precision of an accelerator, conjugate rows would fail their certificates.
        with jax.default_matmul_precision("highest"):
            return _update(posterior, key, state, rows)

    def sample(key: Key, state: State, num_samples: int) -> Draws:
        return _sample(posterior, key, state, num_samples)

    def component_laws(state: State) -> tuple[Any, Posterior]:
        picks = representative_particles(state.particles.positions, finite_log_weights(state.particles.log_weights))
        values, laws, _ = laws_of(posterior, state, picks)
        return values, as_matrices(laws)

    example = {name: value[0] for name, value in split.values.items()}
    return Engine(
        init,
        update,
        sample,
        _explain(model, split, None if summary is None else summary.description, num_particles, discount),
        settings={
            "outer": list(split.values),
            "num_particles": num_particles,
            "capacity": capacity,
            "discount": discount,
        },
        capabilities=Capabilities(
            reserve=reserve if summary is None else None,
            marginals=mixture_of(model, split.layout, example, component_laws),
            log_evidence=stored_evidence,
        ),
    )


def _update(posterior: CollapsedPosterior, key: Key, state: State, interaction: Interaction) -> tuple[State, Info]:
    """Certify and learn rows, and move the particles if their weights are uneven."""
    model, split, summary, discount = posterior
    num_particles, dtype = state.particles.positions.shape[0], state.particles.positions.dtype
    has_room = jnp.array(True)
    if summary is None:
        interaction, has_room = rows_that_fit(state.buffer, interaction)
    mask = row_mask(interaction)
    rows = _fill_padding(interaction._replace(reward=model.outcome_values(interaction.reward), mask=mask))

    # The proof holds for every outer value; certificates are evaluated at one, or at two if the likelihood depends on it.
    picks = (state.buffer.num_rows + jnp.arange(1 if split.has_shared_statistics else 2)) % num_particles
    num_new = jnp.sum(mask)
    age = jnp.where(mask, num_new - jnp.cumsum(mask), 0)
    data = WeightedRows(rows, jnp.where(mask, jnp.asarray(discount, dtype) ** age, 0.0))
    picked, laws, _ = laws_of(posterior, state, picks)
    fresh, excess = certify_and_summarize(posterior, state, picked, laws, data)
    are_certified = jnp.all(excess <= 1.0)
    fresh = jax.tree.map(lambda leaf: jnp.where(are_certified, leaf, 0.0), fresh)
    add_rows = add_to_buffer if summary is None else add_to_sums
    added = add_rows(posterior, state, data, fresh, jnp.asarray(discount, dtype) ** num_new)

    log_weights = finite_log_weights(added.log_targets - state.particles.log_targets)
    normalized = normalize_weights(log_weights)
    k_hat = notable_k_hat(log_weights, normalized)
    # Particles with a large autocorrelation are moved again with the next row.
    is_correlated = _autocorrelation_beyond_chance(state) > max_autocorrelation()
    is_stale = (normalized.ess < CHECKS["weight_ess"].bound * num_particles) | (k_hat > MAX_K_HAT) | is_correlated
    evidence = state.particles.evidence
    start = state.particles._replace(evidence=evidence._replace(num_stages=jnp.zeros_like(evidence.num_stages)))
    budget = _max_evaluations(added, start) if mask.shape[0] == 1 else None
    moved = follow_path(key, added.path, added.data, start, are_certified & is_stale, budget)
    has_moved = moved.evidence.num_stages > 0
    log_weights = jnp.where(has_moved, moved.log_weights, log_weights)
    weights, ess, log_mean = jax.lax.cond(
        has_moved, lambda: normalize_weights(finite_log_weights(moved.log_weights)), lambda: normalized
    )
    k_hat = jnp.where(
        has_moved, 0.0, k_hat
    )  # weights that remain after too few stages fail by their effective sample size
    after = added.state_after(moved, has_moved)
    after = after._replace(
        particles=after.particles._replace(
            log_weights=log_weights,
            log_evidence=moved.log_evidence + log_mean - added.log_mean_before + added.common_change,
            num_refreshes=state.particles.num_refreshes + has_moved,
        )
    )
    after = _select(are_certified, after, state)
    is_undefined = jnp.isnan(added.log_targets) | (added.log_targets == jnp.inf)
    is_inside = jnp.all(jax.vmap(lambda x: split.contains(split.space.constrain(x)[0]))(after.particles.positions))
    is_rounded = (roundings_of(posterior, after) > MAX_ROUNDING).astype(dtype)
    checks = {
        "certificate": jnp.max(excess),
        "capacity": has_room,
        "proof": is_inside,
        "density": jnp.isfinite(after.particles.log_evidence),
        "precision": weights @ is_rounded + _share_without_density(posterior, state),
        "weight_ess": ess / num_particles,
        "k_hat": k_hat,
        "path_autocorrelation": _autocorrelation_beyond_chance(after),
        "undefined": jnp.maximum(after.particles.evidence.share_undefined, jnp.mean(is_undefined)),
    }
    residual = Residual(excess, jnp.ones_like(excess), jnp.zeros_like(excess))
    return after, make_info(
        checks,
        permanent=_PERMANENT,
        is_full=~has_room,
        num_refreshes=after.particles.num_refreshes,
        ess=ess,
        log_evidence=after.particles.log_evidence,
        log_evidence_error=jnp.sqrt(after.particles.squared_error + variance_of_mean(ess, num_particles)),
        residual=residual,
    )


def _max_evaluations(added: DataUpdate, start: Particles) -> int | None:
    """Return how many evaluations of the marginal density the moves of one row may take; None for any number."""
    if start.positions.shape[1] <= MAX_DIMS_AT_ONCE:
        return None
    return MAX_WORK // num_operations(lambda at: added.path(added.data, at, jnp.ones(())), start.positions[:1])


def _select(is_new: Bool[Array, ""], new: State, old: State) -> State:
    """Return the new state or the old one, which has the same large arrays: rows that are not certified change neither."""
    bare_new, bare_old = (state._replace(outer_statistics=None, roots=None) for state in (new, old))
    selected = jax.tree.map(lambda a, b: jnp.where(is_new, a, b), bare_new, bare_old)
    return selected._replace(outer_statistics=new.outer_statistics, roots=new.roots)


def _autocorrelation_beyond_chance(state: State) -> Float[Array, ""]:
    """Return the autocorrelation of the last refresh less two standard errors; 0 if there was no refresh."""
    by_chance = max_autocorrelation(state.particles.positions.shape[0]) - max_autocorrelation()
    return jnp.where(state.particles.num_refreshes == 0, 0.0, state.particles.evidence.autocorrelation - by_chance)


def _share_without_density(posterior: CollapsedPosterior, state: State) -> Float[Array, ""]:
    """Return the share of prior draws whose own density is not finite; 0 once there are data.

    The precision is too low for these, as where a covariance matrix is singular up to rounding. The posterior would leave out
    these outer values without a sign.
    """
    if posterior.model.terms_beside_draws():  # these may exclude values that the program draws
        return jnp.zeros_like(state.particles.log_evidence)
    return jnp.where(state.buffer.num_rows == 0, jnp.mean(~jnp.isfinite(state.particles.log_weights)), 0.0)


def _fill_padding(rows: Interaction) -> Interaction:
    """Replace masked rows by copies of one that counts: derivatives also flow through masked rows."""
    assert rows.mask is not None
    source = jnp.where(rows.mask, jnp.arange(rows.mask.shape[0]), jnp.argmax(rows.mask))
    filled = jax.tree.map(lambda leaf: jnp.asarray(leaf)[source], rows._replace(mask=None))
    return filled._replace(mask=rows.mask)


def _sample(posterior: CollapsedPosterior, key: Key, state: State, num_samples: int) -> Draws:
    """Draw outer sites from the particles, and inner sites from their exact law given those.

    If there are fewer particles than draws, several are drawn from each law.
    """
    key_outer, key_real, key_inner = jr.split(key, 3)
    log_weights = finite_log_weights(state.particles.log_weights)
    layout = posterior.split.layout
    num_laws = min(num_samples, len(log_weights))
    num_each = -(-num_samples // num_laws)
    index = resample(jr.uniform(key_outer, dtype=log_weights.dtype), log_weights, num_laws)
    # Drawn in the order in which they are read: particles come last, except beside roots.
    blocks = layout.members.shape
    shape = (*blocks, num_laws) if state.roots is None else (num_laws, *blocks)
    zeros = jnp.zeros((num_each, *shape), log_weights.dtype)
    noise = normal(key_real, zeros, jnp.ones_like(zeros))
    noise = jnp.moveaxis(noise, -1, 1) if state.roots is None else noise
    values, laws, steps = laws_of(posterior, state, index, noise)
    outer = {name: jnp.concatenate([value] * num_each) for name, value in values.items()}
    drawn = {**outer, **sample_each(layout, key_inner, laws, steps)}
    return {name: drawn[name][:num_samples] for name in posterior.model.latent_shapes}


def _explain(
    model: RewardModel, split: Split, description: str | None, num_particles: int, discount: float
) -> Explanation:
    """Explain a program that is exact given its outer sites.

    Args:
        description: what is stored of the data; None for the rows.
    """
    outer, inner = ", ".join(split.space.names), ", ".join(site.name for site in split.layout.sites)
    sites = {site.name: f"{family_name(split.layout, site)}, given {outer}" for site in split.layout.sites}
    sites |= {site: f"{num_particles} weighted particles" for site in split.space.names}
    verb, reach = ("is", "reaches") if len(split.layout.sites) == 1 else ("are", "reach")
    rows = "the rows; a refresh reads them again at every outer value that it evaluates"
    facts = {
        "proved": f"for every value of {outer}, all that {inner} {reach} is real-analytic, none of it a branch, an index, a\n"
        "    comparison or a rounding of a latent",
        "certified": f"prior and likelihood are affine in the sufficient statistics of {inner} at random values of {outer};\n"
        f"    largest residual {residual_text(split.evidence)}; every new datum is certified likewise before it is absorbed",
        "approximated": f"{outer} ({split.space.size} dimension{'s' * (split.space.size > 1)}), by particles of the marginal "
        "posterior",
        "checks": checks_text(("weight_ess", "k_hat", "path_autocorrelation", "precision")),
        "not seen": f"a region of {outer} that no particle reached, and modes that together hold less than "
        f"{MAX_UNSEEN_MASS:.0%} of the mass",
        "stored of the data": rows
        if description is None
        else f"{description}; a step and a refresh cost the same after any number of rows",
    }
    return explain(
        model,
        "collapsed",
        f"EXACT GIVEN {outer}: {inner} {verb} integrated out in closed form.",
        f"exact given {outer}: {inner} integrated out, {outer} represented by {num_particles} particles",
        {site: sites[site] for site in model.latent_shapes},
        facts,
        discount=discount,
    )
