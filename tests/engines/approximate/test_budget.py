"""The budget of an update of one row: a count of density evaluations, so the tests do not depend on the machine."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import engines
from ppl_bandit.engines.updates import reweight
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction


def clicks(arm):
    with numpyro.plate("arms", 2):
        score = numpyro.sample("score", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(logits=score[arm]))


def horseshoe(arm, context):
    overall, noise = numpyro.sample("overall", dist.HalfCauchy(1.0)), numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("arms", 2, dim=-2), numpyro.plate("features", 6, dim=-1):
        local = numpyro.sample("local", dist.HalfCauchy(1.0))
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(jnp.sum((weight * local * overall)[arm] * context, axis=-1), noise))


def counts(arm, context):
    with numpyro.plate("arms", 2):
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0))
    mean = jnp.exp(jnp.clip(jnp.sum(weight[arm] * context, axis=-1), -5.0, 5.0))
    numpyro.sample("reward", dist.NegativeBinomial2(mean, concentration))


def states_by_rows(program, num_features, reward, num_rows, num_particles=200):
    """The state and the evidence of `reweight` after each row."""
    engine = engines.reweight(RewardModel(program, 2, np.zeros(num_features)), num_particles=num_particles)
    update, state = quick_jit(engine.update), engine.init(jr.key(0))
    rng = np.random.default_rng(0)
    for row in range(num_rows):
        context = rng.standard_normal(num_features)
        rows = Interaction(
            jnp.array([row % 2]), jnp.array([float(reward(rng, row % 2, context))]), jnp.asarray(context[None])
        )
        state, info = update(jr.key(row), state, rows)
        yield state, info


@pytest.mark.slow
def test_moves_that_ended_at_their_budget_continue_with_a_row_of_another_arm_until_that_has_failed_ten_times():
    engine = engines.reweight(RewardModel(clicks, 2), num_particles=64)
    update, quickly = quick_jit(engine.update), quick_jit(engine.capabilities.quick_update)
    state = engine.init(jr.key(0))
    evidence = state.particles.evidence
    checks = {**evidence.checks, "budget": jnp.array([0.0, 1.0])}
    evidence = evidence._replace(checks=checks, is_sound=jnp.array([False, True]))
    state = state._replace(particles=state.particles._replace(evidence=evidence))
    rows = Interaction(jnp.array([1]), jnp.array([1.0]))
    _, before, is_complete = quickly(jr.key(1), state, rows)
    assert bool(before.is_unfinished) and not bool(before.is_trusted) and not bool(is_complete)
    assert any("budget" in failure for failure in before.failed_checks())
    tried = state._replace(
        particles=state.particles._replace(evidence=evidence._replace(num_unfinished=jnp.array([10, 0])))
    )
    _, info, is_complete = quickly(jr.key(1), tried, rows)
    assert bool(info.is_unfinished) and bool(is_complete)
    _, info = update(jr.key(1), state, rows)
    assert int(info.num_refreshes) == 1 and bool(info.is_trusted) and not bool(info.is_unfinished)
    # They wait until the block has a quarter more rows than at their end, unless fewer than a tenth of the particles count.
    own, other = Interaction(jnp.array([0]), jnp.array([1.0])), rows
    for num_rows, row, waits in ((40, other, True), (48, own, True), (49, own, False)):
        counts = {"num_rows": jnp.array([num_rows, 0]), "num_searched": jnp.array([40, 0])}
        grown = state._replace(search=state.search._replace(**counts))
        _, info, is_complete = quickly(jr.key(1), grown, row)
        assert bool(info.is_unfinished) and bool(is_complete) == waits
        few = grown.particles.log_weights.at[0, 6:].set(-jnp.inf)  # 6 of 64
        lost = grown._replace(particles=grown.particles._replace(log_weights=few))
        assert not bool(quickly(jr.key(1), lost, row)[2])
    # A batch would renew the 10 of 64 particles that count before its first row; one row is absorbed while the moves wait.
    few = grown.particles.log_weights.at[0, 10:].set(-jnp.inf)
    search = grown.search._replace(num_rows=jnp.array([40, 0]))
    grown = grown._replace(particles=grown.particles._replace(log_weights=few), search=search)
    after, info = update(jr.key(1), grown, other)
    assert int(after.buffer.num_rows) == 1 and int(info.num_refreshes) == 0


@pytest.mark.slow
def test_no_row_of_a_horseshoe_regression_evaluates_the_density_more_often_than_its_budget(monkeypatch):
    # A third of the budget, which moves of this program always use up: the whole budget ends them in some runs only.
    monkeypatch.setattr(reweight, "MAX_WORK", 1_000_000)
    slopes = np.array([2.0, -1.5])
    found = list(
        states_by_rows(
            horseshoe, 6, lambda rng, arm, x: slopes[arm] * x[0] + 0.5 * rng.standard_normal(), 12, num_particles=100
        )
    )
    evaluations = np.array([int(state.particles.evidence.num_evaluations[0]) for state, _ in found])
    transitions = np.array([int(state.particles.evidence.num_transitions[0]) for state, _ in found])
    # The last trajectory has at most 65 evaluations; for each transition there are 8 coordinate moves.
    budget = reweight.MAX_WORK / 5_000  # an evaluation takes 5,400 operations in jax 0.10
    assert evaluations.max() <= budget + 65 + 8 * transitions.max() + 5
    is_unfinished = np.array([bool(info.is_unfinished) for _, info in found])
    assert is_unfinished.any() and not any(bool(info.is_trusted) for _, info in found if bool(info.is_unfinished))


@pytest.mark.slow
def test_a_negative_binomial_regression_never_meets_the_budget():
    def reward(rng, arm, context):
        mean = np.exp(0.5 * context[0] + 0.3 * arm)
        return rng.poisson(mean * rng.gamma(2.0, 0.5))

    found = list(states_by_rows(counts, 3, reward, 40))
    assert int(found[-1][1].num_refreshes) > 3
    assert not any(bool(info.is_unfinished) for _, info in found)
