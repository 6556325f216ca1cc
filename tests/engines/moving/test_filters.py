"""Filters against filters in NumPy: what they learn, what they refuse, and what an update reports.

Tolerances of filters over particles: 1,000 particles are resampled at an effective size of 500, and moves leave at least half
of that, so the mean of the outer latent has a standard error of 1 / sqrt(250) = .063 standard deviations; three are allowed.
The levels depend on the outer latent only in part: .05 standard deviations and 5% are allowed, as for a particle filter. With
10,000 particles the mean of a filter that resamples every few steps has a standard error of about sqrt(3 / 10,000) = .017
standard deviations, and the standard deviation half of that, so .05 and 5% are three errors.
"""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import KEY, is_same, learnt, moments, normal, per_arm, rows_of, slow

from ppl_bandit import Bandit, BanditError, engines
from ppl_bandit.engines.updates.exact import prove_linear_step
from ppl_bandit.engines.updates.filters import FilterParts, Weighed, filter_engine
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation, Interaction, NotConjugate

ROW_CHECK = "the residual of a row, a step or the prior, relative to its tolerance, is "


def one_level(step, first=(0.0, 1.0), noise=1.0, sample_static=None):
    """Return a program of one level that moves by the law `step(previous level, static latent)`."""

    def program(arm, *, previous=None):
        static = None if sample_static is None else sample_static()
        law = dist.Normal(*first) if previous is None else step(previous["level"], static)
        normal(numpyro.sample("level", law) + 0.0 * arm, noise)

    return program


def drift(scale=1.0):
    return numpyro.sample("drift", dist.LogNormal(-2.0, scale))


# Kalman filters


def trend(arm, context, *, previous=None, elapsed=1.0):
    """Two levels that return to a common static mean, and a slope that one arm follows; time comes from the context."""
    mean = numpyro.sample("mean", dist.Normal(1.0, 2.0))
    keep = 0.9**elapsed
    if previous is None:
        slope_law, level_law = dist.Normal(0.0, 0.5), dist.Normal(mean, 1.0)
    else:
        slope_law = dist.Normal(0.8 * previous["slope"], 0.3)
        centre = mean + keep * (previous["level"] - mean) + jnp.array([0.0, 1.0]) * previous["slope"]
        level_law = dist.Normal(centre, 0.4 * jnp.sqrt(elapsed))
    slope = numpyro.sample("slope", slope_law)
    normal(per_arm("level", level_law)[arm] + 0.2 * slope * context["size"], 0.7)


def rows_of_trend(num_steps=1000):
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1.0, num_steps))
    times[100:110] = times[100]  # rows at one time, between which no step is taken
    times[500] = times[400]  # a late row, which is learnt at the latest time so far
    times[700:710] += 1000.0  # padding, with which no time passes
    arms, sizes = rng.integers(0, 2, num_steps), rng.normal(size=num_steps)
    is_counted = (np.arange(num_steps) < 700) | (np.arange(num_steps) >= 710)
    return arms, rng.normal(1.0, 2.0, num_steps), {"time": times, "size": sizes}, is_counted


def numpy_filter(arms, rewards, contexts):
    """Filter (mean, slope, level 0, level 1) in covariance form."""
    first = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
    mean, cov = np.array([1.0, 0.0, 1.0, 1.0]), first @ np.diag([4.0, 0.25, 1.0, 1.0]) @ first.T
    latest, laws, log_evidence = None, [], 0.0
    for arm, reward, time, size in zip(arms, rewards, contexts["time"], contexts["size"], strict=True):
        elapsed = 0.0 if latest is None else max(time - latest, 0.0)
        latest = time if latest is None else max(time, latest)
        if elapsed > 0.0:
            keep = 0.9**elapsed
            step = np.array([[1, 0, 0, 0], [0, 0.8, 0, 0], [1 - keep, 0, keep, 0], [1 - keep, 1, 0, keep]])
            mean, cov = step @ mean, step @ cov @ step.T + np.diag([0, 0.09, 0.16 * elapsed, 0.16 * elapsed])
        read = np.array([0.0, 0.2 * size, arm == 0, arm == 1])
        variance, gap = read @ cov @ read + 0.49, reward - read @ mean
        log_evidence -= 0.5 * (np.log(2 * np.pi * variance) + gap**2 / variance)
        gain = cov @ read / variance
        mean, cov = mean + gain * gap, cov - np.outer(gain, read @ cov)
        laws.append((mean, np.sqrt(np.diag(cov))))
    return *map(np.array, zip(*laws, strict=True)), log_evidence


