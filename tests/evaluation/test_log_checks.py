"""Rows that are not there, or there twice, and propensities that are not those of the decisions: refused, or said at once."""

import re

import numpy as np
import pandas
import pytest
from shared_models import bernoulli_bandit
from simulated_logs import bernoulli_logs, log_of

from ppl_bandit import evaluate
from ppl_bandit.evaluation.logged_decisions import check_repeated_rows, propensity_doubts


def thompson_frame(num_rows=400, seed=0):
    log = log_of(0, *bernoulli_logs(np.random.default_rng(seed), 1, num_rows, (0.3, 0.4), 0.1))
    return pandas.DataFrame({"arm": log.arm, "reward": log.reward, "propensity": log.propensity})


def uniform_frame(num_rows=400, seed=0):
    rng = np.random.default_rng(seed)
    arm = rng.integers(0, 2, num_rows)
    return pandas.DataFrame({"arm": arm, "reward": (rng.random(num_rows) < 0.4) * 1.0, "propensity": 0.5})


@pytest.mark.parametrize("make", [thompson_frame, uniform_frame])
@pytest.mark.parametrize(
    "copy",
    [
        lambda log: pandas.concat([log] * 4, ignore_index=True),
        lambda log: log.loc[log.index.repeat(2)].reset_index(drop=True),
    ],
)
def test_a_log_that_is_several_copies_of_one_is_refused(make, copy):
    evaluate(make(), 0)
    with pytest.raises(ValueError, match="copies of 400 rows: drop the copies"):
        evaluate(copy(make()), 0)


def test_single_rows_that_were_sent_twice_are_refused_where_they_can_be_told():
    log = thompson_frame()
    # Two of the 400 rows are equal by chance: the posterior came back to where it was.
    twice = pandas.concat([log, log.iloc[50:90]]).sample(frac=1.0, random_state=0)
    with pytest.raises(ValueError, match="42 rows are copies of other rows"):
        evaluate(twice, 0)
    shuffled = pandas.concat([log] * 3).sample(frac=1.0, random_state=0)
    with pytest.raises(ValueError, match="3 copies of 400 rows"):
        evaluate(shuffled, 0)
    known = uniform_frame().assign(decision=np.arange(400))
    with pytest.raises(ValueError, match="rows 7 and 400 have the same 'decision'"):
        evaluate(pandas.concat([known, known.iloc[7:8]], ignore_index=True), 0)
    # Equal rows of their own are told by their ids, and rows of a few kinds cannot be told from copies.
    evaluate(uniform_frame(), 0)
    evaluate(pandas.concat([uniform_frame()] * 2, ignore_index=True).assign(decision=np.arange(800)), 0)


