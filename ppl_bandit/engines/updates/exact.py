"""The exact engines: `conjugate`, and `kalman` for programs with a linear Gaussian step.

There is no table of likelihoods. A likelihood is conjugate to a prior exactly when its log is affine in the prior's sufficient
statistics (Diaconis and Ylvisaker, 1979), which can be proved (`engines.proof`), derived and certified (`inner.reading`) for
any program.

For `kalman` every learnt row is one step: the law of the latents is predicted to the time of the row, then the row is absorbed.
A decision reads the law predicted to its own time. The state is one Gaussian, so neither memory nor time grows with the steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.checks import Info, check_settings, refuse_moving
from ppl_bandit.engines.explanation import explain, explain_conjugate, family_name, residual_text, site_parameters
from ppl_bandit.engines.inner.density import Posterior, log_mass, sample as draw
from ppl_bandit.engines.inner.layout import REAL, Layout
from ppl_bandit.engines.inner.reading import ChunkEvidence, certify
from ppl_bandit.engines.laws.marginals import marginals_of
from ppl_bandit.engines.laws.mixture import find_infinite_means
from ppl_bandit.engines.proof.certificate import NO_RESIDUAL, Evidence, Residual, is_affine, worst_of
from ppl_bandit.engines.proof.examination import examine, prove
from ppl_bandit.engines.proof.linear_step import (
    LinearStep,
    derive_step,
    elapsed_until,
    first_clock,
    joint_layout,
    measure_step,
    predict,
    prove_step,
    require_moving,
    shortest_step,
    step_residual,
    time_text,
)
from ppl_bandit.engines.refusals import refusal, rounding_refusal
from ppl_bandit.engines.rows import row_mask
from ppl_bandit.engines.state import State, stored_evidence
from ppl_bandit.engines.updates.chunks import (
    MAX_ROWS_AT_ONCE,
    NUM_POINTS,
    absorb_rows,
    add_rows,
    chunk_absorber,
    learn_in_chunks,
)
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit, run_once
from ppl_bandit.types import Capabilities, Engine, Explanation, Interaction, Key, Marginals


def conjugate(model: RewardModel, *, discount: float = 1.0) -> Engine:
    """Return the exact engine of a program, or refuse.

    The proof and the certificates at build time run in float64; `init`, `update` and `sample` follow jax's precision.

    Args:
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing. Below 1 the natural
            parameters decay towards the prior's: the posterior is exact for the likelihood so weighted.

    Raises:
        NotConjugate: if the program is not conjugate or not provably so. The message says what stopped the proof and what
            would make the program conjugate.
    """
    check_settings(discount)
    refuse_moving(model, "conjugate")
    with jax.enable_x64(True):
        layout = prove(model)
        absorb_chunk = chunk_absorber(model, layout, discount)
        # Products of reduced precision on an accelerator would look like deviations.
        with jax.default_matmul_precision("highest"):
            prior, evidence = examine(model, layout, absorb_chunk)
        infinite_text, infinite_means = find_infinite_means(model, layout, prior)

    def init(key: Key) -> Posterior:
        del key  # the prior is not random
        # With an explicit dtype: jax may cache a NumPy constant across a change of its precision.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)), prior)

    def update(key: Key, state: Posterior, interaction: Interaction) -> tuple[Posterior, Info]:
        with jax.default_matmul_precision("highest"):
            return absorb_rows(layout, absorb_chunk, init(key), state, interaction)

    find_mass = quick_jit(functools.partial(log_mass, layout))

    def log_evidence(state: Posterior) -> tuple[float, float]:
        return float(find_mass(state) - find_mass(init(jr.key(0)))), 0.0

    def parameters(state: Posterior) -> dict[str, dict[str, np.ndarray]]:
        return site_parameters(layout, state)

    return Engine(
        init,
        update,
        functools.partial(draw, layout),
        explain_conjugate(model, layout, prior, evidence, discount, infinite_text),
        settings={"discount": discount},
        capabilities=Capabilities(
            parameters=parameters,
            marginals=marginals_of(model, layout),
            infinite_means=infinite_means,
            add_rows=functools.partial(add_rows, model, layout) if discount == 1.0 else None,
            log_evidence=log_evidence,
        ),
    )


_REMEDY = (
    "a step is linear Gaussian if every moving latent is Normal, with a mean that is affine in the others, such as "
    '0.9 * previous["level"], and a scale that does not depend on latents'
)


def kalman(model: RewardModel) -> Engine:
    """Return the Kalman filter of a program whose latents move, or refuse.

    Raises:
        NotConjugate: if the step or the likelihood is not linear Gaussian, or not provably so.
        ValueError: if no latent moves.
    """
    require_moving(model, "kalman")
    with jax.enable_x64(True):
        layout = prove(model)
        prior, evidence = examine(model, layout)
        scaled = [site.name for site in layout.sites if site.kind != REAL]
        if scaled:
            raise refusal(
                model,
                f"has no Kalman filter: {', '.join(scaled)} {'is' if len(scaled) == 1 else 'are'} not Gaussian",
                "fix it, or use an engine that has particles for it",
            )
        joint, step_residual = prove_linear_step(model)
        fixed = None if model.has_clock else run_once(lambda: derive_step(model, layout))
        shortest = shortest_step(model, layout, prior) if model.has_clock else 0.0

    def step_of(elapsed: Any) -> LinearStep:
        return derive_step(model, layout, elapsed) if fixed is None else LinearStep(*fixed)

    def init(key: Key) -> State:
        del key  # the prior is not random
        # With an explicit dtype: jax may cache a NumPy constant across a change of its precision.
        start = jax.tree.map(lambda leaf: jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)), prior)
        return State(law=start, clock=first_clock(), log_evidence=jnp.zeros(()))

    def predicted(state: State, context: Any = None) -> State:
        elapsed, clock = elapsed_until(model, state.clock, context, shortest)
        later = predict(step_of(elapsed), state.law)
        moved = jax.tree.map(lambda new, old: jnp.where(elapsed > 0.0, new, old), later, state.law)
        return state._replace(law=moved, clock=clock)

    def learn(state: State, row: Interaction) -> tuple[State, tuple[Posterior, Posterior, Array]]:
        """Predict to a row that counts and absorb it; return also the laws before and after it, and the time between rows."""
        elapsed, _ = elapsed_until(model, state.clock, row.context, shortest)
        before = predicted(state, row.context)
        after, _ = add_rows(model, layout, before.law, _as_rows(row))
        learnt = before._replace(law=after, clock=before.clock.after_row())
        kept = jax.tree.map(lambda new, old: jnp.where(row_mask(row), new, old), learnt, state)
        return kept, (before.law, after, elapsed)

    def learn_chunk(state: State, rows: Interaction) -> tuple[State, ChunkEvidence]:
        after, steps = jax.lax.scan(learn, state, rows)
        log_density, evidence = _certify_steps(model, layout, joint if model.has_clock else None, rows, *steps)
        return after._replace(log_evidence=state.log_evidence + log_density), evidence

    def update(key: Key, state: State, interaction: Interaction) -> tuple[State, Info]:
        del key
        # Products of reduced precision on an accelerator would look like deviations.
        with jax.default_matmul_precision("highest"):
            rows = jax.tree.map(jnp.asarray, interaction)
            return learn_in_chunks(learn_chunk, state, rows, max(1, min(rows.arm.shape[0], MAX_ROWS_AT_ONCE)))

    def sample(key: Key, state: State, num_samples: int) -> dict[str, Array]:
        return draw(layout, key, predicted(state).law, num_samples)

    find_marginals = marginals_of(model, layout)

    def marginals(state: State, context: Any) -> Marginals | None:
        return find_marginals(predicted(state, context).law, context)

    return Engine(
        init,
        update,
        sample,
        _explain(model, layout, prior, evidence, step_residual),
        capabilities=Capabilities(
            parameters=lambda state: site_parameters(layout, predicted(state).law),
            marginals=marginals,
            advance=lambda key, state, context: predicted(state, context),
            log_evidence=stored_evidence,
        ),
    )


def prove_linear_step(model: RewardModel) -> tuple[Layout, Residual]:
    """Return the layout of two steps in a row, and how far their joint prior is from Gaussian; runs in float64.

    Raises:
        NotConjugate: if the step is not proved linear Gaussian.
    """
    layout = joint_layout(model)
    names = ", ".join(f"'{name}'" for name in model.moving_sites)
    gap = prove_step(model, layout)
    if gap is not None:
        raise refusal(model, f"has no proved Kalman filter: in the step of {names}, {gap.reason}", _REMEDY)
    residual = run_once(lambda: measure_step(model, layout))
    if not bool(is_affine(residual)):
        nats, tolerance = float(residual.nats), float(residual.tolerance)
        if nats <= tolerance or not nats < np.inf:
            raise rounding_refusal(model, layout, residual, f", in the step of {names}")
        raise refusal(
            model,
            f"has no Kalman filter: the step of {names} is not linear Gaussian",
            _REMEDY,
            f"residual {nats:.1e} nats, tolerance {tolerance:.1e} nats",
        )
    return layout, residual


def certify_row(
    model: RewardModel, layout: Layout, before: Posterior, row: Interaction, after: Posterior | None = None
) -> tuple[Float[Array, ""], ChunkEvidence]:
    """Return the log density of a row given the law before it, and its certificate.

    Args:
        row: without a leading axis.
        after: the law after it, if known.
    """
    before = before._replace(constant=jnp.zeros_like(before.constant))
    after, found = certify(model, layout, before, _as_rows(row), NUM_POINTS, after=after)
    return log_mass(layout, after) - log_mass(layout, before), found


def _as_rows(row: Interaction) -> Interaction:
    """Return a row as a batch of one row that counts."""
    return jax.tree.map(lambda leaf: leaf[None], row._replace(mask=None))


def _certify_steps(
    model: RewardModel,
    layout: Layout,
    joint: Layout | None,
    rows: Interaction,
    before: Posterior,
    after: Posterior,
    elapsed: Float[Array, " N"],
) -> tuple[Float[Array, ""], ChunkEvidence]:
    """Return the log density of rows, and the certificates of rows and steps, which are evaluated together.

    Args:
        joint: the layout of two steps; see `step_residual`.
        before, after: the laws before and after each row.
    """

    def certify_one(
        row: Interaction, before: Posterior, after: Posterior, elapsed: Array
    ) -> tuple[Array, ChunkEvidence]:
        log_density, found = certify_row(model, layout, before, row, after)
        residual = jax.tree.map(lambda leaf: leaf[0], found.residuals)
        evidence = ChunkEvidence(residual, step_residual(model, joint, elapsed), found.is_possible[0], found.is_held)
        nothing = jnp.zeros_like(log_density), ChunkEvidence(NO_RESIDUAL, NO_RESIDUAL, evidence.is_possible, True)
        return jax.tree.map(lambda own, none: jnp.where(row_mask(row), own, none), (log_density, evidence), nothing)

    log_densities, found = jax.vmap(certify_one)(rows, before, after, elapsed)
    return jnp.sum(log_densities), found._replace(in_prior=worst_of(found.in_prior), is_held=jnp.all(found.is_held))


def _explain(model: RewardModel, layout: Layout, prior: Posterior, evidence: Evidence, step: Residual) -> Explanation:
    sites = {site.name: family_name(layout, site) for site in layout.sites}
    lines = []
    for site in layout.sites:
        known = site_parameters(layout, prior)[site.name]
        kind = "moves" if site.name in model.moving_sites else "static"
        count = f", {site.size} elements" if site.size > 1 else ""
        lines.append(f"  {site.name}: Gaussian, {kind}{count}; first mean {known['mean'].ravel()[0]:.6g}")
    facts = {
        "time": time_text(model),
        "proved": "the step and the likelihood are real-analytic in the latents",
        "certified": f"the joint law of two steps is Gaussian (residual {float(step.nats):.1e} nats, tolerance "
        f"{float(step.tolerance):.1e} nats), and the likelihood of {evidence.num_rows} rows on all {model.num_arms} arms "
        f"likewise;\n    largest residual {residual_text(evidence)}; every new datum is certified likewise",
    }
    verdict = "EXACT, by a Kalman filter. The latents are Gaussian at every step; draws are independent."
    reason = "proved linear Gaussian: a Kalman filter is exact"
    return explain(model, "kalman", verdict, reason, sites, facts, is_exact=True, site_lines=lines)
