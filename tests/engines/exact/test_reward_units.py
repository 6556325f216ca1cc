"""A program is proved whatever the unit of its rewards: the natural scales of latents are anything from 1e-6 to 1e8."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import RewardModel, engines


def unknown_variance(unit):
    def program(arm):
        with numpyro.plate("arms", 2):
            variance = numpyro.sample("variance", dist.InverseGamma(2.0, unit**2))
            mean = numpyro.sample("mean", dist.Normal(0.0, 10.0 * jnp.sqrt(variance)))
        numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))

    return program


def unknown_precision(unit):
    def program(arm):
        with numpyro.plate("arms", 2):
            precision = numpyro.sample("precision", dist.Gamma(2.0, unit**2))
            mean = numpyro.sample("mean", dist.Normal(3.0 * unit, 1.0 / jnp.sqrt(precision)))
        numpyro.sample("reward", dist.Normal(mean[arm], 1.0 / jnp.sqrt(precision[arm])))

    return program


def waiting_times(unit):
    def program(arm):
        with numpyro.plate("arms", 2):
            mean = numpyro.sample("mean", dist.InverseGamma(3.0, unit))
        numpyro.sample("reward", dist.Exponential(1.0 / mean[arm]))

    return program


def counts_with_exposure(unit):
    def program(arm):
        with numpyro.plate("arms", 2):
            rate = numpyro.sample("rate", dist.Gamma(2.0, unit))
        numpyro.sample("reward", dist.Poisson(5.0 * unit * rate[arm]))

    return program


SMALL, LARGE = 1e-6, 1e8  # a variance of 1e-16 is refused: its density cannot be told from rounding
CASES = [
    (unknown_variance, SMALL),
    pytest.param(unknown_precision, SMALL, marks=pytest.mark.slow),
    pytest.param(unknown_variance, LARGE, marks=pytest.mark.slow),
    pytest.param(unknown_precision, LARGE, marks=pytest.mark.slow),
    *[
        pytest.param(program, unit, marks=pytest.mark.slow)
        for program in (waiting_times, counts_with_exposure)
        for unit in (SMALL, LARGE)
    ],
]


@pytest.mark.parametrize(("program", "unit"), CASES)
def test_the_unit_of_the_rewards_does_not_change_the_proof(program, unit):
    assert engines.conjugate(RewardModel(program(unit), 2)).explanation.is_exact
