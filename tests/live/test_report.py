"""The report: the answer in a few lines, and the expected loss after more decisions against brute force."""

import datetime
import re

import numpy as np
import pytest
from shared_models import THOMPSON, bernoulli_bandit, bernoulli_model

from ppl_bandit.live.lookahead import LossesAfter, simulated_pseudo_counts
from ppl_bandit.live.overview import Overview, arm_overview
from ppl_bandit.live.report import make_report
from ppl_bandit.numerics.tail_excess import loss_after, losses_from_table


def brute_force_loss(a, b, num_rows, num_worlds, rng):
    """The expected loss after more rewards of Bernoulli arms with posteriors Beta(a, b), by simulation."""
    rates = rng.beta(a, b, (num_worlds, len(a)))
    successes = rng.binomial(num_rows, rates)
    means = (a + successes) / (a + b + num_rows)
    lost = rates.max(axis=1) - np.take_along_axis(rates, means.argmax(axis=1)[:, None], axis=1)[:, 0]
    return lost.mean(), lost.std() / np.sqrt(num_worlds)


@pytest.fixture(scope="module")
def bandit():
    made = bernoulli_bandit(2, arms=["old", "new"], selector=THOMPSON)
    made.update_many(arms=["old"] * 40 + ["new"] * 40, rewards=[1] * 12 + [0] * 28 + [1] * 17 + [0] * 23)
    return made


@pytest.mark.parametrize(
    ("a", "b", "num_rows"),
    [((13, 18), (29, 24), (20, 60)), ((13, 18), (29, 24), (400, 400)), ((3, 4, 5), (7, 6, 9), (10, 10, 10))],
)
def test_the_loss_after_more_rewards_agrees_with_brute_force(a, b, num_rows):
    a, b, num_rows, rng = np.array(a), np.array(b), np.array(num_rows), np.random.default_rng(0)
    table = rng.beta(a, b, (200_000, len(a)))
    found = loss_after(table, num_rows, a + b)
    brute, error = brute_force_loss(a, b, num_rows, 400_000, rng)
    now = losses_from_table(table).min()
    # The shape of the law of the posterior means is approximate: 5% of today's loss, and four standard errors.
    assert found == pytest.approx(brute, abs=0.05 * now + 4 * error)
    assert found < now
    assert loss_after(table, 0 * num_rows, a + b) == pytest.approx(now)


def test_a_simulated_posterior_is_worth_as_many_rewards_as_its_counts(bandit):
    draws = bandit.posterior(4000)
    counts = simulated_pseudo_counts(bandit.model, draws, draws["rate"], np.arange(2), None, np.array([40, 40]), seed=0)
    # Beta(a, b) is worth a + b = 42. R^2 of k = 40 rewards is near 1/2; over 4,000 draws its standard error is at most .016,
    # and 42 = k (1 / R^2 - 1) changes by k / R^4 = 160 times that.
    np.testing.assert_allclose(counts, 42.0, atol=4 * 160 * 0.016)


def test_a_report_answers_in_five_lines(bandit):
    bandit.select()
    report = bandit.report(more=(100, 1000))
    lines = str(report).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("new leads after 80 rewards: expected reward 0.4286 (posterior mean; 95% interval 0.28")
    assert re.search(r", 0\.119 more than old \(95% interval -0\.\d+ to 0\.\d+\)\.$", lines[0])
    assert re.fullmatch(r"It is the best of 2 arms with probability 0\.8\d\d\.", lines[1])
    assert (
        "Choosing it now loses" in lines[2]
        and "after 100 more decisions" in lines[2]
        and "after 1,000 more" in lines[2]
    )
    assert lines[3] == "Evidence: exact posterior of the program conversion, numbers in closed form."
    assert re.match(r"Pending: 1 decision waits for a reward, the oldest since 20\d\d-", lines[4])
    assert report.leader == "new" and report.runner_up == "old" and report.num_pending == 1
    assert report.loss > report.loss_after[100] > report.loss_after[1000] > 0
    # Thompson sampling shares the 100 decisions by P(best): brute force with as many rows for each arm.
    shares = bandit.propensities()
    a, b = np.array([13.0, 18.0]), np.array([29.0, 24.0])
    brute, error = brute_force_loss(a, b, np.round(100 * shares).astype(int), 400_000, np.random.default_rng(1))
    # 5% of today's loss for the shape of the law, 5% for the 4,000 draws behind the ratio.
    assert report.loss_after[100] == pytest.approx(brute, abs=0.1 * report.loss + 4 * error)


def test_a_report_is_a_page_with_a_figure_and_plain_values(bandit, tmp_path):
    report = bandit.report(more=(100,))
    page = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page
    assert "data:image/png;base64," in page and "new leads after 80 rewards" in page and "<script" not in page
    assert "seed 0" in page and f"made on {datetime.datetime.now(datetime.UTC):%Y-}" in page
    assert report.to_dict()["loss_after"].keys() == {"100"} and len(report.to_dict()["arms"]) == 2
    assert "<table" in report._repr_html_()


