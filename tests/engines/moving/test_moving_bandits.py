"""Programs whose latents move in a live bandit, in a journal, in logs and in simulations; with a clock in seconds."""

import functools

import numpy as np
import numpyro.distributions as dist
import pytest
from programs import normal, per_arm

from ppl_bandit import (
    Bandit,
    Environment,
    Journal,
    RewardModel,
    engines,
    evaluate,
    evaluate_by_rejection,
    selectors,
    simulate,
    tune,
)
from ppl_bandit.evaluation import evaluate as evaluation, posterior_path
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.journal.replay import replay
from ppl_bandit.live.reward_curves import levels_over_time
from ppl_bandit.types import Interaction

START = 1_790_000_000.25  # seconds since 1970: float32 has steps of 128 seconds there


def drifting(arm, *, previous=None):
    law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], 0.3)
    normal(per_arm("level", law, 3)[arm])


def cooling(arm, context, *, previous=None, elapsed=1.0):
    """Levels that forget half in a minute; the time is in seconds."""
    keep, law = 0.5 ** (elapsed / 60.0), dist.Normal(0.0, 1.0)
    if previous is not None:
        law = dist.Normal(keep * previous["level"], (1.0 - keep**2) ** 0.5)
    normal(per_arm("level", law)[arm])


@functools.cache
def model(has_clock=False):
    return RewardModel(cooling, 2, context={"time": 0.0}) if has_clock else RewardModel(drifting, 3)


@functools.cache
def engine(name=None):
    """Return the engine of the program with a clock, or that of the other one."""
    if name is None:
        return engines.choose(model())
    return engines.kalman(model(True)) if name == "kalman" else engines.particle_filter(model(True), num_particles=400)


def build(which=None, **settings):
    num_samples = 100 if which is None else 50
    return Bandit(model(which is not None), engine=lambda _: engine(which), num_samples=num_samples, **settings)


def learn(mean, variance, arm, reward):
    gain = variance[arm] / (variance[arm] + 1.0)
    mean[arm] += gain * (reward - mean[arm])
    variance[arm] *= 1.0 - gain


def drifted(arms, rewards):
    """Filter three independent levels, and predict the next step."""
    mean, variance = np.zeros(3), np.ones(3)
    for arm, reward in zip(arms, rewards, strict=True):
        learn(mean, variance, arm, reward)
        variance += 0.09
    return mean, variance


def filtered(rows):
    """Return means and variances after rows (time, arm, reward), at the time of the last."""
    mean, variance, latest = np.zeros(2), np.ones(2), None
    for time, arm, reward in rows:
        keep = 1.0 if latest is None else 0.5 ** (max(time - latest, 0.0) / 60.0)
        mean, variance, latest = keep * mean, keep**2 * variance + 1 - keep**2, max(time, latest or time)
        learn(mean, variance, arm, reward)
    return mean, variance


def check_levels(bandit, mean, variance, atol=1e-9):
    known = bandit.posterior_parameters()["level"]
    np.testing.assert_allclose(known["mean"], mean, atol=atol)
    np.testing.assert_allclose(np.diag(known["covariance"]), variance, atol=atol)


@pytest.mark.slow
def test_a_live_bandit_steps_once_for_each_reward_in_the_order_of_arrival():
    bandit = build()
    decisions = [bandit.select() for _ in range(4)]
    order, rewards = [2, 0, 3, 1], [0.3, -1.0, 2.0, 0.7]
    for place, reward in zip(order, rewards, strict=True):
        bandit.update(decisions[place], reward)
    mean, variance = drifted([decisions[place].arm for place in order], rewards)
    check_levels(bandit, mean, variance)
    assert "Kalman filter" in bandit.explain()
    assert len(bandit.summary()) == 3
    rows = Interaction(np.array([decisions[place].arm for place in order]), np.array(rewards))
    levels = levels_over_time(model(), engine(), 0, rows)
    # Means of 400 draws: three standard errors.
    assert np.all(np.abs(levels.mean[-1] - mean) < 3 * np.sqrt(variance / 400))
    assert levels.values.tolist() == [1, 2, 3, 4]
    assert len(bandit.plot().axes) == 2
    tree = bandit.to_arviz(50)  # the draws say nothing about the latents of earlier rows
    names = tree.groups() if callable(tree.groups) else tree.children  # ArviZ before 1.0, and its trees
    assert {"posterior", "prior", "observed_data", "constant_data"} == {*names}
    assert tree["posterior"].attrs["step"].startswith("the one after 4 rows")


