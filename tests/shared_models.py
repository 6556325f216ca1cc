"""Bernoulli arms, which a process proves and compiles once, and an engine that learns nothing, which compiles little."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Bandit, Engine, Explanation, RewardModel, selectors
from ppl_bandit.evaluation.posterior_path import engine_of

# Shared, because a selector that is made anew has compiled functions of its own.
THOMPSON = selectors.thompson()
FLOORED = selectors.with_floor(THOMPSON, 0.1)


@functools.cache
def bernoulli_program(num_arms):
    def conversion(arm):
        with numpyro.plate("arms", num_arms):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return conversion


@functools.cache
def bernoulli_model(num_arms):
    return RewardModel(bernoulli_program(num_arms), num_arms)


@functools.cache
def bernoulli_engine(num_arms):
    return engine_of(bernoulli_model(num_arms))  # which `evaluate` keeps for this model too


@functools.cache
def bernoulli_parts(num_arms):
    """Return a model and a factory of its engine: bandits of the same parts, selector and draws share compiled functions."""
    engine = bernoulli_engine(num_arms)
    return bernoulli_model(num_arms), lambda model: engine


def bernoulli_bandit(num_arms=3, **options):
    """Return a bandit whose functions are compiled once in a process, unless options change the selector or the draws."""
    model, engine = bernoulli_parts(num_arms)
    return Bandit(model, **({"engine": engine, "num_samples": 200} | options))


class Trust(NamedTuple):
    """What an engine must say of an update."""

    is_trusted: Any


def prior_engine(model):
    """Draw the prior, anew after each update: for tests in which what is learnt plays no part."""

    def update(key, state, rows):
        return state + 1, Trust(jnp.asarray(True))

    def sample(key, state, num_samples):
        return model.sample_prior(jr.fold_in(key, state), num_samples)

    return Engine(lambda key: jnp.zeros((), int), update, sample, Explanation("prior", False, "it learns nothing", {}))
