"""Gaussian processes over arms with several priors and in several forms: right to .05 sd against quadrature, on five data sets.

10,000 draws of 10,000 particles: the Monte Carlo error of a mean is at most .010 sd from the draws and as much from the
particles, .014 in all. Of 30 such errors (five data sets, six arms) one exceeds .05, or 3.5 errors, with a probability of .015.
The relative error of a standard deviation is .010.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from ppl_bandit import RewardModel, engines
from ppl_bandit.types import Interaction

NUM_ARMS, NUM_ROWS, NUM_DRAWS, NOISE, NUM_SEEDS = 6, 24, 10_000, 0.3, 5
POSITION = np.linspace(0.0, 1.0, NUM_ARMS)
SPREAD = 0.2  # of the arm effects
# {name: (law of the length-scale, law of the amplitude)}, each in NumPyro and in SciPy
PRIORS = {
    "LogNormal and HalfNormal": (
        (dist.LogNormal(-1.0, 0.5), stats.lognorm(0.5, scale=np.exp(-1.0))),
        (dist.HalfNormal(1.0), stats.halfnorm()),
    ),
    "InverseGamma and LogNormal": (
        (dist.InverseGamma(3.0, 1.0), stats.invgamma(3.0)),
        (dist.LogNormal(0.0, 0.5), stats.lognorm(0.5)),
    ),
    "HalfNormal and InverseGamma": (
        (dist.HalfNormal(0.5), stats.halfnorm(scale=0.5)),
        (dist.InverseGamma(3.0, 2.0), stats.invgamma(3.0, scale=2.0)),
    ),
}


def kernel(length, xp=jnp):
    return xp.exp(-0.5 * ((POSITION[:, None] - POSITION) / length) ** 2) + 1e-6 * np.eye(NUM_ARMS)


def curve(covariance):
    return numpyro.sample("curve", dist.MultivariateNormal(0.0, covariance))


def non_centred(covariance):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([NUM_ARMS]).to_event(1))
    return jnp.linalg.cholesky(covariance) @ z


def with_arm_effects(covariance):
    with numpyro.plate("arms", NUM_ARMS):
        effect = numpyro.sample("effect", dist.Normal(0.0, SPREAD))
    return curve(covariance) + effect


def with_a_second_curve(covariance):
    return curve(covariance) + numpyro.sample("trend", dist.MultivariateNormal(0.0, 0.25 * kernel(2.0)))


FORMS = {  # {name: (program of the values, covariance added to that of the curve)}
    "centred": (curve, 0.0),
    "non-centred": (non_centred, 0.0),
    "with arm effects": (with_arm_effects, SPREAD**2 * np.eye(NUM_ARMS)),
    "with a second curve": (with_a_second_curve, 0.25 * kernel(2.0, np)),
}
CASES = [(prior, "centred") for prior in PRIORS] + [(next(iter(PRIORS)), form) for form in list(FORMS)[1:]]


def learnt_from(prior, form):
    """Return a function of (key, rows): whether the update is trusted, and the mean and deviation of each arm."""
    (length_law, _), (amplitude_law, _) = PRIORS[prior]
    make_values, _ = FORMS[form]

    def program(arm):
        length, amplitude = numpyro.sample("length", length_law), numpyro.sample("amplitude", amplitude_law)
        values = make_values(amplitude**2 * kernel(length))
        numpyro.sample("reward", dist.Normal(values[arm], NOISE))

    model = RewardModel(program, NUM_ARMS)
    engine = engines.collapsed(model, num_particles=NUM_DRAWS)
    assert set(engine.settings["outer"]) == {"length", "amplitude"}

    @jax.jit
    def learn(key, rows):
        key_init, key_update, key_draw = jr.split(key, 3)
        state, info = engine.update(key_update, engine.init(key_init), rows)
        table = model.expected_rewards(engine.sample(key_draw, state, NUM_DRAWS))
        return info.is_trusted, table.mean(axis=0), table.std(axis=0)

    return learn


def quadrature(prior, form, arm, reward):
    """Return mean and deviation of each arm on a grid of 80 length-scales and 80 amplitudes, by textbook formulas."""
    (_, length_law), (_, amplitude_law) = PRIORS[prior]
    logs = np.linspace(np.log(0.005), np.log(30.0), 80)
    length, amplitude = (np.exp(own).ravel() for own in np.meshgrid(logs, logs))
    kernels = np.stack([kernel(own, np) for own in length])
    covariance = amplitude[:, None, None] ** 2 * kernels + FORMS[form][1]
    (played,) = np.nonzero(np.bincount(arm, minlength=NUM_ARMS))
    count = np.bincount(arm, minlength=NUM_ARMS)[played]
    average = np.bincount(arm, reward, NUM_ARMS)[played] / count
    own = covariance[:, played[:, None], played] + np.diag(NOISE**2 / count)
    gain = np.linalg.solve(own, covariance[:, played]).swapaxes(1, 2)
    means = gain @ average
    variances = np.diagonal(covariance - gain @ covariance[:, played], axis1=1, axis2=2)
    fit = np.einsum("i,gij,j->g", average, np.linalg.inv(own), average)
    log_weights = -0.5 * (fit + np.linalg.slogdet(own)[1]) + length_law.logpdf(length) + amplitude_law.logpdf(amplitude)
    log_weights += np.log(length) + np.log(amplitude)  # the grid is uniform in the logs
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ means
    return mean, np.sqrt(weights @ (means**2 + variances) - mean**2)


@functools.cache
def data(seed):
    rng = np.random.default_rng(seed)
    arm = rng.integers(0, NUM_ARMS - 1, NUM_ROWS)  # the last arm is never played
    return arm, np.sin(4.0 * POSITION[arm]) + NOISE * rng.standard_normal(NUM_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(("prior", "form"), CASES, ids=[f"{prior}, {form}" for prior, form in CASES])
def test_every_arm_has_the_moments_of_quadrature_over_length_scale_and_amplitude(prior, form):
    with jax.enable_x64(True):
        learn = learnt_from(prior, form)
        for seed in range(NUM_SEEDS):
            arm, reward = data(seed)
            is_trusted, mean, sd = learn(jr.key(seed), Interaction(jnp.asarray(arm), jnp.asarray(reward)))
            exact_mean, exact_sd = quadrature(prior, form, arm, reward)
            assert bool(is_trusted), seed
            errors = np.abs(mean - exact_mean) / exact_sd, np.abs(sd / exact_sd - 1.0)
            assert np.max(errors) < 0.05, (seed, *errors)