def test_a_kalman_filter_equals_one_in_numpy_over_a_thousand_steps_and_a_decision_predicts_to_its_own_time():
    arms, rewards, contexts, is_counted = rows_of_trend()
    engine = engines.kalman(RewardModel(trend, 2, context={"time": 0.0, "size": 1.0}))

    def step(state, row):
        state, info = engine.update(KEY, state, jax.tree.map(lambda leaf: leaf[None], row))
        sd = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(state.law.precision[0])))
        return state, (state.law.mean[0], sd, info.is_trusted)

    def run(rows, later):
        state, found = jax.lax.scan(step, engine.init(KEY), rows)
        return found, engine.capabilities.advance(KEY, state, later).law.mean[0], state

    with jax.enable_x64(True):
        rows = rows_of(arms, rewards, contexts)._replace(mask=jnp.asarray(is_counted))
        later = {"time": jnp.asarray(contexts["time"][-1] + 3.0), "size": jnp.asarray(0.0)}
        (means, sds, is_trusted), ahead, state = jax.device_get(jax.jit(run)(rows, later))
    kept = jax.tree.map(lambda leaf: leaf[is_counted], (arms, rewards, contexts))
    expected_means, expected_sds, log_evidence = numpy_filter(*kept)
    assert is_trusted.all() and state.law.num_rows == is_counted.sum()
    # A thousand terms of a few nats each, in float64.
    assert engine.capabilities.log_evidence(state) == (pytest.approx(log_evidence, abs=1e-6), 0.0)
    np.testing.assert_allclose(means[is_counted], expected_means, atol=1e-9)
    np.testing.assert_allclose(sds[is_counted], expected_sds, rtol=1e-9)
    np.testing.assert_array_equal(means[700:710], np.tile(means[699], (10, 1)))
    mean, slope, *levels = expected_means[-1]
    expected = mean + 0.9**3.0 * (np.array(levels) - mean) + np.array([0.0, slope])
    np.testing.assert_allclose(ahead[2:], expected, atol=1e-9)
    assert "a Kalman filter" in engine.explanation.report


def refusal_of_a_step(law):
    with jax.enable_x64(True), pytest.raises(NotConjugate) as refusal:
        prove_linear_step(RewardModel(one_level(lambda level, _: law(level)), 2))
    return str(refusal.value)


@pytest.mark.parametrize(
    "law",
    [
        lambda level: dist.Normal(jnp.tanh(level), 0.1),
        slow(lambda level: dist.Normal(level, jnp.exp(0.1 * level))),
        slow(lambda level: dist.StudentT(30.0, level, 0.1)),
        lambda level: dist.Normal(jnp.where(level > 9.0, 2.0, 1.0) * level, 0.1),
    ],
    ids=["bent mean", "scale of its own", "heavy tails", "branch far from the prior"],
)
def test_a_step_that_is_not_linear_gaussian_is_refused(law):
    message = refusal_of_a_step(law)
    assert "Kalman filter" in message and "affine in the others" in message


def test_a_step_that_rounding_hides_is_not_called_bent():
    message = refusal_of_a_step(lambda level: dist.Normal(level, 1e-9))
    assert "rounding alone could hide" in message and "in the step of 'level'" in message
    assert "not linear Gaussian" not in message


def bends(has_drift, arm, context, *, previous=None, elapsed=1.0):
    """A level that bends in a step of more than five units of time."""
    scale = drift() if has_drift else 0.5
    law = dist.Normal(0.0, 1.0)
    if previous is not None:
        bend = jnp.square(previous["level"]) * jnp.maximum(elapsed - 5.0, 0.0)
        law = dist.Normal(previous["level"] + bend, scale)
    normal(numpyro.sample("level", law) + 0.0 * arm)


