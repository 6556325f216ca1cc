"""Gaussian processes over arms whose length-scale and amplitude are unknown: exact given these two numbers."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import NotConjugate, RewardModel, engines
from ppl_bandit.types import Interaction

NUM_ARMS, NUM_DRAWS, NOISE = 6, 4000, 0.3
POSITION = np.linspace(0.0, 1.0, NUM_ARMS)


def curve_model(jitter, position=POSITION):
    def curve(arm):
        length = numpyro.sample("length", dist.LogNormal(-1.0, 0.5))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
        distance = (position[:, None] - position) / length
        covariance = amplitude**2 * (jnp.exp(-0.5 * distance**2) + jitter * np.eye(len(position)))
        values = numpyro.sample("values", dist.MultivariateNormal(0.0, covariance))
        numpyro.sample("reward", dist.Normal(values[arm], NOISE))

    return RewardModel(curve, len(position))


@functools.cache
def smooth_engine():
    return engines.collapsed(curve_model(1e-6), num_particles=NUM_DRAWS)


def quadrature(arm, reward):
    """Return mean and standard deviation of each arm on a grid of length-scales and amplitudes, by textbook formulas."""
    log_weights, means, squares = [], [], []
    for log_length in -1.0 + 0.5 * np.linspace(-5.0, 5.0, 41):
        kernel = np.exp(-0.5 * ((POSITION[:, None] - POSITION) / np.exp(log_length)) ** 2) + 1e-6 * np.eye(NUM_ARMS)
        for amplitude in np.linspace(0.02, 5.0, 60):
            covariance = amplitude**2 * kernel
            of_rows = covariance[np.ix_(arm, arm)] + NOISE**2 * np.eye(arm.size)
            gain = np.linalg.solve(of_rows, covariance[arm]).T
            mean = gain @ reward
            fit = reward @ np.linalg.solve(of_rows, reward) + np.linalg.slogdet(of_rows)[1]
            log_weights.append(-0.5 * (fit + amplitude**2 + ((log_length + 1.0) / 0.5) ** 2))
            means.append(mean)
            squares.append(mean**2 + np.diag(covariance - gain @ covariance[arm]))
    weights = np.exp(np.array(log_weights) - np.max(log_weights))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    return mean, np.sqrt(weights @ np.array(squares) - mean**2)


@functools.cache
def learnt(num_lost=0):
    """Return the measures of an update by 24 rows, draws after it, and its data.

    Args:
        num_lost: particles without a finite density before the update.
    """
    rng = np.random.default_rng(5)
    arm = rng.integers(0, NUM_ARMS - 1, 24)  # the last arm is never played
    reward = np.sin(4.0 * POSITION[arm]) + NOISE * rng.standard_normal(24)
    with jax.enable_x64(True):
        rows = Interaction(jnp.asarray(arm), jnp.asarray(reward))
        info, draws = jax.device_get(compiled_learning()(jnp.asarray(num_lost), rows))
    return info, draws, arm, reward


@functools.cache
def compiled_learning():
    engine = smooth_engine()

    def learn(num_lost, rows):
        state = engine.init(jr.key(0))
        is_lost = jnp.arange(NUM_DRAWS) < num_lost
        weights = jnp.where(is_lost, -jnp.inf, state.particles.log_weights)
        state = state._replace(particles=state.particles._replace(log_weights=weights))
        state, info = engine.update(jr.key(1), state, rows)
        return info, engine.sample(jr.key(2), state, NUM_DRAWS)["values"]

    return jax.jit(learn)


@pytest.mark.slow
def test_the_curve_has_the_moments_of_quadrature_over_length_scale_and_amplitude():
    info, draws, arm, reward = learnt()
    mean, sd = quadrature(arm, reward)
    assert bool(info.is_trusted), info.failed_checks()
    # 4,000 draws of 4,000 particles: .016 sd each from draws and particles, so .022 in all and twice that for six arms; in a
    # standard deviation, .016.
    assert np.max(np.abs(draws.mean(axis=0) - mean) / sd) < 0.05
    assert np.max(np.abs(draws.std(axis=0) / sd - 1.0)) < 0.05


def test_the_length_scale_and_the_amplitude_are_outer_and_one_sum_is_stored():
    text = str(smooth_engine().explanation)
    assert "EXACT GIVEN length, amplitude: values is integrated out" in text
    assert "one sum of statistics, shared by all particles" in text


@pytest.mark.parametrize(
    "position",
    [np.linspace(0.0, 0.3, 12), jnp.linspace(0.0, 0.3, 12)],
    ids=["float64 positions", "float32 positions"],
)
def test_a_covariance_that_rounding_makes_singular_is_refused_with_what_to_add_to_it(position):
    with pytest.raises(NotConjugate, match="larger multiple of the identity"):
        engines.collapsed(curve_model(0.0, position), ("length", "amplitude"))


@pytest.mark.slow
def test_an_update_is_not_trusted_if_the_precision_is_too_low_for_a_tenth_of_the_prior():
    info, *_ = learnt(num_lost=NUM_DRAWS // 5)
    assert not bool(info.is_trusted)
    assert not bool(info.may_recover)
    assert any("whose log density is not finite" in failure for failure in info.failed_checks())


@pytest.mark.slow
def test_a_term_of_higher_degree_is_not_hidden_by_an_exponential_that_underflows():
    def hidden(arm):
        length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
        with numpyro.plate("arms", 2):
            mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        # 0 in float64 at every length below 35, which no draw of the prior comes near
        bend = jnp.exp(-1e6 / length**2)
        numpyro.sample("reward", dist.Normal(mean[arm] + bend * mean[arm] ** 2, 1.0))

    with pytest.raises(NotConjugate, match="floating point flattens far out"):
        engines.collapsed(RewardModel(hidden, 2), ("length",))
