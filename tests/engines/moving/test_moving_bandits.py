"""Programs whose latents move in a live bandit, in a journal and in simulations."""

import functools

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, Environment, engines, selectors, simulate, tune
from ppl_bandit.live.reward_curves import levels_over_time
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


def drifting(arm, *, previous=None):
    with numpyro.plate("arms", 3):
        law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], 0.3)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Normal(level[arm], 1.0))


@functools.cache
def model():
    return RewardModel(drifting, 3)


@functools.cache
def engine():
    return engines.choose(model())


def filtered(arms, rewards):
    """Filter three independent levels, and predict the next step."""
    mean, variance = np.zeros(3), np.ones(3)
    for arm, reward in zip(arms, rewards, strict=True):
        gain = variance[arm] / (variance[arm] + 1.0)
        mean[arm] += gain * (reward - mean[arm])
        variance[arm] *= 1.0 - gain
        variance += 0.09
    return mean, variance


def build(**settings):
    return Bandit(model(), engine=lambda _: engine(), num_samples=100, **settings)


@pytest.mark.slow
def test_a_live_bandit_steps_once_for_each_reward_in_the_order_of_arrival():
    bandit = build()
    decisions = [bandit.select() for _ in range(4)]
    order, rewards = [2, 0, 3, 1], [0.3, -1.0, 2.0, 0.7]
    for place, reward in zip(order, rewards, strict=True):
        bandit.update(decisions[place], reward)
    mean, variance = filtered([decisions[place].arm for place in order], rewards)
    known = bandit.posterior_parameters()["level"]
    np.testing.assert_allclose(known["mean"], mean, atol=1e-9)
    np.testing.assert_allclose(np.diag(known["covariance"]), variance, atol=1e-9)
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
    np.testing.assert_allclose(again.posterior_parameters()["level"]["mean"], filtered(arms, [1.0, 2.0, 3.0])[0])
    again.update(decisions[0], -1.0, correct=True)
    np.testing.assert_allclose(again.posterior_parameters()["level"]["mean"], filtered(arms, [-1.0, 2.0, 3.0])[0])


@pytest.mark.slow
def test_regret_is_measured_against_the_best_arm_of_each_step():
    path = np.random.default_rng(0).normal(size=(12, 3))
    world = Environment.from_path(model(), {"level": path})
    found = simulate(
        0, model(), engine(), selectors.thompson(), world, num_steps=12, num_realizations=4, num_samples=50
    )
    played = path[np.arange(12), found.arm.values]
    np.testing.assert_allclose(found.regret.values, path.max(axis=1) - played, atol=1e-9)
    assert found.attrs["worlds"] == "path" and found.is_trusted.all()
    with pytest.raises(ValueError, match="13 steps were asked for, but the path of environment has 12"):
        simulate(0, model(), engine(), selectors.thompson(), world, num_steps=13, num_realizations=4)


@pytest.mark.slow
def test_worlds_from_the_prior_move_by_the_program_itself():
    world = Environment.from_prior(model())
    found = simulate(
        1, model(), engine(), selectors.thompson(), world, num_steps=12, num_realizations=400, num_samples=50
    )
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
