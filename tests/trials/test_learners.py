"""A block of rows is one update: the posterior equals that of the engine's own update, row by row."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Environment, RewardModel, engines
from ppl_bandit.trials.simulated.learners import learner_of, sums_of_outcomes
from ppl_bandit.types import Interaction

COUNTS = np.array([3.0, 0.0, 5.0])


def rates(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def unknown_noise(arm):
    with numpyro.plate("arms", 3):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0))
        mean = numpyro.sample("mean", dist.Normal(0.0, jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


def lifetimes(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("reward", dist.Weibull(1.0 / rate[arm], 1.5))


@pytest.mark.slow  # whole trials are compared with a replica in test_operating_characteristics.py
@pytest.mark.parametrize("program", [rates, unknown_noise], ids=lambda program: program.__name__)
def test_a_block_learned_at_once_equals_its_rows_learned_by_the_engine(program, monkeypatch):
    with jax.enable_x64(True):
        model = RewardModel(program, 3)
        engine = engines.conjugate(model)
        learner = learner_of(model, engine, 100)
        assert learner.uses_sums
        # Rows are drawn, and their sums used in place of the law of the sums, so that both ways see the same data.
        monkeypatch.setattr("ppl_bandit.trials.simulated.learners.sums_of_outcomes", lambda law: None)
        seen = []
        draw_reward = Environment.draw_reward
        monkeypatch.setattr(
            Environment, "draw_reward", lambda self, *given: seen.append(draw_reward(self, *given)) or seen[-1]
        )
        truth = {name: value[0] for name, value in model.sample_prior(jr.key(1), 1).items()}
        block = learner.learn(jr.key(2), learner.init(jr.key(0)), Environment(model, truth), jnp.asarray(COUNTS), 8)
        arm = np.repeat(np.arange(3), COUNTS.astype(int))
        rows = Interaction(jnp.asarray(arm), jnp.asarray(seen[0], float))
        state, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows)
        assert bool(info.is_trusted)
        for own, expected in zip(jax.tree.leaves(block.state), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(block.sums, np.bincount(arm, np.asarray(seen[0], float), minlength=3))


@pytest.mark.slow
def test_a_program_whose_update_is_no_polynomial_of_the_outcome_learns_row_by_row():
    with jax.enable_x64(True):
        model = RewardModel(lifetimes, 3)
        assert not learner_of(model, engines.choose(model), 100).uses_sums


LAWS = [
    dist.Bernoulli(jnp.array([0.2, 0.5, 0.9])),
    dist.Binomial(4, jnp.array([0.2, 0.5, 0.9])),
    dist.Poisson(jnp.array([0.5, 2.0, 9.0])),
    dist.Exponential(jnp.array([0.5, 2.0, 9.0])),
    dist.Gamma(jnp.array([0.5, 2.0, 9.0]), 3.0),
    dist.Normal(jnp.array([-1.0, 0.0, 5.0]), jnp.array([0.5, 1.0, 2.0])),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_sums_of_outcomes_have_the_mean_and_variance_of_sums(law):
    num_draws = 4000
    num = jnp.array([7.0, 0.0, 40.0])
    draw = jax.jit(jax.vmap(lambda key: sums_of_outcomes(law)(key, num)))
    sums, squares = draw(jr.split(jr.key(0), num_draws))
    mean, variance = num * law.mean, num * law.variance
    # Four standard errors of a mean; the variance of a squared deviation is at most 9 variance^2 for these sums.
    assert np.all(np.abs(sums.mean(axis=0) - mean) <= 4 * np.sqrt(variance / num_draws) + 1e-6)
    assert np.all(np.abs(sums.var(axis=0) - variance) <= 4 * 3 * variance / np.sqrt(num_draws) + 1e-6)
    if squares is not None:
        expected = num * (law.variance + law.mean**2)
        assert np.all(
            np.abs(squares.mean(axis=0) - expected) <= 4 * np.asarray(squares).std(axis=0) / np.sqrt(num_draws) + 1e-6
        )