@pytest.mark.slow
def test_a_row_after_a_step_that_bends_is_refused_in_the_words_of_a_step():
    model = RewardModel(functools.partial(bends, False), 1, context={"time": 0.0})
    engine = engines.kalman(model)
    bandit = Bandit(model, engine=lambda _: engine, num_samples=20)
    for time in (0.0, 1.0):
        bandit.update(arm=0, reward=1.0, context={"time": time})
    with pytest.raises(BanditError, match="the step to the time of these rewards is not linear Gaussian") as refusal:
        bandit.update(arm=0, reward=1.0, context={"time": 10.0})
    assert "prior" not in str(refusal.value)
    with jax.enable_x64(True):
        state, info = learnt(engine, rows_of([0, 0], [1.0, 1.0], {"time": np.array([0.0, 10.0])}))
        assert info.is_certified.all() and not info.is_trusted and state.law.num_rows == 0
    (failure,) = info.failed_checks()
    assert failure.startswith(ROW_CHECK)


def test_engines_of_moving_and_of_other_programs_refuse_each_other():
    def still(arm):
        normal(numpyro.sample("level", dist.Normal(0.0, 1.0)) + 0.0 * arm)

    for factory in (engines.kalman, engines.particle_filter):
        with pytest.raises(ValueError, match="does not take the keyword `previous`"):
            factory(RewardModel(still, 2))
    model = RewardModel(trend, 2, context={"time": 0.0, "size": 1.0})
    for factory in (engines.conjugate, engines.collapsed, engines.reweight, engines.nuts, engines.svi, engines.laplace):
        with pytest.raises(ValueError, match="samples slope, level from `previous`: use engines.choose"):
            factory(model)


# Kalman filters over particles


def walk(arm, *, previous=None):
    scale = drift()
    law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], scale)
    normal(per_arm("level", law)[arm], 0.5)


def quadrature_of_drifts(arms, rewards):
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
        centre, sd = moments(log_weights, np.vstack([log_drift, mean.T]))
        within, _ = moments(log_weights, np.vstack([np.zeros(600), variance.T]))
        found.append((centre, np.sqrt(within + sd**2)))
    return map(np.array, zip(*found, strict=True))


@pytest.mark.slow
def test_an_unknown_drift_agrees_with_quadrature_beyond_the_window(num_steps=160):
    rng = np.random.default_rng(1)
    levels = np.cumsum(np.vstack([rng.normal(size=(1, 2)), 0.1 * rng.normal(size=(num_steps - 1, 2))]), axis=0)
    arms = rng.integers(0, 2, num_steps)
    rewards = levels[np.arange(num_steps), arms] + 0.5 * rng.normal(size=num_steps)
    engine = engines.collapsed_kalman(RewardModel(walk, 2), window=60)
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
        rows = jnp.arange(num_steps), jnp.asarray(arms), jnp.asarray(rewards)
        _, (means, sds, is_trusted) = jax.jit(lambda: jax.lax.scan(step, engine.init(jr.key(7)), rows))()
    expected_means, expected_sds = quadrature_of_drifts(arms, rewards)
    errors, ratios = np.abs(np.asarray(means) - expected_means) / expected_sds, np.asarray(sds) / expected_sds
    assert is_trusted.all()
    assert errors[:, 1:].max() < 0.05 and np.abs(ratios[:, 1:] - 1).max() < 0.05
    assert errors[-1, 0] < 3 * 0.063 and errors[:, 0].mean() < 0.063 * 1.5
    assert abs(ratios[-1, 0] - 1) < 3 * 0.063


@pytest.mark.slow
def test_what_is_not_linear_gaussian_given_static_latents_is_refused():
    bent = RewardModel(one_level(lambda level, own: dist.Normal(jnp.tanh(level), own), sample_static=drift), 2)
    walks = RewardModel(one_level(lambda level, _: dist.Normal(level, 1.0)), 2)
    with pytest.raises(NotConjugate, match="has no Kalman filters over particles"):
        engines.collapsed_kalman(bent)
    with pytest.raises(NotConjugate, match="all latents move, so there is no static latent for particles"):
        engines.collapsed_kalman(walks)
    with pytest.raises(ValueError, match="outer must name some of the static latents"):
        engines.collapsed_kalman(bent, ("level",))