@pytest.mark.slow
def test_a_journal_continues_and_a_corrected_reward_is_refitted_in_the_same_order(tmp_path):
    settings = {"journal": tmp_path / "journal.db", "name": "drift"}
    bandit = build(**settings)
    decisions = [bandit.select() for _ in range(3)]
    for decision, reward in zip(decisions, [1.0, 2.0, 3.0], strict=True):
        bandit.update(decision, reward)
    again = build(**settings)
    arms = [decision.arm for decision in decisions]
    np.testing.assert_allclose(again.posterior_parameters()["level"]["mean"], drifted(arms, [1.0, 2.0, 3.0])[0])
    again.update(decisions[0], -1.0, correct=True)
    np.testing.assert_allclose(again.posterior_parameters()["level"]["mean"], drifted(arms, [-1.0, 2.0, 3.0])[0])


@pytest.mark.slow
def test_regret_is_measured_against_the_best_arm_of_each_step():
    path = np.random.default_rng(0).normal(size=(12, 3))
    world = Environment.from_path(model(), {"level": path})
    counts = dict(num_realizations=4, num_samples=50)
    found = simulate(0, model(), engine(), selectors.thompson(), world, num_steps=12, **counts)
    played = path[np.arange(12), found.arm.values]
    np.testing.assert_allclose(found.regret.values, path.max(axis=1) - played, atol=1e-9)
    assert found.attrs["worlds"] == "path" and found.is_trusted.all()
    with pytest.raises(ValueError, match="13 steps were asked for, but the path of environment has 12"):
        simulate(0, model(), engine(), selectors.thompson(), world, num_steps=13, **counts)


@pytest.mark.slow
def test_worlds_from_the_prior_move_by_the_program_itself():
    world = Environment.from_prior(model())
    counts = dict(num_steps=12, num_realizations=400, num_samples=50)
    found = simulate(1, model(), engine(), selectors.thompson(), world, **counts)
    # The reward of step 12 has variance 1 + 11 x .09 + 1 = 2.99 on a fixed arm; a chosen arm has a larger mean and less
    # variance. The mean of squares of the first step is 1 + 1, with a standard error of sqrt(2 / 400) x 2 = .14.
    assert abs(np.mean(found.reward.values[:, 0] ** 2) - 2.0) < 3 * 0.14
    assert found.reward.values[:, -1].mean() > 0.5


def test_what_is_not_defined_for_moving_latents_is_refused():
    with pytest.raises(ValueError, match="changes was given for a program whose latents move"):
        Environment(model(), {"level": np.zeros(3)}, changes={5: {"level": np.ones(3)}})


@pytest.mark.slow
def test_tune_measures_regret_against_the_best_arm_of_each_step():
    path = np.zeros((12, 3))
    path[np.arange(12), np.arange(12) % 3] = 3.0  # the best arm changes at every step
    world = Environment.from_path(model(), {"level": path})
    candidates = {"equal shares": selectors.fixed(), "thompson": selectors.thompson()}
    tuned = tune(model(), 12, candidates, environment=world, engine=engine(), num_worlds=64, num_samples=50)
    # A step at random loses 3 with probability 2/3: the mean of 32 worlds or more has an error of at most
    # sqrt(12 x 9 x 2/9 / 32) = .87.
    assert {score.name for score in tuned.standings} == set(candidates)
    assert abs(tuned.regret["equal shares"].mean() - 24.0) < 3 * 0.87


@pytest.mark.slow
def test_seconds_since_1970_are_a_clock_and_a_late_reward_is_learnt_at_the_latest_time(tmp_path):
    bandit = build("kalman", journal=tmp_path / "j.db")
    times = START + np.array([0.0, 0.5, 30.0, 31.25])
    decisions = [bandit.select({"time": time}) for time in times]
    order, rewards = [0, 2, 1, 3], [1.0, -0.5, 2.0, 0.25]
    for place, reward in zip(order, rewards, strict=True):
        bandit.update(decisions[place], reward)
    rows = [(times[place], decisions[place].arm, reward) for place, reward in zip(order, rewards, strict=True)]
    mean, variance = filtered(rows)
    check_levels(bandit, mean, variance)
    np.testing.assert_allclose(bandit.summary().expected_reward, mean, atol=1e-9)  # at the latest time, in closed form
    keep = 0.5 ** (120.0 / 60.0)
    later, ahead = {"time": times[-1] + 120.0}, (keep * mean, np.sqrt(keep**2 * variance + 1 - keep**2))
    drawn = bandit.expected_rewards(later, 1000)
    # The mean of 1,000 draws has a standard error of sd / sqrt(1000), their standard deviation one of sd / sqrt(2000).
    assert np.all(np.abs(drawn.mean(axis=0) - ahead[0]) < 4 * ahead[1] / np.sqrt(1000))
    assert np.all(np.abs(drawn.std(axis=0) / ahead[1] - 1) < 4 / np.sqrt(2000))
    table = bandit.summary({"time": [times[0], later["time"]]})  # at the latest time; the mean of 50 draws
    assert np.all(np.abs(table.expected_reward - ahead[0]) < 4 * ahead[1] / np.sqrt(50))
    bandit.update(decisions[0], -3.0, correct=True)
    rows[0] = (*rows[0][:2], -3.0)
    np.testing.assert_allclose(bandit.posterior_parameters()["level"]["mean"], filtered(rows)[0], atol=1e-9)


