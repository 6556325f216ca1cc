"""The particle filter agrees with a filter on a grid, and its evidence can fail.

Tolerances: with 10,000 particles the mean of a filter that resamples every few steps has a standard error of about
sqrt(3 / 10,000) = .017 standard deviations, and the standard deviation half of that, so .05 and 5% are three errors.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import engines
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_STEPS = 60


def counts(arm, *, previous=None):
    """A log rate that moves; its step is not linear, so that no Kalman filter exists for two reasons."""
    mean = 0.5 if previous is None else 0.5 + 0.9 * jnp.tanh(previous["level"] - 0.5)
    level = numpyro.sample("level", dist.Normal(mean, 1.0 if previous is None else 0.3))
    numpyro.sample("reward", dist.Poisson(jnp.exp(level + 0.0 * arm)))


@functools.cache
def filter_of_counts():
    engine = engines.particle_filter(RewardModel(counts, 1), num_particles=10_000)

    @jax.jit
    def run(key, rewards):
        def step(state, row):
            number, reward = row
            rows = Interaction(jnp.zeros(1, int), reward[None])
            state, info = engine.update(jr.fold_in(key, number), state, rows)
            weights = jax.nn.softmax(state.particles.log_weights, axis=1) / 2
            mean = jnp.sum(weights * state.particles.positions["level"])
            sd = jnp.sqrt(jnp.sum(weights * (state.particles.positions["level"] - mean) ** 2))
            return state, (mean, sd, info)

        state, found = jax.lax.scan(step, engine.init(key), (jnp.arange(rewards.size), rewards))
        return (*found, *state.evidence())

    return run


def grid_filter(rewards):
    grid = np.linspace(-4.0, 5.0, 1801)
    law = np.exp(-0.5 * (grid - 0.5) ** 2)
    step = np.exp(-0.5 * ((grid[:, None] - 0.5 - 0.9 * np.tanh(grid - 0.5)) / 0.3) ** 2)
    step /= step.sum(axis=0)
    found, log_evidence = [], 0.0
    law /= law.sum()
    for number, reward in enumerate(rewards):
        law = step @ law if number else law
        law = law * np.exp(reward * grid - np.exp(grid))
        log_evidence += np.log(law.sum()) - np.sum(np.log(np.arange(1, reward + 1)))
        law /= law.sum()
        mean = law @ grid
        found.append((mean, np.sqrt(law @ (grid - mean) ** 2)))
    return *np.array(found).T, log_evidence


def test_it_agrees_with_a_filter_on_a_grid():
    rewards = np.random.default_rng(4).poisson(np.exp(0.5 + 0.8 * np.sin(np.arange(NUM_STEPS) / 8)))
    with jax.enable_x64(True):
        means, sds, info, log_evidence, error = filter_of_counts()(jr.key(0), jnp.asarray(rewards))
    expected_means, expected_sds, expected_evidence = grid_filter(rewards)
    assert info.is_trusted.all()
    assert np.abs((means - expected_means) / expected_sds).max() < 0.05
    assert np.abs(sds / expected_sds - 1).max() < 0.05
    # The relative variance of the evidence adds up over the steps: 60 steps of about 1 / 10,000 each.
    assert abs(float(log_evidence) - expected_evidence) < 3 * np.sqrt(NUM_STEPS / 10_000)
    assert float(error) < 3 * np.sqrt(NUM_STEPS / 10_000)


def test_its_evidence_fails_where_no_particle_fits_the_reward():
    rewards = np.ones(NUM_STEPS, int)
    rewards[-1] = 500  # a log rate of 6.2, 18 steps away
    with jax.enable_x64(True):
        _, _, info, *_ = filter_of_counts()(jr.key(0), jnp.asarray(rewards))
    assert info.is_trusted[:-1].all() and not info.is_trusted[-1]
    failed = "; ".join(jax.tree.map(lambda leaf: leaf[-1], info).failed_checks())
    assert "the effective sample size, as a share of the particles, is" in failed
