"""Simulation-based calibration: parameters from the prior, data from the parameters, and the rank of the former among draws.

Over many repetitions the rank of the true value among 99 draws is uniform on 0, ..., 99 if and only if posteriors are right
on average (Talts et al. 2018). Ranks fall into ten bins, tested by chi-squared on each unconstrained coordinate, and a test
fails at level 0.001 after Bonferroni over the coordinates.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy.stats import chi2

from ppl_bandit import engines
from ppl_bandit.engines.particles.space import unconstrained_space
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

LEVEL = 0.001
NUM_RANKS = 100
NUM_BINS = 10


def ranks(name, make, num_rows, num_repetitions):
    """Ranks of the true coordinates among the draws, (repetitions, K)."""
    file = load_model(name)
    model = RewardModel(file.program, file.num_arms, context=file.context, outcomes=file.outcomes)
    engine, space = make(model), unconstrained_space(model)

    def repetition(key):
        key_truth, key_context, key_reward, key_init, key_update, key_sample = jr.split(key, 6)
        truth = jax.tree.map(lambda leaf: leaf[0], model.sample_prior(key_truth, 1))
        arm = jnp.arange(num_rows) % model.num_arms
        context = None if file.context is None else jax.vmap(file.contexts)(jr.split(key_context, num_rows))
        rows = Interaction(arm, model.draw_reward(key_reward, truth, arm, context), context)
        state, _ = engine.update(key_update, engine.init(key_init), rows)
        draws = jax.vmap(space.unconstrain)(engine.sample(key_sample, state, NUM_RANKS - 1))
        return jnp.sum(draws < space.unconstrain(truth), axis=0)

    # One repetition after another: under vmap both branches of a refresh would run at every row.
    return np.asarray(jax.jit(lambda keys: jax.lax.map(repetition, keys))(jr.split(jr.key(5), num_repetitions)))


def smallest_p_value(found):
    expected = len(found) / NUM_BINS
    counts = np.array([np.bincount(column * NUM_BINS // NUM_RANKS, minlength=NUM_BINS) for column in found.T])
    statistic = np.sum((counts - expected) ** 2 / expected, axis=1)
    return float(min(1.0, chi2.sf(statistic.max(), NUM_BINS - 1) * found.shape[1]))


@pytest.mark.slow
def test_the_default_fallback_is_calibrated():
    make = functools.partial(engines.reweight, num_particles=200, capacity=8)
    assert smallest_p_value(ranks("hierarchical_bernoulli", make, num_rows=8, num_repetitions=60)) > LEVEL


@pytest.mark.slow
def test_a_posterior_that_is_too_narrow_is_found_out():
    def too_sure(model):
        engine = engines.conjugate(model)

        def update(key, state, rows):
            for _ in range(3):
                state, info = engine.update(key, state, rows)
            return state, info

        return engine._replace(update=update)

    assert smallest_p_value(ranks("bernoulli", too_sure, num_rows=12, num_repetitions=200)) < LEVEL


SAMPLING = ("logistic", "hierarchical_bernoulli", "student_t", "gaussian")
# Laplace and a Gaussian guide are approximations in form: models whose posteriors are Gaussian, or nearly so.
GAUSSIAN = ("hierarchical_gaussian", "logistic", "poisson")
CASES = [
    *((name, "conjugate", 20) for name in ("bernoulli", "gaussian", "linear_gaussian", "hurdle")),
    *((name, "collapsed", 20) for name in ("hierarchical_spread", "beta_hierarchy", "ridge_regression")),
    *((name, "nuts", 20) for name in SAMPLING),
    *((name, "reweight", 20) for name in SAMPLING),
    *((name, "laplace", 60) for name in GAUSSIAN),
    *((name, "svi", 60) for name in GAUSSIAN),
]
MAKERS = {
    "conjugate": engines.conjugate,
    "collapsed": functools.partial(engines.collapsed, num_particles=500),
    "nuts": functools.partial(engines.nuts, num_draws=500, capacity=32),
    "reweight": functools.partial(engines.reweight, num_particles=500, capacity=32),
    "laplace": functools.partial(engines.laplace, capacity=64),
    "svi": functools.partial(engines.svi, capacity=64),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine_name", "num_rows"), CASES)
def test_engines_are_calibrated(name, engine_name, num_rows, capsys):
    p_value = smallest_p_value(ranks(name, MAKERS[engine_name], num_rows, num_repetitions=400))
    with capsys.disabled():
        print(f"\n{name:>22} {engine_name:>9} n={num_rows} p-value {p_value:.3f}", end="")
    assert p_value > LEVEL