@pytest.mark.slow
def test_rewards_a_nanosecond_apart_are_learnt_at_one_time_and_no_time_is_lost():
    bandit, rows = build("kalman"), []
    # In 1e-9 seconds the levels lose 2e-11 of their variance, less than a certificate can see. A step of 30 seconds follows.
    for number, time in enumerate([0.0, 1e-9, 2e-9, 3e-9, 30.0, 30.0 + 1e-9, 60.0]):
        rows.append((time, number % 2, 1.0 + number))
        bandit.update(arm=rows[-1][1], reward=rows[-1][2], context={"time": time})
    mean, variance = filtered(rows)
    check_levels(bandit, mean, variance, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kalman", "particle_filter"])
def test_a_journal_replays_and_a_saved_bandit_decides_the_same(name, tmp_path):
    bandit = build(name, journal=tmp_path / "j.db")
    for number in range(4):
        late = bandit.select({"time": START + number})
        bandit.update(bandit.select({"time": START + number + 0.5}), float(number % 2))
        bandit.update(late, -0.5)
    bandit.save(tmp_path / "saved")
    loaded = Bandit.load(tmp_path / "saved", model(True), engine=lambda _: engine(name))
    reopened = build(name, journal=tmp_path / "j.db")
    later = {"time": START + 90.0}
    expected = bandit.propensities(later)
    np.testing.assert_allclose(loaded.propensities(later), expected, atol=1e-12)
    posterior = bandit.expected_rewards(later)  # a new opening has the same posterior, and a random stream of its own
    np.testing.assert_allclose(reopened.expected_rewards(later), posterior, atol=1e-12)
    with Journal(tmp_path / "j.db", read_only=True) as journal:
        found = replay(journal.store, "default", 0, *bandit._build([0, 1]), bandit._build)
    assert (found.num_checked, found.position) == (8, None), found.difference
    assert len(bandit.summary({"time": [START + 90.0]})) == 2


@pytest.mark.slow
def test_each_row_of_a_log_is_predicted_at_its_own_time(monkeypatch):
    monkeypatch.setattr(posterior_path, "_MAX_BLOCKS", 2)  # programs that do not move would be read in two blocks
    times, arms, rewards = np.array([0.0, 30.0, 300.0, 320.0]), np.array([0, 0, 0, 1]), np.array([1.5, -1.0, 0.5, 2.0])
    log = LoggedDecisions((0, 1), arms, rewards, np.full(4, 0.5), np.full((4, 2), 0.5), {"time": times})
    found = posterior_path.follow_posterior(model(True), engine("kalman"), log, has_scores=True)
    for row, time in enumerate(times):
        mean, variance = (
            (np.zeros(2), np.ones(2)) if row == 0 else filtered([*zip(times, arms, rewards, strict=True)][:row])
        )
        keep = 0.5 ** ((time - times[row - 1]) / 60.0) if row else 1.0
        mean, variance = keep * mean, keep**2 * variance + 1 - keep**2
        # Means of 400 draws: four standard errors of at most 1 / 20.
        assert np.all(np.abs(found.means[row] - mean) < 4 * np.sqrt(variance / 400)), row
        spread = variance[arms[row]] + 1.0
        score = -0.5 * (np.log(2 * np.pi * spread) + (rewards[row] - mean[arms[row]]) ** 2 / spread)
        # The density of a row at a draw has a relative deviation of at most .7: that of 400 draws one of .035.
        assert abs(found.log_scores[row] - score) < 4 * 0.035, row
    monkeypatch.setattr(evaluation, "engine_of", lambda _: engine("kalman"))
    assert evaluate(log, 0, model=model(True)).posterior is None  # what is known at the end is the next step
    with pytest.raises(ValueError, match="the program's latents level move, and accepted rows are further apart"):
        evaluate_by_rejection(log, selectors.thompson(), model=model(True))