def test_copies_are_told_beside_a_running_number_of_the_row():
    twice = pandas.concat([thompson_frame()] * 2, ignore_index=True).reset_index()
    with pytest.raises(ValueError, match="2 copies of 400 rows"):
        evaluate(twice, 0)
    evaluate(thompson_frame().reset_index(), 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_part_of_a_log_that_is_there_twice_is_refused_without_ids_too(seed):
    log = uniform_frame(seed=seed)
    for part in (log.iloc[100:200], log.iloc[-60:]):
        with pytest.raises(ValueError, match="are copies of those from row") as refused:
            check_repeated_rows(dict(pandas.concat([log, part], ignore_index=True)))
        num_rows = int(re.search(r"the (\d+) rows from row", str(refused.value))[1])
        assert len(part) <= num_rows < len(part) + 10  # rows beside the block may be equal by chance
    spliced = pandas.concat([log.iloc[:150], log.iloc[50:150], log.iloc[150:]], ignore_index=True)
    with pytest.raises(ValueError, match=r"the 100 rows from row 1\d\d are copies of those from row \d\d,"):
        check_repeated_rows(dict(spliced))


def test_rare_events_and_long_logs_have_equal_blocks_by_chance():
    rng = np.random.default_rng(0)
    for num_rows, rate, share in ((2000, 0.01, 0.01), (2000, 0.05, 0.5), (20_000, 0.3, 0.5), (5000, 0.001, 0.05)):
        arm, reward = rng.random(num_rows) < share, rng.random(num_rows) < rate
        check_repeated_rows({"arm": arm * 1, "reward": reward * 1.0, "propensity": np.where(arm, share, 1 - share)})


@pytest.mark.parametrize("num_arms", [2, 40])
def test_arms_that_take_turns_have_equal_blocks_and_a_copy_among_them_is_found(num_arms):
    rng = np.random.default_rng(num_arms)
    log = pandas.DataFrame({"arm": np.arange(3200) % num_arms, "reward": (rng.random(3200) < 0.08) * 1.0})
    kept = log[rng.random(3200) < 0.95]  # rewards that are lost shift the turns
    for frame in (log, kept):
        check_repeated_rows(dict(frame.reset_index(drop=True)))
        twice = pandas.concat([frame, frame.iloc[800:1400]], ignore_index=True)
        with pytest.raises(ValueError, match="are copies of those from row"):
            check_repeated_rows(dict(twice))


@pytest.mark.parametrize(
    "make", [lambda n: np.arange(n), lambda n: pandas.date_range("2026-01-01", periods=n, freq="min")]
)
def test_rows_out_of_order_stand_in_the_first_lines_of_the_verdict(make):
    log = thompson_frame().assign(decided=make(400))
    assert "order" not in evaluate(log, 0).verdict
    found = evaluate(log.sample(frac=1.0, random_state=0), 0)
    line = found.verdict.splitlines()[1]
    assert line.startswith("Caution") and "'decided' is earlier than in the row before" in line
    texts = log.assign(decided=log.decided.astype(str)) if log.decided.dtype.kind == "M" else log
    assert len(evaluate(texts.iloc[::-1], 0).cautions) == len(found.cautions) == 1


def test_imported_plays_that_came_twice_are_refused():
    bandit, log = bernoulli_bandit(2), thompson_frame(100)
    for _ in range(2):
        bandit.update_many(log, propensity="propensity")
    with pytest.raises(ValueError, match="imported plays: its 200 rows are 2 copies"):
        bandit.evaluate(0)


def test_patterns_that_somebody_wrote_down_are_no_copies():
    check_repeated_rows({"arm": np.arange(60) % 2, "reward": np.arange(60) % 3})
    check_repeated_rows({"arm": np.zeros(100), "reward": np.zeros(100)})
    check_repeated_rows({"arm": np.zeros(0), "reward": np.zeros(0)})


def test_missing_rewards_stand_in_the_first_lines_of_the_verdict():
    log = uniform_frame(1000)
    log.loc[(log.reward == 0) & (np.arange(1000) % 5 < 2), "reward"] = np.nan
    found = evaluate(log, (1, 0))
    share = log.reward.isna().mean()
    assert f"Caution: {share:.1%} of the decisions" in found.verdict.splitlines()[1]
    assert "does not depend on what it would have been" in found.cautions[0]


def test_missing_propensities_stand_in_the_first_lines_of_the_verdict():
    log = uniform_frame(1000)
    log.loc[::4, "propensity"] = np.nan
    found = evaluate(log, (1, 0))
    assert "Caution: 25.0% of the rewards (250 of 1000) have no propensity" in found.verdict.splitlines()[1]


@pytest.mark.parametrize("make", [thompson_frame, uniform_frame])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_scaled_propensities_are_refused_with_what_they_would_mean(make, factor):
    log = make(1000)
    log["propensity"] = np.minimum(factor * log["propensity"], 1.0)
    found = evaluate(log, (1, 0))
    assert found.is_refused and "not those of the decisions" in found.verdict.splitlines()[0]


def test_a_played_arm_with_propensity_zero_is_refused():
    log = uniform_frame()
    log.loc[3, "propensity"] = 0.0
    with pytest.raises(ValueError, match="row 3 has the propensity 0, but its arm was played"):
        evaluate(log, 1)


def test_true_propensities_raise_no_doubts():
    """At a threshold of 4 standard errors, 200 logs of each kind should raise none; one is allowed."""
    for floor in (None, 0.02, 0.1):
        data = bernoulli_logs(np.random.default_rng(4), 200, 500, (0.3, 0.35), floor)
        logs = [log_of(run, *data) for run in range(200)]
        assert sum(bool(propensity_doubts(log.propensity, log.arm, 2)) for log in logs) <= 1
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(4), size=(200, 400))
    for own in shares:
        arm = (rng.random((400, 1)) > own.cumsum(axis=1)).sum(axis=1)
        assert not propensity_doubts(own[np.arange(400), arm], arm, 4)


@pytest.mark.parametrize("unit", [1e300, 1e-300])
def test_rewards_whose_squares_are_no_numbers_are_refused_with_a_unit(unit):
    rng = np.random.default_rng(0)
    log = pandas.DataFrame({"arm": rng.integers(2, size=400), "reward": unit * rng.normal(size=400), "propensity": 0.5})
    with pytest.raises(ValueError, match="give rewards in another unit"):
        evaluate(log, 0)
