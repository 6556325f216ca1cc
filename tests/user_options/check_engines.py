"""Every engine reaches a posterior that is known in closed form, compiled with the options of the live bandit.

Two arms, mean ~ Normal(1, 2), reward ~ Normal(mean, 1.5), 8 rows. Engines hold 2,000 draws with an effective sample size of at
least 1,000, so a mean is off by 1 / sqrt(1,000) posterior standard deviations and a standard deviation by 1 / sqrt(2 x 1,000)
of itself; four of these standard errors are allowed.
"""

import functools
import math
import os

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Interaction, RewardModel, engines
from ppl_bandit.runtime.xla_options import large_options, small_options

NUM_DRAWS = 2000
ARMS, REWARDS = np.array([0, 0, 1, 0, 0, 1, 0, 0]), np.array([0.3, -1.2, 6.0, 2.0, 0.9, 4.0, -0.4, 0.1])


def measurements(arm):
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(1.0, 2.0))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.5))


def shifted_measurements(arm):
    """The same marginal law of `mean` and of the rewards; conjugate given `shift`, or jointly."""
    shift = numpyro.sample("shift", dist.Normal(0.0, math.sqrt(3.0)))
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(1.0 + shift * jnp.array([1.0, 0.0]), jnp.array([1.0, 2.0])))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.5))


@functools.cache
def model():
    return RewardModel(measurements, 2)


ENGINES = {
    "conjugate": lambda: engines.conjugate(model()),
    "collapsed": lambda: engines.collapsed(RewardModel(shifted_measurements, 2), ("shift",), num_particles=NUM_DRAWS),
    "reweight": lambda: engines.reweight(model(), num_particles=NUM_DRAWS),
    "nuts": lambda: engines.nuts(model(), num_draws=NUM_DRAWS),
    "laplace": lambda: engines.laplace(model()),
    "svi": lambda: engines.svi(model()),
}


def test_no_compiler_flag_is_set():
    assert os.environ["XLA_FLAGS"] == ""


# The collapsed engine runs the particles, moves and tempering of `reweight`, and check_live.py plays the conjugate engine; the
# slow ones take five times as long together. test_user_options.py runs them with `-m slow`.
@pytest.mark.parametrize(
    "name", [n if n in ("collapsed", "laplace") else pytest.param(n, marks=pytest.mark.slow) for n in ENGINES]
)
def test_an_engine_reaches_the_closed_form_posterior(name):
    counts, sums = np.bincount(ARMS), np.bincount(ARMS, REWARDS)
    precision = 1 / 2.0**2 + counts / 1.5**2
    mean, sd = (1.0 / 2.0**2 + sums / 1.5**2) / precision, precision**-0.5
    with jax.enable_x64(True):
        engine = ENGINES[name]()
        options = small_options() if engine.capabilities.reserve is None else large_options()
        compiled = functools.partial(jax.jit, compiler_options=options)
        key_init, key_update, key_sample = jr.split(jr.key(0), 3)
        state = compiled(engine.init)(key_init)
        state, _ = compiled(engine.update)(key_update, state, Interaction(jnp.asarray(ARMS), jnp.asarray(REWARDS)))
        draws = np.asarray(compiled(engine.sample, static_argnums=2)(key_sample, state, NUM_DRAWS)["mean"])
    assert draws.shape == (NUM_DRAWS, 2)
    assert np.all(np.abs(draws.mean(0) - mean) < 4 / math.sqrt(1000) * sd)
    assert np.all(np.abs(draws.std(0) / sd - 1) < 4 / math.sqrt(2 * 1000))
