"""Rows between two looks are one update: the posterior equals that of the engine's own update, with certificates."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Design, RewardModel, engines
from ppl_bandit.trials.setting import Setting, sums_by_arm
from ppl_bandit.types import Interaction


def rates(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def counts(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


def unknown_noise(arm):
    with numpyro.plate("arms", 3):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0))
        mean = numpyro.sample("mean", dist.Normal(0.0, jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


def lifetimes(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("reward", dist.Weibull(rate[arm] ** (-1.0 / 1.5), 1.5))


def lines(arm, context):
    with numpyro.plate("arms", 3):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(slope[arm] * context, 0.5))


@pytest.mark.parametrize(
    "program",
    [rates, *(pytest.param(one, marks=pytest.mark.slow) for one in (counts, unknown_noise, lifetimes, lines))],
    ids=lambda program: program.__name__,
)
def test_simulated_rows_learnt_at_once_equal_rows_learnt_by_the_engine(program):
    with jax.enable_x64(True):
        contexts = jnp.linspace(-1.0, 1.0, 9) if program is lines else None
        model = RewardModel(program, 3, context=None if contexts is None else contexts[0])
        engine = engines.conjugate(model)
        learner = Setting(model, engine, Design([9]), -1, 10).learner
        arm = jnp.asarray([0, 0, 2, 2, 2, 0, 2, 2, 1])
        truth = {name: value[0] for name, value in model.sample_prior(jr.key(1), 1).items()}
        reward = jnp.asarray(model.draw_reward(jr.key(2), truth, arm, contexts), float)
        rows = Interaction(arm, reward.at[8].set(jnp.nan), contexts, jnp.arange(9) < 8)  # the play of arm 1 is padding
        own, simulated = jax.jit(lambda state: _plain(learner.update(jr.key(0), state, rows)))(engine.init(jr.key(0)))
        state, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows)
        assert bool(info.is_trusted) and bool(simulated)
        for found, expected in zip(jax.tree.leaves(own), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
        nothing = rows._replace(mask=jnp.zeros(9, bool))
        same, simulated = jax.jit(lambda state: _plain(learner.update(jr.key(0), state, nothing)))(own)
        assert bool(simulated) and all(map(np.array_equal, jax.tree.leaves(same), jax.tree.leaves(own)))
        powers = np.stack([np.bincount(arm[:8], np.asarray(reward[:8]) ** power, 3) for power in range(3)])
        np.testing.assert_allclose(sums_by_arm(rows, model, 3), powers)


def test_rows_that_the_program_cannot_produce_are_not_learnt_and_not_trusted():
    with jax.enable_x64(True):
        model = RewardModel(rates, 3)
        engine = engines.conjugate(model)
        learner = Setting(model, engine, Design([2]), -1, 10).learner
        state = engine.init(jr.key(0))
        after, is_trusted = _plain(
            learner.update(jr.key(0), state, Interaction(jnp.array([0, 1]), jnp.array([1.0, 7.0])))
        )
        assert not is_trusted and all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(state)))


def _plain(found):
    return found[0], found[1].is_trusted
