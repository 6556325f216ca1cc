"""The live bandit and the simulator, compiled as users compile them."""

import math
import os

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, Environment, RewardModel, engines, selectors, simulate


def conversion(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def linear(arm, context):
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros((2, 2)), 1.0).to_event(2))
    numpyro.sample("reward", dist.Normal(jnp.sum(weight[arm] * context, axis=-1), 0.5))


def test_no_compiler_flag_is_set():
    assert os.environ["XLA_FLAGS"] == ""


def test_a_bernoulli_bandit_counts_successes_and_states_its_propensities():
    bandit, world, counts = Bandit(conversion, 3, num_samples=200), np.random.default_rng(0), np.ones((3, 2))
    for _ in range(30):
        decision = bandit.select()
        reward = int(world.random() < (0.2, 0.5, 0.7)[decision.arm])
        counts[decision.arm, 1 - reward] += 1
        assert 0 < decision.propensity <= 1 and math.isclose(sum(decision.best_arm_probs), 1.0, abs_tol=1e-9)
        bandit.update(decision, reward)
    assert "EXACT" in bandit.explain()
    draws = np.asarray(bandit.expected_rewards(num_samples=20_000))
    mean = counts[:, 0] / counts.sum(1)
    sd = np.sqrt(mean * (1 - mean) / (counts.sum(1) + 1))
    assert np.all(np.abs(draws.mean(0) - mean) < 4 * sd / math.sqrt(20_000))  # four standard errors


@pytest.mark.slow  # another program on the same path: exact proof, select, update, draws
def test_a_linear_bandit_learns_the_normal_equations():
    bandit, world = Bandit(linear, 2, context=np.zeros(2), num_samples=200), np.random.default_rng(1)
    precision, moment = np.tile(np.eye(2), (2, 1, 1)), np.zeros((2, 2))
    for _ in range(20):
        context = world.normal(size=2)
        decision = bandit.select(context)
        reward = float(context @ [1.0, -1.0] + 0.5 * world.normal())
        precision[decision.arm] += np.outer(context, context) / 0.25
        moment[decision.arm] += context * reward / 0.25
        bandit.update(decision, reward)
    draws = np.asarray(bandit.posterior(20_000)["weight"])
    covariance = np.linalg.inv(precision)
    mean, sd = np.einsum("aij,aj->ai", covariance, moment), np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    assert np.all(np.abs(draws.mean(0) - mean) < 4 * sd / math.sqrt(20_000))  # four standard errors


@pytest.mark.slow  # the same engine and selectors, compiled with the options of simulations
def test_a_simulation_plays_the_better_arm_more_often_than_chance():
    model = RewardModel(conversion, 3)
    truth = {"rate": np.array([0.1, 0.2, 0.9])}
    played = simulate(
        jr.key(0),
        model,
        engines.conjugate(model),
        selectors.thompson(),
        Environment(model, truth),
        num_steps=60,
        num_realizations=50,
        num_samples=100,
    )
    assert float((played["arm"] == 2).mean()) > 0.6