@pytest.mark.slow
def test_a_row_after_a_step_that_bends_is_refused_over_particles_too():
    with jax.enable_x64(True):
        model = RewardModel(functools.partial(bends, True), 2, context={"time": 0.0})
        engine = engines.collapsed_kalman(model, num_particles=20, window=4)
        state, found = engine.init(KEY), []
        for time in (0.0, 1.0, 2.0, 10.0):
            before = state
            state, info = learnt(engine, rows_of([0], [1.0], {"time": np.array([time])}), before)
            found.append(bool(info.may_recover))
    assert found == [True, True, True, False]
    assert info.failed_checks()[0].startswith(ROW_CHECK) and is_same(state, before)


# Particle filters


def counts(arm, *, previous=None):
    """A log rate that moves; its step is not linear, so that no Kalman filter exists for two reasons."""
    mean = 0.5 if previous is None else 0.5 + 0.9 * jnp.tanh(previous["level"] - 0.5)
    level = numpyro.sample("level", dist.Normal(mean, 1.0 if previous is None else 0.3))
    numpyro.sample("reward", dist.Poisson(jnp.exp(level + 0.0 * arm)))


@functools.cache
def filter_of_counts():
    engine = engines.particle_filter(RewardModel(counts, 1), num_particles=10_000)

    @jax.jit
    def run(key, rewards):
        def step(state, row):
            number, reward = row
            state, info = engine.update(jr.fold_in(key, number), state, Interaction(jnp.zeros(1, int), reward[None]))
            weights = jax.nn.softmax(state.particles.log_weights, axis=1) / 2
            mean = jnp.sum(weights * state.particles.positions["level"])
            sd = jnp.sqrt(jnp.sum(weights * (state.particles.positions["level"] - mean) ** 2))
            return state, (mean, sd, info)

        state, found = jax.lax.scan(step, engine.init(key), (jnp.arange(rewards.size), rewards))
        return (*found, *state.evidence())

    return run


def grid_filter(rewards):
    grid = np.linspace(-4.0, 5.0, 1801)
    law = np.exp(-0.5 * (grid - 0.5) ** 2)
    step = np.exp(-0.5 * ((grid[:, None] - 0.5 - 0.9 * np.tanh(grid - 0.5)) / 0.3) ** 2)
    step /= step.sum(axis=0)
    found, log_evidence = [], 0.0
    law /= law.sum()
    for number, reward in enumerate(rewards):
        law = step @ law if number else law
        law = law * np.exp(reward * grid - np.exp(grid))
        log_evidence += np.log(law.sum()) - np.sum(np.log(np.arange(1, reward + 1)))
        law /= law.sum()
        mean = law @ grid
        found.append((mean, np.sqrt(law @ (grid - mean) ** 2)))
    return *np.array(found).T, log_evidence


def test_a_particle_filter_agrees_with_a_filter_on_a_grid(num_steps=60):
    rewards = np.random.default_rng(4).poisson(np.exp(0.5 + 0.8 * np.sin(np.arange(num_steps) / 8)))
    with jax.enable_x64(True):
        means, sds, info, log_evidence, error = filter_of_counts()(KEY, jnp.asarray(rewards))
    expected_means, expected_sds, expected_evidence = grid_filter(rewards)
    assert info.is_trusted.all()
    assert np.abs((means - expected_means) / expected_sds).max() < 0.05
    assert np.abs(sds / expected_sds - 1).max() < 0.05
    # The relative variance of the evidence adds up over the steps: 60 steps of about 1 / 10,000 each.
    assert abs(float(log_evidence) - expected_evidence) < 3 * np.sqrt(num_steps / 10_000)
    assert float(error) < 3 * np.sqrt(num_steps / 10_000)


def test_the_evidence_of_a_particle_filter_fails_where_no_particle_fits_the_reward():
    rewards = np.ones(60, int)
    rewards[-1] = 500  # a log rate of 6.2, 18 steps away
    with jax.enable_x64(True):
        _, _, info, *_ = filter_of_counts()(KEY, jnp.asarray(rewards))
    assert info.is_trusted[:-1].all() and not info.is_trusted[-1]
    failed = "; ".join(jax.tree.map(lambda leaf: leaf[-1], info).failed_checks())
    assert "the effective sample size, as a share of the particles, is" in failed


