"""Simulated designs have the operating characteristics of independent calculations."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_engine, bernoulli_model
from trial_settings import (
    LOSS_BOUND,
    adaptr_design,
    normal_arms,
    prior_design,
    similar_arms,
)

from ppl_bandit import (
    Design,
    Environment,
    RewardModel,
    calibrate,
    operating_characteristics,
    rows_for_power,
    selectors,
    stopping,
)
from ppl_bandit.trials.calibrate import _quantile_of_peaks
from ppl_bandit.trials.looks import ENDINGS


@pytest.fixture(scope="module")
def model():
    return bernoulli_model(3)


@pytest.fixture(scope="module")
def adaptr(model):
    settings = {"num_trials": 600, "seed": 3, "engine": bernoulli_engine(3)}
    return operating_characteristics(model, adaptr_design(), {"null": 0.75}, **settings)


def test_the_readme_design_of_adaptr_ends_as_in_an_independent_replica(adaptr):
    row = adaptr.table().loc["null"]
    # An exact replica in NumPy: .0568 +- .0026, .377 and 1,747. The first error is that of about 8,000 trials, from which the
    # errors of the other two are inferred. Three joint standard errors.
    for name, expected, error in (
        ("superiority", 0.0568, 0.0026),
        ("equivalence", 0.377, 0.0054),
        ("mean_rows", 1747, 4.6),
    ):
        assert abs(row[name] - expected) <= 3 * np.hypot(row[f"{name}_se"], error)
    assert row.type_i_error == row.superiority == row.familywise_error
    np.testing.assert_allclose(row[["superiority", "equivalence", "futility", "undecided"]].sum(), 1.0)


def test_every_figure_has_a_standard_error_and_trials_are_consistent(adaptr):
    table, found = adaptr.table(), adaptr.dataset
    names = [name for name in table if not name.endswith("_se")]
    assert sorted(table) == sorted([*names, *(f"{name}_se" for name in names)])
    rows = found.rows_at_look.values[found.look.values]
    np.testing.assert_allclose(found.counts.sum("arm"), rows)
    # Outcomes of the last 100 decisions have arrived in the end.
    np.testing.assert_allclose(found.outcomes.sum("arm"), rows)
    first = found.counts_by_look.isel(at_look=0).mean("trial")
    assert np.all(np.abs(first - 400 / 3) < 4 * np.sqrt(400 * 2 / 9 / 600))  # equal shares before the first look
    assert set(np.unique(found.ending)) <= {ENDINGS.index(name) for name in ("superiority", "equivalence", "undecided")}
    # The selected arm looks better than it is; the sequence of `evaluate` covers all the same.
    row = table.loc["null"]
    assert row.bias > 3 * row.bias_se
    assert row.sequence_coverage >= 0.95
    chosen = [
        np.take_along_axis(found[name].values, found.arm.values[..., None], 2)[0, :, 0]
        for name in ("sums", "outcomes", "truth")
    ]
    errors = chosen[0] / chosen[1] - chosen[2]  # of the estimate of that sequence, the mean of the outcomes
    np.testing.assert_allclose([row.sequence_bias, row.sequence_rmse], [errors.mean(), np.sqrt(np.mean(errors**2))])


@pytest.mark.slow
def test_decisions_of_a_burn_in_are_shared_equally_and_later_ones_by_the_selector(model):
    design = Design([12], selector=selectors.fixed([0.8, 0.1, 0.1]), burn_in=6, stopping=stopping.superiority(0.99))
    found = operating_characteristics(model, design, {"null": 0.5}, num_trials=400).dataset
    # 6 / 3 + 6 x 0.8 decisions for the first arm; the standard deviation of their number is sqrt(6 x 2 / 9 + 6 x 0.16).
    assert abs(float(found.counts[0, :, 0].mean()) - 6.8) < 4 * np.sqrt((12 / 9 + 0.96) / 400)


@pytest.mark.slow
def test_a_control_that_is_left_alone_is_no_superior_arm(model):
    design = Design([300], control=0, stopping=[stopping.superiority(0.99), stopping.inferiority(0.2)])
    found = operating_characteristics(
        model, design, {"worse": [0.6, 0.2, 0.2], "better": [0.2, 0.6, 0.1]}, num_trials=64
    )
    table = found.table()
    # 100 rows an arm at a difference of .4, which is six standard errors: the worse arms are dropped, the better one wins.
    assert table.control_kept.tolist() == [1.0, 0.0] and table.superiority.tolist() == [0.0, 1.0]
    assert table.power.tolist() == [0.0, 1.0]


def test_a_figure_shows_status_sizes_allocation_and_errors(adaptr):
    figure = adaptr.plot()
    assert [axis.get_title() for axis in figure.axes] == [
        "status at each look",
        "sample size",
        "allocation",
        "error of the estimates",
    ]
    with pytest.raises(ValueError, match="scenario is 'x', expected one of"):
        adaptr.plot("x")


BAD = [
    (lambda model: {"null": {"p": 1}}, {}, "expected \\['rate'\\]"),
    (lambda model: {"null": "x"}, {}, "scenario 'null' is 'x', expected a truth"),
    (lambda model: {}, {}, "scenarios is empty"),
    (lambda model: {"null": 0.5}, {"control": 7}, "control is 7, which is no arm"),
    (lambda model: {"null": 0.5}, {"control": "old"}, "control is 'old', which is no arm; the arms are \\[0, 1, 2\\]"),
    (
        lambda model: {"null": 0.5},
        {"stopping": stopping.equivalence(0.9, delta=5.0)},
        "give it in the unit of the expected",
    ),
    (
        lambda model: {"null": 0.5},
        {"stopping": stopping.expected_loss(2.0)},
        "expected_loss: below is 2, but arms differ by at most",
    ),
]


@pytest.mark.parametrize("scenarios, settings, message", BAD)
def test_a_design_that_does_not_fit_the_model_is_refused_in_words(model, scenarios, settings, message):
    with pytest.raises(ValueError, match=message):
        operating_characteristics(model, Design([10, 20], **settings), scenarios(model), num_trials=10)


def drifting(arm, *, previous=None):
    with numpyro.plate("arms", 3):
        level = numpyro.sample("level", dist.Normal(0.0 if previous is None else previous["level"], 1.0))
    numpyro.sample("reward", dist.Normal(level[arm], 1.0))


RATES = np.array([0.1, 0.2, 0.3])
OTHER_WORLDS = {
    "changes during the trial": [
        lambda model: Environment(model, {"rate": RATES}, changes={2: {"rate": RATES[::-1]}}),
        lambda model: Environment.from_path(model, {"rate": np.tile(RATES, (5, 1))}),
        lambda model: Environment(RewardModel(drifting, 3), {"level": RATES}),
    ],
    "has 2 arms and reward_model 3": [lambda model: Environment(bernoulli_model(2), {"rate": RATES[:2]})],
}


@pytest.mark.parametrize(
    "message, world", [(message, world) for message, worlds in OTHER_WORLDS.items() for world in worlds]
)
def test_a_world_that_moves_or_has_other_arms_is_refused_in_words(model, message, world):
    design = Design([10, 20], stopping=stopping.superiority(0.9))
    for simulate in (operating_characteristics, calibrate):
        with pytest.raises(ValueError, match=f"scenario 'odd' {message}"):
            simulate(model, design, {"odd": world(model)}, num_trials=10)


def test_a_program_without_a_reward_model_is_refused_in_words(model):
    design = Design([10, 20], stopping=stopping.superiority(0.9))
    for simulate in (operating_characteristics, calibrate):
        with pytest.raises(ValueError, match="wrap a program as RewardModel"):
            simulate(lambda arm: None, design, 0.5)
        with pytest.raises(ValueError, match="design must be a Design, got \\[10, 20\\]"):
            simulate(model, [10, 20], 0.5)


@pytest.mark.slow
def test_the_rows_for_a_power_are_those_of_the_normal_law():
    # Two means with known unit variance, one look at P > .975: power = Phi(gap sqrt(rows) / 2 - 1.96).
    expected = ((1.959964 + 0.841621) * 2 / 0.4) ** 2  # 196 rows
    design = Design([50], stopping=stopping.superiority(0.975))
    found, tried = rows_for_power(normal_arms(2), design, [0.0, 0.4], num_trials=4000)
    assert tried[found.last_rows][0] >= 0.8 > tried[max(rows for rows in tried if rows < found.last_rows)][0]
    # Three errors of a power, .0063, by its slope in log rows, .39; and the tolerance of 5%.
    assert abs(np.log(found.last_rows / expected)) <= 3 * 0.0063 / 0.39 + 0.05


def test_rows_for_a_power_are_refused_where_there_are_none(model):
    design = Design([10, 20], stopping=stopping.superiority(0.9))
    with pytest.raises(ValueError, match="needs a design with a superiority rule"):
        rows_for_power(model, Design([10]), 0.5)
    with pytest.raises(ValueError, match="power must lie strictly inside"):
        rows_for_power(model, design, 0.5, power=1.0)


def test_calibrate_refuses_what_it_cannot_calibrate(model):
    design = Design([10, 20], stopping=stopping.superiority(0.9))
    with pytest.raises(ValueError, match="has no such rule"):
        calibrate(model, Design([10]), 0.5)
    with pytest.raises(ValueError, match="expected one common value"):
        calibrate(model, design, {"rate": np.array([0.1, 0.2, 0.3])})
    with pytest.raises(ValueError, match="not worlds from the prior"):
        calibrate(model, design, {"a": Environment.from_prior(model)})
    with pytest.raises(ValueError, match="type_i_error must be a probability"):
        calibrate(model, design, 0.5, type_i_error=5)


def test_a_threshold_between_equal_probabilities_stops_at_most_as_many_trials_as_allowed():
    peaks = np.repeat([0.8, 0.95, 0.97], [850, 120, 30]) + 1e-13 * np.arange(1000) % 3  # equal up to rounding
    assert 0.95 < _quantile_of_peaks(peaks, 0.1) < 0.97  # .95 would stop 15%
    assert 0.8 < _quantile_of_peaks(peaks, 0.15) < 0.95
    with pytest.raises(ValueError, match="no threshold has a type I error of 0.02"):
        _quantile_of_peaks(peaks, 0.02)


@pytest.mark.slow
def test_the_type_i_error_of_the_trials_that_calibrate_is_the_target(model):
    # A winner replaces the control, and the trial goes on: its path depends on the threshold after the first winner only.
    rules = stopping.superiority(0.9), stopping.inferiority(0.02), stopping.futility(0.95, 0.05)
    design = Design([30, 60, 90], control=0, lag=5, stopping=rules)
    found = calibrate(model, design, 0.5, type_i_error=0.1, num_trials=500, engine=bernoulli_engine(3))
    again = operating_characteristics(model, found, {"null": 0.5}, num_trials=500, engine=bernoulli_engine(3))
    assert again.table().type_i_error["null"] == 0.1
    fresh = operating_characteristics(model, found, {"null": 0.5}, num_trials=500, seed=1, engine=bernoulli_engine(3))
    # Judged on other trials than those that calibrate: within 4 standard errors of a further set.
    difference = found.calibration["type_i_error"] - fresh.table().type_i_error["null"]
    assert abs(difference) < 4 * (2 * 0.1 * 0.9 / 500) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("num_looks, expected", [(1, 0.05), (2, 0.0831), (5, 0.1417), (20, 0.2479)])
def test_looking_more_often_inflates_the_type_i_error_as_theory_says(num_looks, expected):
    design = Design(np.arange(1, num_looks + 1) * 400, stopping=stopping.superiority(0.975))
    row = operating_characteristics(normal_arms(2), design, {"null": 0.0}, num_trials=20_000).table().loc["null"]
    assert abs(row.superiority - expected) <= 3 * row.superiority_se


@pytest.mark.slow
def test_a_calibrated_threshold_has_its_error_on_fresh_seeds():
    design = Design(np.arange(1, 6) * 400, stopping=stopping.superiority(0.975))
    found = calibrate(normal_arms(2), design, 0.0, num_trials=20_000)
    own = found.calibration
    # The quantile and the fresh trials each have an error: sqrt(2).
    assert abs(own["type_i_error"] - 0.05) <= 3 * np.sqrt(2) * own["type_i_error_se"]
    assert (
        abs(own["threshold"] - 0.99209) <= 3 * 0.0003
    )  # the error of a quantile: .0015 / 5, by the slope of the error there
    assert "was calibrated to a type I error of 0.05 under null 0" in found.describe()


@pytest.mark.parametrize(
    "name, looks, num_trials",
    [
        pytest.param("two rules", [50, 150, 400], 4000, marks=pytest.mark.slow),
        pytest.param("without a control", range(50, 501, 50), 20_000, marks=pytest.mark.slow),
        pytest.param("with a control", range(50, 501, 50), 20_000, marks=pytest.mark.slow),
    ],
)
def test_in_worlds_from_the_prior_claims_are_true_as_often_as_the_posterior_says(name, looks, num_trials):
    settings = {"num_trials": num_trials, "arms": ["old", "new"], "engine": bernoulli_engine(2)}
    found = operating_characteristics(bernoulli_model(2), prior_design(name, looks), "prior", **settings)
    assert {"selected_old", "share_new"} <= set(found.table())
    own, design = found.dataset.isel(scenario=0), prior_design(name, looks)
    truth, selected = own.truth.values, own["arm"].values
    each = np.arange(selected.size)
    best, chosen = truth.max(axis=1), truth[each, selected]
    claims = {  # of a rule: what it says of the selected arm, true or not, and its posterior probability or mean
        "expected_loss": (best - chosen, own.evidence.values[:, -1]),
        "superiority": (chosen == best, own.best_arm_probs.values[each, selected]),
    }
    if design.control is not None:  # two arms: the other one has beaten the control
        place = [rule.name for rule in design.rules].index("superiority")
        claims = {"superiority": (truth[:, 1] > truth[:, 0], own.evidence.values[:, place])}
    for rule, (claim, said) in claims.items():
        if rule == "expected_loss" and design.rules[-1].name != rule:
            continue
        stopped = own.ending.values == own.attrs["endings"].index(rule)
        gap = (claim - said)[stopped]
        # Each is a claim less its probability, with mean 0.
        assert gap.size > 30 and abs(gap.mean()) <= 3 * gap.std() / np.sqrt(gap.size)
        assert rule != "expected_loss" or said[stopped].mean() <= LOSS_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 20, (0.5, 0.3, 0.2)], ids=str)
def test_a_selector_that_decides_each_time_learns_late_outcomes(model, lag):
    design = Design(
        [40, 80], selector=selectors.thompson(), lag=lag, burn_in=10, stopping=stopping.superiority(0.99), max_rows=80
    )
    found = operating_characteristics(model, design, {"truth": [0.2, 0.5, 0.8]}, num_trials=64).dataset
    rows = found.rows_at_look.values[found.look.values]
    np.testing.assert_allclose(found.counts.sum("arm"), rows)
    np.testing.assert_allclose(found.outcomes.sum("arm"), rows)
    assert float((found.counts / found.counts.sum("arm")).mean("trial")[0, 2]) > 0.5


@pytest.mark.slow
def test_a_partly_conjugate_program_has_operating_characteristics_too():
    design = Design([30, 60], stopping=stopping.superiority(0.9))
    truth = {"spread": 1.0, "mean": np.array([0.0, 0.0, 2.0])}
    found = operating_characteristics(similar_arms(3), design, {"truth": truth}, num_trials=16)
    assert found.method.startswith("collapsed, row by row")
    assert found.table().loc["truth", "power"] > 0.8  # two standard deviations of one row apart, 10 rows per arm
