"""The log evidence is the log density of the rewards, against formulas in NumPy and SciPy and against quadrature.

Of engines by themselves, whose updates compile once; test_filters.py has that of a Kalman filter,
test_engines_contract.py estimates with particles, and test_conjugate_accuracy.py what it is under a discount.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import KEY, latents, learnt, normal, poisson, rows_of, slow, slow_but
from scipy import stats
from scipy.special import gammaln
from shared_models import bernoulli_bandit

from ppl_bandit import Bandit, RewardModel, engines

NUM_ROWS = 40
ARMS = np.random.default_rng(4).integers(0, 2, NUM_ROWS)
DESIGN = np.random.default_rng(5).normal(1.0, 1.0, (NUM_ROWS, 2))
COUNTS = np.random.default_rng(6).poisson(np.array([2.0, 5.0])[ARMS]).astype(float)
REALS = DESIGN @ np.array([1.0, -2.0]) + np.random.default_rng(7).normal(size=NUM_ROWS)


def counts(arm):
    poisson(latents("rate", dist.Gamma(2.0, 0.5))[arm])


def line(arm, context):
    precision = numpyro.sample("precision", dist.Gamma(3.0, 2.0))
    sd = 1.0 / jnp.sqrt(precision)
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(2), 2.0 * sd).to_event(1))
    normal((weights * context).sum(-1) + 0.0 * arm, sd)


def level(arm, *, previous=None):
    law = dist.Normal(1.0, 2.0) if previous is None else dist.Normal(0.9 * previous["level"], 0.4)
    moving = numpyro.sample("level", law)
    offset = numpyro.sample("offset", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    normal(moving + offset[arm], 0.7)


def spread(arm):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), scale).to_event(1))
    normal(mean[arm])


def gamma_poisson():
    """Return the probability of the counts, one arm after another."""
    total = 0.0
    for own in (COUNTS[ARMS == arm] for arm in range(2)):
        shape, rate = 2.0 + own.sum(), 0.5 + own.size
        total += 2.0 * np.log(0.5) - gammaln(2.0) + gammaln(shape) - shape * np.log(rate) - gammaln(own + 1.0).sum()
    return total


def student():
    """Return the density of a line whose noise is unknown: Student-t with 6 degrees of freedom."""
    shape = 2.0 / 3.0 * (np.eye(NUM_ROWS) + 4.0 * DESIGN @ DESIGN.T)
    return stats.multivariate_t(np.zeros(NUM_ROWS), shape, df=6.0).logpdf(REALS)


def of_moving_level():
    """Return the density of rewards about a level that moves: their joint law is Gaussian."""
    variance, covariance = 4.0, np.zeros((NUM_ROWS, NUM_ROWS))
    for step in range(NUM_ROWS):
        later = np.arange(NUM_ROWS - step)
        covariance[step, step:] = covariance[step:, step] = variance * 0.9**later
        variance = 0.81 * variance + 0.16
    covariance += (ARMS[:, None] == ARMS) + 0.49 * np.eye(NUM_ROWS)
    return stats.multivariate_normal(0.9 ** np.arange(NUM_ROWS), covariance).logpdf(REALS)


EXACT = {
    "Poisson rates under Gamma priors": (counts, None, COUNTS, gamma_poisson),
    "a line of unknown noise": (line, DESIGN, REALS, student),
    "a Kalman filter": (level, None, REALS, of_moving_level),
}


@pytest.mark.parametrize("name", slow_but(EXACT, "a line of unknown noise"))
def test_the_log_evidence_of_a_closed_form_is_that_of_the_textbook_however_the_rewards_come(name):
    program, contexts, rewards, expected = EXACT[name]
    with jax.enable_x64(True):
        engine = engines.choose(RewardModel(program, 2, None if contexts is None else contexts[0]))
        rows, state = rows_of(ARMS, rewards, contexts), engine.init(KEY)
        assert engine.capabilities.log_evidence(state) == (0.0, 0.0)
        number = jnp.arange(NUM_ROWS)
        for mask in (number == 0, number == 1, number > 1):  # single rewards, and a batch
            state, _ = learnt(engine, rows._replace(mask=mask), state)
        # Forty terms of a few nats each, in float64.
        assert engine.capabilities.log_evidence(state) == (pytest.approx(expected(), abs=1e-8), 0.0)


@pytest.mark.parametrize("width", [1e6, slow(1e8)])
def test_the_log_evidence_keeps_its_digits_where_the_prior_is_as_wide_as_the_rewards_are_large(width):
    """The squares of 1e6 and 1e8 are rounded by 1e-4 and 1 nats, the rewards themselves by 1e-8 in the last case."""

    def wide(arm):
        mean = numpyro.sample("mean", dist.Normal(jnp.zeros(2), width).to_event(1))
        normal(mean[arm])

    rewards, expected = width + REALS, np.longdouble(0.0)
    mean, variance = np.zeros(2, np.longdouble), np.full(2, np.longdouble(width)) ** 2
    for arm, reward in zip(ARMS, rewards, strict=True):
        total, gap = variance[arm] + 1, reward - mean[arm]
        expected -= 0.5 * (np.log(2 * np.pi * total) + gap * gap / total)
        mean[arm] += variance[arm] / total * gap
        variance[arm] /= total
    engine = engines.conjugate(RewardModel(wide, 2))
    with jax.enable_x64(True):
        state, info = learnt(engine, rows_of(ARMS, rewards))
        found, _ = engine.capabilities.log_evidence(state)
    assert info.is_trusted and found == pytest.approx(float(expected), abs=1e-5)


def test_a_bandit_has_the_log_evidence_of_its_engine_however_the_rewards_come():
    bandit = bernoulli_bandit(2)
    assert (bandit.log_evidence, bandit.log_evidence_error) == (0.0, 0.0)
    rewards = (COUNTS > 3).astype(float)
    for part in (slice(0, 1), slice(1, 2), slice(2, None)):
        bandit.update_many(arms=ARMS[part], rewards=rewards[part])
    won, played = np.bincount(ARMS, rewards), np.bincount(ARMS)
    expected = (gammaln(won + 1) + gammaln(played - won + 1) - gammaln(played + 2)).sum()
    assert bandit.log_evidence == pytest.approx(expected, abs=1e-8) and bandit.log_evidence_error == 0.0


def of_unknown_spread():
    scales = np.exp(np.linspace(np.log(1e-4), np.log(8.0), 4000))
    densities = stats.halfnorm.logpdf(scales)
    for own in (REALS[ARMS == arm] for arm in range(2)):
        densities = densities + [
            stats.multivariate_normal(np.zeros(own.size), np.eye(own.size) + scale**2).logpdf(own) for scale in scales
        ]
    return np.log(np.trapezoid(np.exp(densities - densities.max()), scales)) + densities.max()


@pytest.mark.slow
def test_the_estimate_of_a_bandit_is_within_three_standard_errors_of_quadrature():
    bandit = Bandit(spread, 2)
    bandit.update_many(arms=ARMS, rewards=REALS)
    assert bandit.explanation.engine == "collapsed"
    error = bandit.log_evidence_error
    assert 0.0 < error < 0.2 and abs(bandit.log_evidence - of_unknown_spread()) < 3.0 * error
