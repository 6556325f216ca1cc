"""Kalman filters over particles agree with quadrature over the outer latent, in and beyond the window of their moves.

Tolerances: 1,000 particles are resampled at an effective size of 500, and moves leave at least half of that, so the mean of the
outer latent has a standard error of 1 / sqrt(250) = .063 standard deviations; three are allowed. The levels depend on the outer
latent only in part: .05 standard deviations and 5% are allowed, as for a particle filter.
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
from ppl_bandit.types import Interaction, NotConjugate

NUM_STEPS, WINDOW = 160, 60


def walk(arm, *, previous=None):
    drift = numpyro.sample("drift", dist.LogNormal(-2.0, 1.0))
    with numpyro.plate("arms", 2):
        law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], drift)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Normal(level[arm], 0.5))


def quadrature(arms, rewards):
    """Return means and standard deviations of (log drift, levels) after each row."""
    log_drift = np.linspace(-7.0, 2.0, 600)
    log_weights, mean, variance = -0.5 * (log_drift + 2.0) ** 2, np.zeros((600, 2)), np.ones((600, 2))
    found = []
    for number, (arm, reward) in enumerate(zip(arms, rewards, strict=True)):
        variance = variance + (np.exp(2 * log_drift)[:, None] if number else 0.0)
        total, gap = variance[:, arm] + 0.25, reward - mean[:, arm]
        log_weights = log_weights - 0.5 * (np.log(total) + gap**2 / total)
        gain = variance[:, arm] / total
        mean[:, arm] += gain * gap
        variance[:, arm] *= 1.0 - gain
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        both = np.column_stack([log_drift, mean])
        within = np.column_stack([np.zeros(600), variance])
        centre = weights @ both
        found.append((centre, np.sqrt(weights @ (within + (both - centre) ** 2))))
    return map(np.array, zip(*found, strict=True))


@pytest.mark.slow
def test_an_unknown_drift_agrees_with_quadrature_beyond_the_window():
    rng = np.random.default_rng(1)
    levels = np.cumsum(np.vstack([rng.normal(size=(1, 2)), 0.1 * rng.normal(size=(NUM_STEPS - 1, 2))]), axis=0)
    arms = rng.integers(0, 2, NUM_STEPS)
    rewards = levels[np.arange(NUM_STEPS), arms] + 0.5 * rng.normal(size=NUM_STEPS)
    engine = engines.collapsed_kalman(RewardModel(walk, 2), window=WINDOW)
    assert "exact given drift" in engine.explanation.reason

    def step(state, row):
        number, arm, reward = row
        state, info = engine.update(jr.key(number), state, Interaction(arm[None], reward[None]))
        weights = jax.nn.softmax(state.particles.log_weights, axis=1) / 2
        positions, laws, _ = state.particles.positions
        both = jnp.concatenate([positions, laws.mean[..., 0]], axis=-1)
        within = jnp.concatenate([jnp.zeros_like(positions), 1.0 / laws.precision[..., 0, 0]], axis=-1)
        mean = jnp.einsum("fh,fhd->d", weights, both)
        sd = jnp.sqrt(jnp.einsum("fh,fhd->d", weights, within + (both - mean) ** 2))
        return state, (mean, sd, info.is_trusted)

    with jax.enable_x64(True):
        rows = jnp.arange(NUM_STEPS), jnp.asarray(arms), jnp.asarray(rewards)
        _, (means, sds, is_trusted) = jax.jit(lambda: jax.lax.scan(step, engine.init(jr.key(7)), rows))()
    expected_means, expected_sds = quadrature(arms, rewards)
    errors, ratios = np.abs(np.asarray(means) - expected_means) / expected_sds, np.asarray(sds) / expected_sds
    assert is_trusted.all()
    assert errors[:, 1:].max() < 0.05 and np.abs(ratios[:, 1:] - 1).max() < 0.05
    assert errors[-1, 0] < 3 * 0.063 and errors[:, 0].mean() < 0.063 * 1.5
    assert abs(ratios[-1, 0] - 1) < 3 * 0.063


@pytest.mark.slow
def test_what_is_not_linear_gaussian_given_static_latents_is_refused():
    def bent(arm, *, previous=None):
        drift = numpyro.sample("drift", dist.LogNormal(-2.0, 1.0))
        mean = 0.0 if previous is None else jnp.tanh(previous["level"])
        level = numpyro.sample("level", dist.Normal(mean, 1.0 if previous is None else drift))
        numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 1.0))

    def walks(arm, *, previous=None):
        level = numpyro.sample("level", dist.Normal(0.0 if previous is None else previous["level"], 1.0))
        numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 1.0))

    with pytest.raises(NotConjugate, match="has no Kalman filters over particles"):
        engines.collapsed_kalman(RewardModel(bent, 2))
    with pytest.raises(NotConjugate, match="all latents move, so there is no static latent for particles"):
        engines.collapsed_kalman(RewardModel(walks, 2))
    with pytest.raises(ValueError, match="outer must name some of the static latents"):
        engines.collapsed_kalman(RewardModel(bent, 2), ("level",))


@pytest.mark.slow
def test_a_row_after_a_step_that_bends_is_refused():
    def bends(arm, context, *, previous=None, elapsed=1.0):
        drift = numpyro.sample("drift", dist.LogNormal(-2.0, 1.0))
        law = dist.Normal(0.0, 1.0)
        if previous is not None:
            bend = jnp.square(previous["level"]) * jnp.maximum(elapsed - 5.0, 0.0)
            law = dist.Normal(previous["level"] + bend, drift)
        level = numpyro.sample("level", law)
        numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 1.0))

    with jax.enable_x64(True):
        engine = engines.collapsed_kalman(RewardModel(bends, 2, context={"time": 0.0}), num_particles=20, window=4)
        state, update, found = engine.init(jr.key(0)), jax.jit(engine.update), []
        for time in (0.0, 1.0, 2.0, 10.0):
            row = Interaction(jnp.zeros(1, int), jnp.ones(1), {"time": jnp.full(1, time)})
            before = state
            state, info = update(jr.key(1), before, row)
            found.append(bool(info.may_recover))
    assert found == [True, True, True, False]
    assert info.failed_checks()[0].startswith(
        "the residual of a row, a step or the prior, relative to its tolerance, is "
    )
    same = jax.tree.map(lambda new, old: bool(jnp.array_equal(new, old)), state, before)
    assert jax.tree.all(same)
