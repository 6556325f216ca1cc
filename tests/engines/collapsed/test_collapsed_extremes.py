"""Unexpected rewards: draws are correct, or not trusted."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import moments, normal, per_arm

from ppl_bandit import engines
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

pytestmark = pytest.mark.slow
ARMS = np.arange(12) % 2


def unknown_noise(arm):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    normal(per_arm("mean", dist.Normal(0.0, 10.0))[arm], noise)


@pytest.fixture(scope="module")
def learn():
    with jax.enable_x64(True):
        engine = engines.collapsed(RewardModel(unknown_noise, 2), num_particles=300)
        prior, update = jax.jit(engine.init)(jr.key(0)), jax.jit(engine.update)

        def one(rewards, state=prior):
            return update(jr.key(1), state, Interaction(jnp.asarray(ARMS), jnp.asarray(rewards)))

        one.prior = prior
        yield one


def test_particles_follow_one_outlier_far_beyond_the_prior(learn):
    """Rewards of 2 and one of 3,000: a noise of some 50 prior standard deviations, to within 1%.

    Given the noise, the sum of an arm's rewards is Gaussian and the rest tells of the noise alone. 300 particles: a mean is off
    by .06 standard deviations; four of these, and of a standard deviation four times 4%.
    """
    rewards = np.full(12, 2.0)
    rewards[-1] = 3000.0
    state, info = learn(rewards)
    noise = np.exp(np.asarray(state.particles.positions[:, 0]))
    grid = np.linspace(30.0, 90.0, 20_001)
    log_density = -0.5 * grid**2
    for own in (rewards[ARMS == 0], rewards[ARMS == 1]):
        squares = np.sum((own - own.mean()) ** 2)
        log_density += -(own.size - 1) * np.log(grid) - 0.5 * squares / grid**2
        variance = 100.0 + grid**2 / own.size
        log_density += -0.5 * np.log(variance) - 0.5 * own.mean() ** 2 / variance
    mean, sd = moments(log_density, grid)
    assert bool(info.is_trusted)
    assert abs(noise.mean() - mean) < 4 * 0.06 * sd and abs(noise.std() / sd - 1.0) < 4 * 0.04


def test_rewards_that_leave_no_noise_at_all_are_not_trusted(learn):
    """Equal rewards: the likelihood grows without bound as the noise goes to 0, where a log density is nothing but rounding."""
    _, info = learn(np.full(12, 2.0))
    assert not bool(info.is_trusted) and not bool(info.may_recover)  # and no later reward makes it right


def test_a_path_that_needs_too_many_stages_is_not_trusted(learn):
    """An outlier of 10^5: the particles have not reached the posterior, and their effective sample size is small."""
    rewards = np.full(12, 2.0)
    rewards[-1] = 1e5
    _, info = learn(rewards)
    assert not bool(info.is_trusted) and float(info.ess) < 150
    assert bool(info.may_recover)


def test_particles_with_a_large_autocorrelation_are_moved_again_with_the_next_rows(learn):
    rewards = np.random.default_rng(4).normal(2.0, 1.0, size=12)
    state, _ = learn(rewards)
    while True:
        before = state
        state, info = learn(rewards, before)
        if info.num_refreshes == before.particles.num_refreshes:  # these rows alone call for no refresh
            break
    assert info.is_trusted
    evidence = before.particles.evidence._replace(autocorrelation=jnp.asarray(0.9))
    _, info = learn(rewards, before._replace(particles=before.particles._replace(evidence=evidence)))
    assert info.num_refreshes == before.particles.num_refreshes + 1 and info.is_trusted
    assert info.checks["path_autocorrelation"] < 0.3


def test_a_prior_far_from_zero_is_accepted_although_rounding_hides_all_of_a_reward_of_zero():
    def far(arm):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        mean = numpyro.sample("mean", dist.Normal(1e6 * jnp.ones(2), scale).to_event(1))
        numpyro.sample("reward", dist.Normal(mean[arm], 0.5))

    assert "exact given scale" in engines.collapsed(RewardModel(far, 2), ("scale",)).explanation.reason


def test_an_update_is_not_trusted_if_the_precision_is_too_low_for_a_tenth_of_the_prior(learn):
    """A fifth of the particles has no finite density before the update."""
    rewards = np.random.default_rng(4).normal(2.0, 1.0, size=12)
    particles = learn.prior.particles
    weights = jnp.where(jnp.arange(300) < 60, -jnp.inf, particles.log_weights)
    _, info = learn(rewards, learn.prior._replace(particles=particles._replace(log_weights=weights)))
    assert not bool(info.is_trusted) and not bool(info.may_recover)
    assert any("whose log density is not finite" in failure for failure in info.failed_checks())
