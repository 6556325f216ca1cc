"""What an update of two filters reports of a batch, by particles without a program; and digits of rewards far from 0."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import engines
from ppl_bandit.engines.updates.filters import FilterParts, Weighed, filter_engine
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation, Interaction

NUM = 50  # particles of each filter


def level_of(offset, *, has_drift=True):
    """A level that walks, from an offset, by steps of unknown size."""

    def walk(arm, *, previous=None):
        drift = numpyro.sample("drift", dist.LogNormal(0.0, 0.5)) if has_drift else 1.0
        level = numpyro.sample("level", dist.Normal(*(offset, 1.0) if previous is None else (previous["level"], drift)))
        numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 0.5))

    return walk


def stub_engine():
    """Positions drawn once, weighted by their product with a reward; a reward above 2 fails its certificate."""
    model = RewardModel(level_of(0.0, has_drift=False), 1)

    def weigh(particles, weights, row, elapsed):
        return Weighed(
            particles, row.reward * particles[..., 0], particles, 0.0, jnp.maximum(row.reward - 1.0, 0.0), ()
        )

    parts = FilterParts(
        start=lambda key: (jr.normal(key, (2, NUM, 1)), None),
        predict=lambda key, particles, elapsed: particles,
        weigh=weigh,
        known=lambda particles: ((), particles),
        move=lambda key, window, particles: particles,
        draw=lambda key, particles: {"level": particles[:, 0]},
        row_check="certificate",
        mean_check="law_disagreement",
    )
    return filter_engine(model, parts, Explanation("stub", False, "", {}), num_particles=2 * NUM, window=1)


def test_what_an_update_reports_is_that_of_the_state_it_returns():
    engine = stub_engine()
    update, rewards = jax.jit(engine.update), jnp.array([0.5, 2.0, 0.1])
    state, start = engine.init(jr.key(0)), engine.init(jr.key(0))

    def after(state, *mask):
        return update(jr.key(1), state, Interaction(jnp.zeros(3, int), rewards, mask=jnp.asarray(mask)))

    state, learnt = after(state, True, True, False)
    assert (
        learnt.may_recover and learnt.num_refreshes == state.particles.num_refreshes > 0 and learnt.log_evidence != 0.0
    )
    # Rows that are all masked change nothing, and fail nothing.
    for before in (start, state):
        same, info = after(before, False, False, False)
        assert jax.tree.all(jax.tree.map(lambda new, old: bool(jnp.all(new == old)), same, before))
        assert info.num_refreshes == before.particles.num_refreshes
        assert (info.log_evidence, info.log_evidence_error) == before.evidence()
        assert info.is_trusted and info.failed_checks() == []
        assert NUM <= info.ess < 2 * NUM + 0.01
    # A batch with a row that is not certified is not learnt: the report has no evidence of it.
    rewards = jnp.array([0.5, 3.5, 0.1])
    same, info = after(state, True, True, True)
    assert not info.may_recover and info.failed_checks()[0].startswith("the residual of a row, a step or the prior")
    assert jax.tree.all(jax.tree.map(lambda new, old: bool(jnp.all(new == old)), same, state))
    assert info.num_refreshes == state.particles.num_refreshes
    assert (info.log_evidence, info.log_evidence_error) == state.evidence()


NOISE = np.random.default_rng(1).normal(size=(2, 30)) * np.array([[1.0], [0.5]])
REWARDS = NOISE[0].cumsum() + NOISE[1]


@pytest.mark.parametrize(
    ("factory", "offset"),
    [
        pytest.param(engines.kalman, 1e8, marks=pytest.mark.slow),
        pytest.param(engines.collapsed_kalman, 1e6, marks=pytest.mark.slow),
        pytest.param(engines.collapsed_kalman, 1e8, marks=pytest.mark.slow),
    ],
)
def test_rewards_of_any_size_keep_their_digits(factory, offset):
    """The same draws with all rewards and the prior moved by an offset; a double keeps eps x offset of the latter."""
    is_exact = factory is engines.kalman
    found = []
    for own in (0.0, offset):
        model = RewardModel(level_of(own, has_drift=not is_exact), 1)
        engine = factory(model) if is_exact else factory(model, num_particles=100, window=10)

        def step(state, row, engine=engine, own=own):
            number, reward = row
            state, info = engine.update(jr.key(number), state, Interaction(jnp.zeros(1, int), reward[None]))
            law = state.law if is_exact else state.particles.positions.laws
            return state, (law.mean - own, state.evidence()[0], info.is_trusted, info.may_recover)

        with jax.enable_x64(True):
            rows = jnp.arange(REWARDS.size), jnp.asarray(REWARDS + own)
            found.append(jax.device_get(jax.jit(jax.lax.scan, static_argnums=0)(step, engine.init(jr.key(0)), rows)[1]))
    (means, evidence, *trust), (moved_means, moved_evidence, *moved_trust) = found
    assert trust[1].all() and np.array_equal(trust, moved_trust)
    roundings = np.finfo(float).eps * offset
    np.testing.assert_allclose(moved_means, means, atol=20 * roundings)
    # A reward's rounding changes its log density by up to a few slopes, which are at most 2 / .25 per unit here.
    np.testing.assert_allclose(moved_evidence, evidence, atol=REWARDS.size * 8 * roundings)
