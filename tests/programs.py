"""Words of which programs of the tests are made, and what an engine learns from rows."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction

KEY = jr.key(0)


def slow(*arguments, **options):
    """Return parameters of a case that the default run leaves out."""
    return pytest.param(*arguments, **options, marks=pytest.mark.slow)


def slow_but(names, *kept):
    """Return parameters of which the default run has those that are named here."""
    return [name if name in kept else slow(name) for name in names]


def latents(name, prior, num=2):
    return numpyro.sample(name, prior.expand([num]))


def per_arm(name, prior, num_arms=2):
    """Sample a latent of each arm in a plate."""
    with numpyro.plate("arms", num_arms):
        return numpyro.sample(name, prior)


def rates(name="rate", num_arms=2):
    return per_arm(name, dist.Beta(1.0, 1.0), num_arms)


def gammas(name="scale", num=2):
    return latents(name, dist.Gamma(2.0, 1.0), num)


def reals(name="mean", num=2):
    return latents(name, dist.Normal(0.0, 1.0), num)


def reward(law, **settings):
    return numpyro.sample("reward", law, **settings)


def bernoulli(probs):
    return reward(dist.Bernoulli(probs))


def poisson(rate):
    return reward(dist.Poisson(rate))


def logistic(logits):
    return reward(dist.Bernoulli(logits=logits))


def normal(location, scale=1.0):
    return reward(dist.Normal(location, scale))


def with_term(sample, term, law):
    """Return a program of two latents, a term of both in its prior, or an observation, and a law of the reward."""

    def program(arm):
        both = sample()
        added = term(*both)
        if added is not None:
            numpyro.factor("term", added)
        law(both[arm])

    return program


def of_one_latent(name, prior, law):
    """Return a program whose reward has a law of one site and the arm."""

    def program(arm):
        reward(law(numpyro.sample(name, prior), arm))

    return program


def rows_of(arms, rewards, contexts=None):
    """Return rows of arrays; a list is one."""
    given = (arms, rewards, contexts)
    return Interaction(*jax.tree.map(jnp.asarray, given, is_leaf=lambda leaf: isinstance(leaf, list)))


def learnt(engine, rows, state=None):
    """Return the state and what it says of itself after one compiled update."""
    return quick_jit(engine.update)(KEY, engine.init(KEY) if state is None else state, rows)


def drawn(engine, state, num, key=1):
    return jax.device_get(jax.jit(engine.sample, static_argnums=2)(jr.key(key), state, num))


def is_same(one, other):
    """Tell whether two states are equal to the last bit."""
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def moments(log_density, values):
    """Return means and standard deviations of functions (..., points) under an unnormalised log density (points,)."""
    weights = np.exp(log_density - np.max(log_density))
    weights /= weights.sum()
    mean = values @ weights
    return mean, np.sqrt((values - mean[..., None]) ** 2 @ weights)


def assert_not_learnt(engine, rows, is_certified=None):
    """Check that an update reports rows, those of which this says that they are not certified, and changes nothing."""
    before = engine.init(KEY)
    after, info = learnt(engine, rows, before)
    assert not bool(info.is_trusted) and is_same(after, before)
    assert is_certified is None or info.is_certified.tolist() == is_certified
