"""The posterior had the prior been wider is the posterior of the program with that prior."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import RewardModel, engines
from ppl_bandit.types import Interaction

OUTCOMES = ("sale", "visits", "amount", "choice")


def shop(arm, *, by=1.0):
    """Every family at once: Beta, Gamma, Normal-InverseGamma; a Dirichlet and a real that pay nothing."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.array([1.0, 2.0])))
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(2.0 / by**2, 3.0 / by**2))
        pace = numpyro.sample("pace", dist.Gamma(2.0, 0.5 / by))
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        mean = numpyro.sample("mean", dist.Normal(0.5, by * jnp.sqrt(2.0 * variance)))
    numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    numpyro.sample("visits", dist.Poisson(pace[arm]))
    numpyro.sample("amount", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))
    numpyro.sample("choice", dist.Categorical(jnp.broadcast_to(share, (arm.shape[0], 2))))
    numpyro.deterministic("expected_reward", rate[arm] * mean[arm] + pace[arm])
    del level


def sales(arm, *, by=1.0):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(2.0 / by**2, 3.0 / by**2))
    numpyro.sample("sale", dist.Bernoulli(rate[arm]))


@pytest.mark.slow
@pytest.mark.parametrize(("program", "outcomes"), [(sales, OUTCOMES[:1]), (shop, OUTCOMES)])
def test_a_posterior_with_a_wider_prior_is_that_of_the_program_with_it(program, outcomes):
    models = {by: RewardModel(functools.partial(program, by=by), 2, outcomes=outcomes) for by in (1.0, 3.0)}
    reward = {"sale": [1, 0, 1], "visits": [4, 0, 9], "amount": [2.5, -1.0, 7.0], "choice": [0, 1, 1]}
    given = {name: jnp.asarray(reward[name]) for name in outcomes}
    rows = Interaction(jnp.array([0, 1, 0]), given if len(given) > 1 else given["sale"], None)
    with jax.enable_x64(True):
        found = {by: engines.conjugate(model) for by, model in models.items()}
        state = {by: jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows)[0] for by, engine in found.items()}
        wide = found[1.0].capabilities.with_wider_prior(state[1.0], jnp.asarray(3.0))
        for own, expected in zip(jax.tree.leaves(wide), jax.tree.leaves(state[3.0]), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-9)
        same = found[1.0].capabilities.with_wider_prior(state[1.0], jnp.asarray(1.0))
        for own, expected in zip(jax.tree.leaves(same), jax.tree.leaves(state[1.0]), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-12)
