"""Horseshoe regression: exact given the scales, which have a number for every weight."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import RewardModel, engines
from ppl_bandit.types import Interaction, NotConjugate

CONTEXTS = np.array([[1.0, 0.5], [-0.5, 1.0], [1.5, -1.0], [0.3, 0.8], [-1.2, 0.4], [0.7, -0.6]])
REWARDS = np.array([1.9, -1.2, 3.3, 0.4, -2.2, 1.1])
GRID = np.linspace(-6.0, 4.5, 28)  # of the logarithms of scales; the posterior beyond has less than 1% of the mass


def horseshoe(arm, context):
    overall = numpyro.sample("overall", dist.HalfCauchy(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("features", 2):
        local = numpyro.sample("local", dist.HalfCauchy(1.0))
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
    slope = weight * local * overall
    numpyro.sample("reward", dist.Normal(context @ slope + 0.0 * arm, noise))


def moments_by_quadrature():
    """Posterior means and standard deviations of both slopes: a grid over four logarithms, Gaussian in the weights."""
    axes = np.meshgrid(GRID, np.linspace(-3.0, 1.5, 24), GRID, GRID, indexing="ij")
    overall, noise, first, second = (np.exp(axis.ravel()) for axis in axes)
    scales = overall[:, None] * np.stack([first, second], axis=1)
    log_prior = sum(np.log(u) - np.log1p(u**2) for u in (overall, first, second))  # with the Jacobian of the logarithm
    log_prior += np.log(noise) - 0.5 * noise**2
    precision = CONTEXTS.T @ CONTEXTS / noise[:, None, None] ** 2 + np.eye(2) / scales[:, :, None] ** 2
    linear = CONTEXTS.T @ REWARDS / noise[:, None] ** 2
    covariance = np.linalg.inv(precision)
    mean = np.einsum("nij,nj->ni", covariance, linear)
    log_density = log_prior - len(REWARDS) * np.log(noise) - 0.5 * REWARDS @ REWARDS / noise**2
    log_density += 0.5 * np.sum(linear * mean, axis=1) - 0.5 * np.linalg.slogdet(precision)[1]
    log_density -= np.sum(np.log(scales), axis=1)
    share = np.exp(log_density - log_density.max())
    share /= share.sum()
    first_moment = share @ mean
    second_moment = share @ (mean**2 + np.diagonal(covariance, axis1=1, axis2=2))
    return first_moment, np.sqrt(second_moment - first_moment**2)


@functools.cache
def chosen():
    return engines.choose(RewardModel(horseshoe, 1, jnp.zeros(2)))


@pytest.mark.slow
def test_a_horseshoe_is_exact_given_its_scales():
    engine = chosen()
    assert engine.explanation.engine == "collapsed" and set(engine.settings["outer"]) == {"overall", "noise", "local"}


@pytest.mark.slow  # test_gaussian_process.py compares particles with quadrature in the default run
def test_a_horseshoe_agrees_with_quadrature():
    """Two more outer than inner numbers. 1,000 particles of four dimensions, autocorrelation at most .16, 4,000 draws.

    A mean is off by about sqrt(1.4 / 1,000) = .037 posterior standard deviations; three of these, and .01 for the grid. A
    standard deviation of a law with heavy tails (kurtosis up to 10) is off by sqrt(10 / 4 * 1.4 / 1,000) = 6%; two of these.
    """
    engine = chosen()
    rows = Interaction(jnp.zeros(6, int), jnp.asarray(REWARDS, jnp.float32), jnp.asarray(CONTEXTS, jnp.float32))
    state, info = jax.jit(engine.update)(jr.key(1), engine.init(jr.key(0)), rows)
    assert bool(info.is_trusted)
    draws = {name: np.asarray(value, float) for name, value in engine.sample(jr.key(2), state, 4000).items()}
    slopes = draws["weight"] * draws["local"] * draws["overall"][:, None]
    mean, deviation = moments_by_quadrature()
    assert np.max(np.abs(slopes.mean(axis=0) - mean) / deviation) < 3 * 0.037 + 0.01
    assert np.max(np.abs(slopes.std(axis=0) / deviation - 1)) < 2 * 0.06


@pytest.mark.slow
def test_a_scale_for_every_weight_of_two_arms_is_outer():
    def program(arm, context):
        overall = numpyro.sample("overall", dist.HalfCauchy(1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("arms", 2, dim=-2), numpyro.plate("features", 6, dim=-1):
            local = numpyro.sample("local", dist.HalfCauchy(1.0))
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        slope = weight * local * overall
        numpyro.sample("reward", dist.Normal(jnp.sum(slope[arm] * context, axis=-1), noise))

    engine = engines.collapsed(RewardModel(program, 2, jnp.zeros(6)), is_selective=True)
    assert "14 dimensions" in engine.explanation.report
    assert "a refresh cost the same after any number of rows" in engine.explanation.report


@pytest.mark.slow
def test_many_outer_dimensions_are_refused_if_rows_must_be_read_again():
    """The units of a hidden layer: what a row says about the last layer is no sum of products."""

    def program(arm, context):
        first = numpyro.sample("first", dist.Normal(0.0, 1.0).expand([3, 5]).to_event(2))
        with numpyro.plate("arms", 3):
            last = numpyro.sample("last", dist.Normal(0.0, 1.0).expand([5]).to_event(1))
        hidden = jnp.tanh(context @ first)
        numpyro.sample("reward", dist.Normal(jnp.sum(hidden * last[arm], axis=-1), 1.0))

    with pytest.raises(NotConjugate, match="15 outer dimensions, first, and rows that must be read again"):
        engines.collapsed(RewardModel(program, 3, jnp.zeros(3)))
