"""Simulation-based calibration: parameters from the prior, data from the parameters, and the rank of the former among draws.

Over many repetitions the rank of the true value among 99 draws is uniform on 0, ..., 99 if and only if posteriors are right
on average (Talts et al. 2018). Ranks fall into ten bins, tested by chi-squared on each unconstrained coordinate, and a test
fails at level 0.001 after Bonferroni over the coordinates. Of programs whose latents move, the truth is that of the next step,
after 60 rows; 200 paths leave 20 in each bin, and 60 paths of the slowest engine 6.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import logistic, normal, per_arm
from scipy.stats import chi2

from ppl_bandit import engines
from ppl_bandit.engines.particles.space import unconstrained_space
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

LEVEL = 0.001
NUM_BINS = 10


def ranks(name, make, num_rows, num_repetitions, num_ranks=100):
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
        draws = jax.vmap(space.unconstrain)(engine.sample(key_sample, state, num_ranks - 1))
        return jnp.sum(draws < space.unconstrain(truth), axis=0)

    # One repetition after another: under vmap both branches of a refresh would run at every row.
    return np.asarray(jax.jit(lambda keys: jax.lax.map(repetition, keys))(jr.split(jr.key(5), num_repetitions)))


def smallest_p_value(found, num_ranks=100):
    expected = len(found) / NUM_BINS
    counts = np.array([np.bincount(column * NUM_BINS // num_ranks, minlength=NUM_BINS) for column in found.T])
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


# Programs whose latents move


def level_of(previous, keep, spread, first=1.0):
    law = dist.Normal(0.0, first) if previous is None else dist.Normal(keep * previous["level"], spread)
    return per_arm("level", law)


def drift():
    return numpyro.sample("drift", dist.LogNormal(-1.5, 0.7))


def known(arm, *, previous=None):
    normal(level_of(previous, 0.95, 0.3)[arm])


def unknown(arm, *, previous=None):
    spread, noise = drift(), numpyro.sample("noise", dist.LogNormal(0.0, 0.5))
    normal(level_of(previous, 0.95, spread)[arm], noise)


def clicks(arm, *, previous=None):
    logistic(level_of(previous, 1.0, 0.3, first=1.5)[arm])


def clicks_unknown(arm, *, previous=None):
    logistic(level_of(previous, 1.0, drift(), first=1.5)[arm])


MOVING = {  # {name: (program, factory, number of paths)}
    "kalman": (known, engines.kalman, 200),
    "collapsed_kalman": (unknown, engines.collapsed_kalman, 200),
    "particle_filter": (clicks, engines.particle_filter, 200),
    "particle_filter with a static latent": (clicks_unknown, engines.particle_filter, 60),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MOVING)
def test_filters_are_calibrated(case, num_steps=60, num_ranks=1000):
    program, factory, num_paths = MOVING[case]
    model = RewardModel(program, 2)
    engine = factory(model)

    def path(key):
        key_first, key_steps, key_init, key_draw = jr.split(key, 4)
        truth = {name: value[0] for name, value in model.sample_prior(key_first, 1).items()}

        def step(carry, number):
            truth, state = carry
            key_arm, key_reward, key_update, key_move = jr.split(jr.fold_in(key_steps, number), 4)
            arm = jr.randint(key_arm, (), 0, 2)
            reward = model.draw_reward(key_reward, truth, arm)
            state, _ = engine.update(key_update, state, Interaction(arm[None], reward[None]))
            return (model.draw_transition(key_move, truth), state), None

        (truth, state), _ = jax.lax.scan(step, (truth, engine.init(key_init)), jnp.arange(num_steps))
        draws = engine.sample(key_draw, state, num_ranks - 1)
        return jnp.concatenate([jnp.sum(draws[name] < truth[name], axis=0).ravel() for name in truth])

    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(lambda: jax.lax.map(path, jr.split(jr.key(5), num_paths)))())
    assert smallest_p_value(found, num_ranks) > LEVEL * found.shape[1]  # of every latent by itself