# What an update of two filters reports of a batch, by particles without a program; and digits of rewards far from 0

NUM = 50  # particles of each filter


def stub_engine():
    """Positions drawn once, weighted by their product with a reward; a reward above 2 fails its certificate."""

    def weigh(particles, weights, row, elapsed):
        residual = jnp.maximum(row.reward - 1.0, 0.0)
        return Weighed(particles, row.reward * particles[..., 0], particles, 0.0, residual, ())

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
    model = RewardModel(one_level(lambda level, _: dist.Normal(level, 1.0), noise=0.5), 1)
    return filter_engine(model, parts, Explanation("stub", False, "", {}), num_particles=2 * NUM, window=1)


def test_what_an_update_reports_is_that_of_the_state_it_returns():
    engine = stub_engine()
    start = engine.init(KEY)

    def after(state, rewards, *mask):
        found, info = jax.jit(engine.update)(jr.key(1), state, rows_of([0] * 3, rewards)._replace(mask=jnp.array(mask)))
        return found, info, (info.num_refreshes, info.log_evidence, info.log_evidence_error)

    state, info, reported = after(start, [0.5, 2.0, 0.1], True, True, False)
    assert info.may_recover and info.num_refreshes == state.particles.num_refreshes > 0 and info.log_evidence != 0.0
    # Rows that are all masked change nothing, and fail nothing.
    for before in (start, state):
        same, info, found = after(before, [0.5, 2.0, 0.1], False, False, False)
        assert is_same(same, before)
        assert found == (before.particles.num_refreshes, *before.evidence())
        assert info.is_trusted and info.failed_checks() == [] and NUM <= info.ess < 2 * NUM + 0.01
    # A batch with a row that is not certified is not learnt: the report has no evidence of it.
    same, info, found = after(state, [0.5, 3.5, 0.1], True, True, True)
    assert not info.may_recover and info.failed_checks()[0].startswith(ROW_CHECK)
    assert is_same(same, state) and found == reported


NOISE = np.random.default_rng(1).normal(size=(2, 30)) * np.array([[1.0], [0.5]])
REWARDS = NOISE[0].cumsum() + NOISE[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "offset"), [(engines.kalman, 1e8), (engines.collapsed_kalman, 1e6), (engines.collapsed_kalman, 1e8)]
)
def test_rewards_of_any_size_keep_their_digits(factory, offset):
    """The same draws with all rewards and the prior moved by an offset; a double keeps eps x offset of the latter."""
    is_exact = factory is engines.kalman
    found = []
    for own in (0.0, offset):
        static = None if is_exact else lambda: numpyro.sample("drift", dist.LogNormal(0.0, 0.5))
        program = one_level(
            lambda level, scale: dist.Normal(level, 1.0 if scale is None else scale), (own, 1.0), 0.5, static
        )
        model = RewardModel(program, 1)
        engine = factory(model) if is_exact else factory(model, num_particles=100, window=10)

        def step(state, row, engine=engine, own=own):
            number, reward = row
            state, info = engine.update(jr.key(number), state, Interaction(jnp.zeros(1, int), reward[None]))
            law = state.law if is_exact else state.particles.positions.laws
            return state, (law.mean - own, state.evidence()[0], info.is_trusted, info.may_recover)

        with jax.enable_x64(True):
            rows = jnp.arange(REWARDS.size), jnp.asarray(REWARDS + own)
            found.append(jax.device_get(jax.jit(jax.lax.scan, static_argnums=0)(step, engine.init(KEY), rows)[1]))
    (means, evidence, *trust), (moved_means, moved_evidence, *moved_trust) = found
    assert trust[1].all() and np.array_equal(trust, moved_trust)
    roundings = np.finfo(float).eps * offset
    np.testing.assert_allclose(moved_means, means, atol=20 * roundings)
    # A reward's rounding changes its log density by up to a few slopes, which are at most 2 / .25 per unit here.
    np.testing.assert_allclose(moved_evidence, evidence, atol=REWARDS.size * 8 * roundings)
