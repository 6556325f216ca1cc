"""Outcomes without a formula for their mean, learnt by a bandit from many rows."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats as st

from ppl_bandit import Bandit

NOISE = np.array([1.0, 0.2])


def folded(arm):
    base = numpyro.sample("base", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.FoldedDistribution(dist.Normal(base[arm], jnp.asarray(NOISE)[arm])))


def first_is_best(rewards):
    """P(the first arm is best) by quadrature over the base of each arm."""
    base = np.linspace(-3.0, 3.0, 6001)
    means, masses = [], []
    for own, noise in zip(rewards.T, NOISE, strict=True):
        log_density = st.norm.logpdf(base)
        for reward in own:
            pair = st.norm.logpdf(reward, base, noise), st.norm.logpdf(-reward, base, noise)
            log_density = log_density + np.logaddexp(*pair)
        mass = np.exp(log_density - log_density.max())
        masses.append(mass / mass.sum())
        means.append(st.foldnorm(np.abs(base) / noise, scale=noise).mean())
    order = np.argsort(means[1])
    below = np.concatenate([[0.0], np.cumsum(masses[1][order])])
    return masses[0] @ below[np.searchsorted(means[1][order], means[0])]


@pytest.mark.slow
def test_a_bandit_with_two_thousand_folded_rewards_knows_how_probably_an_arm_is_best():
    rng = np.random.default_rng(4)
    rewards = np.abs(np.array([0.9, 1.07]) + NOISE * rng.standard_normal((1000, 2)))
    expected = first_is_best(rewards)
    assert abs(expected - 0.914) < 5e-4
    bandit = Bandit(folded, 2)
    bandit.update_many(arms=np.tile([0, 1], 1000), rewards=rewards.ravel())
    decision = bandit.select()
    # 1,000 draws with an effective size of 500 or more: four standard errors.
    assert abs(decision.best_arm_probs[0] - expected) < 4.0 * np.sqrt(expected * (1.0 - expected) / 500.0)
    assert not decision.notes
