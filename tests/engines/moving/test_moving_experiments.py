"""Live experiments on programs whose latents move: replay, saved files, late and corrected rewards, a clock in seconds."""

import functools

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, Journal, RewardModel, engines, evaluate, evaluate_by_rejection, selectors
from ppl_bandit.evaluation import evaluate as evaluation, posterior_path
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.journal.replay import replay

START = 1_790_000_000.25  # seconds since 1970: float32 has steps of 128 seconds there


def cooling(arm, context, *, previous=None, elapsed=1.0):
    """Levels that forget half in a minute; the time is in seconds."""
    keep = 0.5 ** (elapsed / 60.0)
    with numpyro.plate("arms", 2):
        if previous is None:
            law = dist.Normal(0.0, 1.0)
        else:
            law = dist.Normal(keep * previous["level"], (1.0 - keep**2) ** 0.5)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Normal(level[arm], 1.0))


@functools.cache
def model():
    return RewardModel(cooling, 2, context={"time": 0.0})


@functools.cache
def engine(name):
    return {"kalman": engines.kalman, "particle_filter": functools.partial(engines.particle_filter, num_particles=400)}[
        name
    ](model())


def build(name, **settings):
    return Bandit(model(), engine=lambda _: engine(name), num_samples=50, **settings)


def filtered(rows):
    """Return means and variances after rows (time, arm, reward), at the time of the last."""
    mean, variance, latest = np.zeros(2), np.ones(2), None
    for time, arm, reward in rows:
        keep = 1.0 if latest is None else 0.5 ** (max(time - latest, 0.0) / 60.0)
        mean, variance, latest = keep * mean, keep**2 * variance + 1 - keep**2, max(time, latest or time)
        gain = variance[arm] / (variance[arm] + 1.0)
        mean[arm] += gain * (reward - mean[arm])
        variance[arm] *= 1.0 - gain
    return mean, variance


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
    known = bandit.posterior_parameters()["level"]
    np.testing.assert_allclose(known["mean"], mean, atol=1e-9)
    np.testing.assert_allclose(np.diag(known["covariance"]), variance, atol=1e-9)
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
    known = bandit.posterior_parameters()["level"]
    np.testing.assert_allclose(known["mean"], mean, atol=1e-7)
    np.testing.assert_allclose(np.diag(known["covariance"]), variance, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kalman", "particle_filter"])
def test_a_journal_replays_and_a_saved_bandit_decides_the_same(name, tmp_path):
    bandit = build(name, journal=tmp_path / "j.db")
    for number in range(4):
        late = bandit.select({"time": START + number})
        bandit.update(bandit.select({"time": START + number + 0.5}), float(number % 2))
        bandit.update(late, -0.5)
    bandit.save(tmp_path / "saved")
    loaded = Bandit.load(tmp_path / "saved", model(), engine=lambda _: engine(name))
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
    found = posterior_path.follow_posterior(model(), engine("kalman"), log, has_scores=True)
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
    assert evaluate(log, 0, model=model()).posterior is None  # what is known at the end is the next step
    with pytest.raises(ValueError, match="the program's latents level move, and accepted rows are further apart"):
        evaluate_by_rejection(log, selectors.thompson(), model=model())