def test_a_report_without_rewards_or_with_wrong_numbers():
    fresh = bernoulli_bandit(2, selector=THOMPSON)
    assert str(fresh.report()).startswith("No rewards yet. By the prior, arm 0 has the expected reward 0.5 (mean; ")
    with pytest.raises(ValueError, match="more"):
        fresh.report(more=(0,))


def test_a_retired_arm_does_not_lead():
    """Retired arms keep their row, but are compared with no other: numbers as if the bandit never had them."""
    draws = np.random.default_rng(0).beta([4, 6, 10], [8, 6, 2], (500, 3))
    is_open = np.array([True, True, False])
    found = arm_overview(bernoulli_model(3), ["a", "b", "best"], np.zeros(30, int), {"rate": draws}, is_open=is_open)
    fresh = arm_overview(bernoulli_model(2), ["a", "b"], np.zeros(30, int), {"rate": draws[:, :2]})
    assert found.leaders.tolist() == [1, 0, 2] and found.best_prob[2] == 0.0
    np.testing.assert_allclose(found.best_prob[:2], fresh.best_prob)
    np.testing.assert_allclose(found.loss[:2], fresh.loss, rtol=1e-6)
    assert found.loss[2] < 0  # it would earn more
    empty = {"played": np.zeros(1, int), "title": "t", "evidence": "e", "num_pending": 0, "oldest": ""}
    report = make_report(found, LossesAfter({}, np.nan), **empty)
    assert (report.leader, report.runner_up) == ("b", "a")
    assert (
        "It is the best of 2 arms with probability" in report.text and "Retired, and not compared: best." in report.text
    )
    alone = make_report(found._replace(is_open=np.array([False, True, False])), LossesAfter({}, np.nan), **empty)
    assert alone.runner_up is None and alone.text.startswith("b leads")


@pytest.mark.slow
def test_a_report_is_that_of_a_bandit_without_the_retired_arms():
    made, fresh = bernoulli_bandit(3, arms=["a", "b", "best"]), bernoulli_bandit(2, arms=["a", "b"])
    rows = {"a": [1] * 3 + [0] * 7, "b": [1] * 5 + [0] * 5, "best": [1] * 9 + [0]}
    for bandit in (made, fresh):
        for arm in bandit.arms:
            bandit.update_many(arms=[arm] * 10, rewards=rows[arm])
    assert made.report(more=(100,)).leader == "best"
    made.retire_arm("best")
    report, expected = made.report(more=(100,)), fresh.report(more=(100,))
    assert (report.leader, report.runner_up) == ("b", "a")
    assert (
        "It is the best of 2 arms with probability" in report.text and "Retired, and not compared: best." in report.text
    )
    assert report.best_prob == pytest.approx(expected.best_prob, abs=1e-3)
    assert report.loss == pytest.approx(expected.loss, rel=0.02)  # the error of the moments is 1%
    assert report.loss_after[100] == pytest.approx(expected.loss_after[100], abs=0.1 * report.loss)  # 4,000 draws
    table = made.summary().set_index("arm")
    assert table.best_arm_prob["best"] == 0.0 and table.expected_loss["best"] < 0  # it would earn more
    made.retire_arm("a")
    assert made.report().runner_up is None and made.report().text.startswith("b leads")


@pytest.mark.parametrize(
    ("loss", "after", "equally", "said"),
    [
        (0.02, {100: 0.015, 1000: 0.005}, 0.001, "so 1,000 more are worth up to 0.015 for each decision after them."),
        (0.02, {100: 0.0199}, 0.0199, "so 100 more are worth almost nothing."),
        (0.02, {100: 0.0199}, 0.003, "Shared equally by all arms, 100 more would leave 0.003."),
        (1e-5, {100: 1e-6}, 0.0, "less than 0.01% of its expected reward, so more decisions are worth almost nothing."),
        (0.02, {}, np.nan, "on average over the posterior."),
    ],
)
def test_a_report_says_what_continuing_is_worth(loss, after, equally, said):
    numbers = {
        "mean": [0.5, 0.4],
        "is_median": [False] * 2,
        "low": [0.4, 0.3],
        "high": [0.6, 0.5],
        "best_prob": [0.9, 0.1],
    }
    arrays = {name: np.array(values) for name, values in numbers.items()}
    found = Overview(
        ["a", "b"], np.array([1500, 0]), **arrays, loss=np.array([loss, 0.1]), draws=np.zeros((4, 2)), num_contexts=0
    )
    report = make_report(
        found, LossesAfter(after, equally), played=np.zeros(1, int), title="", evidence="x", num_pending=0, oldest=""
    )
    lines = str(report).splitlines()
    assert lines[0].startswith("a leads after 1,500 rewards") and lines[2].endswith(said)
