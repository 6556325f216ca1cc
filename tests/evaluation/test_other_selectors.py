"""What another selector would have earned, and how another program predicts: on the same log."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from shared_models import THOMPSON, bernoulli_engine, bernoulli_model, bernoulli_program

from ppl_bandit import Environment, RewardModel, evaluate, selectors, simulate
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.rejection import accepted_rows, compare_programs, evaluate_by_rejection

RATES = np.array([0.2, 0.6])


def same_rate(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate + 0.0 * arm))


def uniform_log(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    arms = rng.integers(0, 2, num_rows)
    rewards = (rng.random(num_rows) < RATES[arms]).astype(float)
    return LoggedDecisions((0, 1), arms, rewards, np.full(num_rows, 0.5), np.full((num_rows, 2), 0.5))


@pytest.mark.slow
def test_decisions_accepted_from_logs_earn_what_a_simulated_selector_earns():
    """The mean true rate of the first 100 accepted decisions is within 2% of simulated runs of the same length."""
    engine, thompson = bernoulli_engine(2), selectors.thompson()
    earned = []
    for seed in range(150):
        log = uniform_log(300, seed)
        rows = accepted_rows(bernoulli_model(2), engine, thompson, log, seed=seed)
        assert rows.size >= 100
        earned.append(RATES[log.arm[rows[:100]]].mean())
    runs = simulate(
        0,
        bernoulli_model(2),
        engine,
        selectors.thompson(),
        Environment(bernoulli_model(2), {"rate": RATES}),
        num_steps=100,
        num_realizations=1000,
        num_samples=400,
    )
    expected = RATES.max() - float(runs.regret.mean())
    # A path's mean has a standard deviation of 5%, that of 150 paths one of .4%: 2% is almost five of them.
    assert np.mean(earned) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_a_path_says_for_how_many_decisions_it_holds():
    found = evaluate_by_rejection(uniform_log(300), THOMPSON, model=bernoulli_model(2))
    assert "not for 300" in found.verdict and not found.is_refused
    assert found.num_accepted == found.rewards.size < found.num_decisions == 300


def test_rows_that_could_not_play_an_arm_are_left_out_without_contexts_and_refused_if_none_is_left():
    log = uniform_log(200)
    log.propensities[:180] = np.eye(2)[log.arm[:180]]
    found = evaluate_by_rejection(log, selectors.greedy(), model=bernoulli_model(2))
    assert found.num_accepted <= 20 and found.is_refused and "too few" in str(found)
    log.propensities[:] = np.eye(2)[log.arm]
    with pytest.raises(ValueError, match="200 of 200 rows .*with_floor"):
        evaluate_by_rejection(log, selectors.greedy(), model=bernoulli_model(2))


@pytest.mark.slow
def test_worlds_drawn_from_a_posterior_have_its_draws_as_truths():
    draws = {"rate": np.array([[0.1, 0.9], [0.4, 0.3]])}
    world = Environment.from_draws(bernoulli_model(2), draws)
    runs = simulate(
        0,
        bernoulli_model(2),
        bernoulli_engine(2),
        THOMPSON,
        world,
        num_steps=3,
        num_realizations=200,
        num_samples=50,
    )
    # The regret of the worse arm is .8 in the first world and .1 in the second.
    assert set(np.unique(np.round(runs.regret.values, 6))) == set(np.float32([0.0, 0.1, 0.8]))
    assert runs.attrs["worlds"] == "draws"
    with pytest.raises(ValueError, match="same positive number"):
        Environment.from_draws(bernoulli_model(2), {"rate": np.zeros((0, 2))})
    with pytest.raises(ValueError, match="outside the support"):
        Environment.from_draws(bernoulli_model(2), {"rate": np.full((3, 2), 1.5)})


@pytest.mark.slow
def test_the_true_program_predicts_better_and_its_score_is_that_of_the_beta_binomial():
    log = uniform_log(400)
    found = compare_programs(log, {"own rates": bernoulli_model(2), "same rate": RewardModel(same_rate, 2)})
    assert found.difference.value > 2 * found.difference.standard_error
    assert found.verdict.startswith("own rates predicted the log better than same rate")
    assert list(found.table().index) == ["own rates", "same rate"] and (found.widths > 0).all(axis=None)
    counts, expected = np.ones((2, 2)), []
    for arm, reward in zip(log.arm, log.reward.astype(int), strict=True):
        expected.append(np.log(counts[arm, reward] / counts[arm].sum()))
        counts[arm, reward] += 1
    # 400 draws estimate each probability p: the error of its log is at most sqrt((1 - p) / p / 3 / 400) = .06 for p near .2
    # in the first row, much less later, and independent between rows: .002 is three standard errors of the mean.
    assert found.scores["own rates"].value == pytest.approx(np.mean(expected), abs=2e-3)


@pytest.mark.slow  # twelve arms; test_evaluate.py evaluates frames in the default run
def test_a_frame_with_numbered_arms_has_the_order_of_the_model():
    def many(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([12]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    rng = np.random.default_rng(0)
    arms = rng.integers(0, 11, 600)  # the last arm is never played
    rewards = (rng.random(600) < (arms == 10)).astype(float)
    frame = pandas.DataFrame({"arm": arms, "reward": rewards, "propensity": 1 / 11})
    found = evaluate(frame, 10, model=RewardModel(many, 12))
    assert found.posterior[0] > 0.9 and found.estimate == pytest.approx(1.0, abs=0.1)
    named = frame.assign(arm=np.where(arms == 10, "good", "bad"), propensity=np.where(arms == 10, 1 / 11, 10 / 11))
    first = evaluate(named, "good", model=bernoulli_model(2), arms=["good", "bad"])
    assert first.posterior[0] > 0.9
    with pytest.raises(ValueError, match="the model has 12 arms"):
        evaluate(named, "good", model=RewardModel(many, 12))


@pytest.mark.slow
def test_a_selector_may_be_compared_with_a_policy():
    found = evaluate(uniform_log(300), THOMPSON, model=bernoulli_model(2), baseline={0: 0.5, 1: 0.5})
    assert "thompson() on the logged path" in found.verdict
    with pytest.raises(ValueError, match="must be a RewardModel"):
        evaluate(uniform_log(30), 0, model=bernoulli_program(2))
