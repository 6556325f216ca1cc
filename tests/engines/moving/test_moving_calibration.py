"""Over paths drawn from the program, the true latents of the next step are distributed like draws from the engine.

200 paths of 60 rows, 60 paths for the slowest engine. If an engine is calibrated, the rank of the truth among its draws is
uniform. Its ten equal bins then have 20 (or 6) paths each on average, and the sum of squared deviations over that number is
nearly chi-squared with 9 degrees of freedom: its .999 quantile is 27.9. Every latent is tested, so that one of ten correct runs
with ten latents fails at .99: hence .999.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import engines
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_STEPS, NUM_DRAWS, NUM_BINS, LIMIT = 60, 999, 10, 27.9


def known(arm, *, previous=None):
    with numpyro.plate("arms", 2):
        law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(0.95 * previous["level"], 0.3)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Normal(level[arm], 1.0))


def unknown(arm, *, previous=None):
    drift, noise = numpyro.sample("drift", dist.LogNormal(-1.5, 0.7)), numpyro.sample("noise", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("arms", 2):
        law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(0.95 * previous["level"], drift)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Normal(level[arm], noise))


def clicks(arm, *, previous=None):
    with numpyro.plate("arms", 2):
        law = dist.Normal(0.0, 1.5) if previous is None else dist.Normal(previous["level"], 0.3)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm]))


def clicks_unknown(arm, *, previous=None):
    drift = numpyro.sample("drift", dist.LogNormal(-1.5, 0.7))
    with numpyro.plate("arms", 2):
        law = dist.Normal(0.0, 1.5) if previous is None else dist.Normal(previous["level"], drift)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm]))


def ranks_of_truth(program, factory, keys):
    """Return the rank of the truth among the draws for one path per key, {site: (paths, ...)}."""
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

        (truth, state), _ = jax.lax.scan(step, (truth, engine.init(key_init)), jnp.arange(NUM_STEPS))
        draws = engine.sample(key_draw, state, NUM_DRAWS)
        return {name: jnp.sum(draws[name] < truth[name], axis=0) for name in truth}

    with jax.enable_x64(True):
        return jax.device_get(jax.jit(lambda: jax.lax.map(path, keys))())


def chi_squared(ranks):
    """Return the statistic of every latent, {site: (...)}."""
    found = {}
    for name, own in ranks.items():
        bins = own * NUM_BINS // (NUM_DRAWS + 1)
        counts = np.stack([(bins == number).sum(axis=0) for number in range(NUM_BINS)])
        expected = len(own) / NUM_BINS
        found[name] = np.sum((counts - expected) ** 2, axis=0) / expected
    return found


CASES = {  # {name: (program, factory, number of paths)}
    "kalman": (known, engines.kalman, 200),
    "collapsed_kalman": (unknown, engines.collapsed_kalman, 200),
    "particle_filter": (clicks, engines.particle_filter, 200),
    "particle_filter with a static latent": (clicks_unknown, engines.particle_filter, 60),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_the_truth_are_uniform(case):
    program, factory, num_paths = CASES[case]
    ranks = ranks_of_truth(program, factory, jr.split(jr.key(5), num_paths))
    for name, statistic in chi_squared(ranks).items():
        assert np.all(statistic < LIMIT), (name, statistic)
