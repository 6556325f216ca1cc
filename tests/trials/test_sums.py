"""Rows between two looks are one update: the posterior equals that of the engine's own update, row by row."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import RewardModel, engines
from ppl_bandit.trials.setting import engine_of_sums, sums_by_arm
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
    numpyro.sample("reward", dist.Weibull(1.0 / rate[arm], 1.5))


@pytest.mark.parametrize(
    "program",
    [rates, pytest.param(counts, marks=pytest.mark.slow), pytest.param(unknown_noise, marks=pytest.mark.slow)],
    ids=lambda program: program.__name__,
)
def test_rows_learnt_by_their_sums_equal_rows_learnt_by_the_engine(program):
    with jax.enable_x64(True):
        model = RewardModel(program, 3)
        engine = engines.conjugate(model)
        summed = engine_of_sums(model, engine)
        arm = jnp.asarray([0, 0, 2, 2, 2, 0, 2, 2, 1])
        truth = {name: value[0] for name, value in model.sample_prior(jr.key(1), 1).items()}
        reward = jnp.asarray(model.draw_reward(jr.key(2), truth, arm), float)
        rows = Interaction(arm, reward, None, jnp.arange(9) < 8)  # the play of arm 1 is padding
        own, _ = jax.jit(summed.update)(jr.key(0), engine.init(jr.key(0)), rows)
        state, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows)
        assert bool(info.is_trusted)
        for found, expected in zip(jax.tree.leaves(own), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
        powers = np.stack([np.bincount(arm[:8], np.asarray(reward[:8]) ** power, 3) for power in range(3)])
        np.testing.assert_allclose(sums_by_arm(rows, model, 3), powers)


@pytest.mark.slow
def test_a_program_whose_update_is_no_polynomial_of_the_outcome_learns_row_by_row():
    with jax.enable_x64(True):
        model = RewardModel(lifetimes, 3)
        assert engine_of_sums(model, engines.choose(model)) is None
