"""Refreshes and quick updates of `reweight`."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from ppl_bandit import engines
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction


@pytest.mark.slow
def test_particles_whose_moves_failed_a_check_are_renewed_with_the_next_row_of_their_arm():
    def program(arm):
        with numpyro.plate("arms", 2):
            score = numpyro.sample("score", dist.Normal(0.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(logits=score[arm]))

    engine = engines.reweight(RewardModel(program, 2), num_particles=64)
    update = quick_jit(engine.update)
    state = engine.init(jr.key(0))
    doubted = state.particles.evidence._replace(is_sound=jnp.array([False, True]))
    state = state._replace(particles=state.particles._replace(evidence=doubted))
    other, info = update(jr.key(1), state, Interaction(jnp.array([1]), jnp.array([1.0])))
    assert int(info.num_refreshes) == 0 and not bool(info.is_trusted)
    own, info = update(jr.key(1), other, Interaction(jnp.array([0]), jnp.array([1.0])))
    # Of these weights 85% count, (E s)^2 / E s^2 for a logistic s of a standard normal: nothing else would have renewed them.
    assert int(info.num_refreshes) == 1 and bool(info.is_trusted)
    _, info = update(jr.key(2), own, Interaction(jnp.array([0]), jnp.array([1.0])))
    assert int(info.num_refreshes) == 1


def click(arm):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
    numpyro.sample("reward", dist.Bernoulli(logits=2.0 * weight[arm]))


@pytest.mark.slow
def test_a_quick_update_equals_the_update_unless_particles_are_renewed():
    engine = engines.reweight(RewardModel(click, 2), num_particles=200)
    update, quickly = quick_jit(engine.update), quick_jit(engine.capabilities.quick_update)
    rng = np.random.default_rng(0)
    state, num_quick, num_rows = engine.init(jr.key(0)), 0, 40
    for row in range(num_rows):
        rows = Interaction(jnp.array([row % 2]), jnp.array([float(rng.random() < 0.8)]))
        known, is_enough = quickly(jr.key(row), state, rows)[0::2]
        before, (state, info) = state, update(jr.key(row), state, rows)
        num_renewed = int(info.num_refreshes) - int(jnp.sum(before.particles.num_refreshes))
        assert bool(is_enough) == (num_renewed == 0)
        num_quick += int(is_enough)
        if is_enough:
            # The same operations in two programs: differences are roundings, of weights that are of the size of 1.
            jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4), known, state)
    assert 0 < num_quick < num_rows


class UndefinedBelow(dist.Normal):
    """A normal law whose density is nan for locations below -.5, as of a formula that overflows there."""

    def log_prob(self, value):
        return jnp.where(self.loc < -0.5, jnp.nan, dist.Normal.log_prob(self, value))


@pytest.mark.slow
def test_a_batch_whose_posterior_lies_where_the_density_is_undefined_is_not_trusted():
    def program(arm):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([2]))
        numpyro.sample("reward", UndefinedBelow(level[arm], 1.0))

    engine = engines.reweight(RewardModel(program, 2), num_particles=200)
    update, rng = quick_jit(engine.update), np.random.default_rng(0)
    found = {}
    for mean in (-0.8, 3.0):
        rows = Interaction(jnp.zeros(24, int), jnp.asarray(rng.normal(mean, 1.0, 24), jnp.float32))
        _, info = update(jr.key(0), engine.init(jr.key(0)), rows)
        found[mean] = info
    assert not bool(found[-0.8].is_trusted)
    assert "the log density of a particle is not finite" in found[-0.8].failed_checks()
    assert bool(found[3.0].is_trusted)


@pytest.mark.slow
def test_a_batch_far_in_the_tail_of_a_truncated_normal_has_the_posterior_of_a_quadrature_or_is_not_trusted():
    """24 rewards near 0 of a normal law cut off there: its location is about -8, where NumPyro's density is infinite."""

    def program(arm):
        level = numpyro.sample("level", dist.Normal(0.0, 5.0).expand([2]))
        numpyro.sample("reward", dist.TruncatedNormal(level[arm], 1.0, low=0.0))

    rewards = stats.expon.ppf((np.arange(24) + 0.5) / 24, scale=0.12)
    at = np.linspace(-40.0, 10.0, 20_001)
    log_density = stats.norm.logpdf(at, 0.0, 5.0) - 24 * stats.norm.logcdf(at)
    log_density += stats.norm.logpdf(rewards[:, None], at).sum(axis=0)
    density = np.exp(log_density - log_density.max())
    mean = np.average(at, weights=density)
    sd = np.sqrt(np.average((at - mean) ** 2, weights=density))
    engine = engines.reweight(RewardModel(program, 2), num_particles=500)
    rows = Interaction(jnp.zeros(24, int), jnp.asarray(rewards, jnp.float32))
    state, info = quick_jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows)
    drawn = np.asarray(engine.sample(jr.key(1), state, 2000)["level"][:, 0])
    print(
        f"exact {mean:.2f} +- {sd:.2f}, found {drawn.mean():.2f} +- {drawn.std():.2f}, trusted {bool(info.is_trusted)}"
    )
    # 500 particles of an autocorrelation of at most .1: a standard error of .05 sd of the mean, and .035 sd of the sd.
    assert not bool(info.is_trusted) or (abs(drawn.mean() - mean) < 0.25 * sd and abs(drawn.std() / sd - 1.0) < 0.2)
