"""What is read of particles when they move serves until they move again, as if it were read at every row."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import engines
from ppl_bandit.engines.updates import collapsed_learning as learning, collapsed_posterior
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_ROWS = 12


def shared(arm):
    """One sum for all particles, about a centre that moves with them."""
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(1.0, spread))
    numpyro.sample("reward", dist.Normal(mean[arm], 0.5))


def separable(arm):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    numpyro.sample("reward", dist.Normal(mean[arm], noise))


def by_rows(arm, context):
    power = numpyro.sample("power", dist.Normal(0.0, 1.0))
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("reward", dist.Poisson(rate[arm] * context**power))


def elements(arm):
    """Probabilities and rates alone: a row changes what it is about, and nothing else."""
    mean_rate = numpyro.sample("mean_rate", dist.Beta(1.0, 3.0))
    with numpyro.plate("arms", 2):
        buys = numpyro.sample("buys", dist.Beta(8.0 * mean_rate, 8.0 * (1.0 - mean_rate)))
    numpyro.sample("reward", dist.Binomial(9, buys[arm]))


CASES = {
    "elements": (elements, None, np.arange(NUM_ROWS) % 5 + 5.0),
    "shared": (shared, None, 2.0 + 3.0 * np.sin(np.arange(NUM_ROWS))),
    "separable": (separable, None, 2.0 + 0.1 * np.sin(np.arange(NUM_ROWS))),
    "by_rows": (by_rows, jnp.array(2.0), np.arange(NUM_ROWS) % 5 + 2.0),
}


def learn(name, *, is_at_once, at_a_time=1):
    """Return states, evidence and readings after rows, in order, for three seeds: each alone, or all at once."""
    program, context, rewards = CASES[name]
    model = RewardModel(program, 2, context)
    contexts = None if context is None else 1.0 + jnp.arange(NUM_ROWS) / 4
    rows = Interaction(jnp.arange(NUM_ROWS) % 2, jnp.asarray(rewards), contexts)
    engine = engines.collapsed(model, num_particles=60)

    def run(key):
        def step(state, new):
            number, row = new
            state, info = engine.update(jr.fold_in(key, number), state, row)
            return state, info

        pieces = jax.tree.map(lambda leaf: leaf.reshape(-1, at_a_time, *leaf.shape[1:]), rows)
        state, infos = jax.lax.scan(step, engine.init(key), (jnp.arange(NUM_ROWS // at_a_time), pieces))
        return state._replace(outer_statistics=None, roots=None), infos, state.outer_statistics

    keys = jr.split(jr.key(3), 3)
    return jax.jit(jax.vmap(run) if is_at_once else lambda own: jax.lax.map(run, own))(keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["separable", "shared", "by_rows"])
def test_a_reading_serves_until_particles_move(name, monkeypatch):
    """The same random numbers: what differs is rounding, some 1e-16 of a log density, over 12 rows and refreshes.

    Many clouds at once read those that moved by a way of their own.
    """
    with jax.enable_x64(True):
        held, evidence, reading = learn(name, is_at_once=name != "separable")
        monkeypatch.setattr(collapsed_posterior, "_MAX_CACHED", 0)
        anew, _, nothing = learn(name, is_at_once=False)
    assert reading is not None and nothing is None
    assert np.all(np.asarray(evidence.num_refreshes[:, -1]) >= 1)
    assert np.all(np.asarray(evidence.num_refreshes[:, -1]) < NUM_ROWS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), held, anew)


@pytest.mark.slow
@pytest.mark.parametrize("at_a_time, is_at_once", [(1, False), (1, True), (3, False), (3, True)])
def test_log_targets_are_carried_on_by_what_rows_change(at_a_time, is_at_once, monkeypatch):
    """As if all elements were integrated at every row; three rows are of both arms, of which one change does not tell."""
    calls, one_element_change = [], learning.one_element_change
    monkeypatch.setattr(
        learning, "one_element_change", lambda *args: (calls.append(args), one_element_change(*args))[1]
    )
    with jax.enable_x64(True):
        carried, evidence, _ = learn("elements", is_at_once=is_at_once, at_a_time=at_a_time)
        assert calls  # it is carried on
        monkeypatch.setattr(learning, "_can_accumulate", lambda *_: False)
        anew, _, _ = learn("elements", is_at_once=False, at_a_time=at_a_time)
    assert np.all(np.asarray(evidence.num_refreshes[:, -1]) < NUM_ROWS // at_a_time)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), carried, anew)
