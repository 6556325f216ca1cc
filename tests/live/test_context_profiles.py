"""The expected reward along each entry of the context, against the program's own formula."""

from types import SimpleNamespace

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, RewardModel
from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.live.lookahead import LossesAfter
from ppl_bandit.live.overview import arm_overview, context_entries
from ppl_bandit.live.report import make_report
from ppl_bandit.live.reward_curves import context_profiles, plot_profiles

NUM_DRAWS = 300


def spending(arm, context):
    """Arm 1 gains with age; the other entry counts for both arms alike; the third never changes."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]))
    mean = slope[arm] * context["age"] + 2.0 * context["member"] + context["fixed"]
    numpyro.sample("reward", dist.Normal(mean, 1.0))


@pytest.fixture(scope="module")
def model():
    return RewardModel(spending, 2, {"age": 0.0, "fixed": 1.0, "member": 0})


@pytest.fixture(scope="module")
def draws():
    return {"slope": np.random.default_rng(2).normal([0.2, 1.0], 0.1, (NUM_DRAWS, 2))}


def test_a_profile_is_the_programs_formula_averaged_over_the_other_entries(model, draws):
    contexts = {"age": np.array([-1.0, 0.0, 1.0]), "fixed": np.ones(3), "member": np.array([0, 1, 1])}
    profiles = {profile.name: profile for profile in context_profiles(model, draws, contexts)}
    assert list(profiles) == ["age", "member"]  # what does not change has no profile
    slope = draws["slope"].mean(axis=0)
    age = profiles["age"]
    assert age.values.tolist() == [-1.0, 0.0, 1.0]
    np.testing.assert_allclose(age.mean, age.values[:, None] * slope + 2.0 * 2 / 3 + 1.0, rtol=1e-5)
    assert (age.low <= age.mean + 1e-9).all() and (
        age.mean <= age.high + 1e-9
    ).all()  # equal where the slope has no effect
    member = profiles["member"]
    assert member.values.tolist() == [0, 1]
    np.testing.assert_allclose(member.mean[1] - member.mean[0], 2.0, rtol=1e-5)


@pytest.mark.slow
def test_the_report_has_the_figure_and_the_entry_that_matters_comes_first(tmp_path):
    bandit = Bandit(spending, 2, context={"age": 0.0, "fixed": 1.0, "member": 0}, num_samples=NUM_DRAWS)
    rng = np.random.default_rng(0)
    arm, age, member = rng.integers(2, size=120), rng.normal(size=120), rng.integers(2, size=120)
    rewards = np.where(arm == 1, age, 0.0) + 2.0 * member + 1.0 + rng.normal(size=120)
    contexts = {"age": age, "fixed": np.ones(120), "member": member}
    bandit.update_many(arms=arm.tolist(), rewards=rewards, contexts=contexts)
    report = bandit.report(more=(100,))
    figure = report.plot_contexts("euro")
    assert [axis.get_xlabel() for axis in figure.axes if axis.axison] == ["age", "member"]
    assert figure.axes[0].get_ylabel() == "expected reward (euro)"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == sorted(["0", "1"], key=lambda name: -report.lead_shares[int(name)])
    figure_tools().close(figure)
    assert report.to_html(tmp_path / "page.html").count("<figure>") == 2


def by_device(arm, context):
    """Each arm has a mean for each device, none of them like another's."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(1))
    device = [context["device=desktop"], context["device=mobile"], context["device=tablet"]]
    numpyro.sample(
        "reward", dist.Normal(sum(flag * mean[arm, i] for i, flag in enumerate(device)) + context["age"], 1.0)
    )


@pytest.fixture(scope="module")
def devices():
    """Return a model, draws and contexts of which device and age are independent: arm 1 leads on tablets alone."""
    context = {"age": 0.0, "device=desktop": 0.0, "device=mobile": 0.0, "device=tablet": 0.0}
    draws = {
        "mean": np.array([[1.0, 2.0, 3.0], [0.5, 1.0, 5.0]])
        + np.random.default_rng(4).normal(0, 0.1, (NUM_DRAWS, 2, 3))
    }
    device = np.repeat(np.eye(3), [2, 2, 2], axis=0)
    flags = {name: device[:, i] for i, name in enumerate(list(context)[1:])}
    return RewardModel(by_device, 2, context), draws, flags | {"age": np.array([0.0, 10.0] * 3)}


def test_groups_have_one_panel_and_contexts_that_cannot_occur_are_not_asked_for(devices):
    profiles = {profile.name: profile for profile in context_profiles(*devices)}
    assert list(profiles) == ["age", "device"]
    assert profiles["device"].groups == ("desktop", "mobile", "tablet")
    expected = devices[1]["mean"].mean(axis=0).T + 5.0
    np.testing.assert_allclose(profiles["device"].mean, expected, rtol=1e-5)
    overview = arm_overview(devices[0], ["a", "b"], np.zeros(1, int), *devices[1:])
    figure = plot_profiles(list(profiles.values()), overview, "title")
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["desktop", "mobile", "tablet"]
    figure_tools().close(figure)


def test_flags_that_exclude_each_other_are_groups_and_others_are_not():
    model = SimpleNamespace(context={"kind": np.zeros(2), "new": 0.0, "old": 0.0, "paid": 0.0}, has_clock=False)
    contexts = {
        "kind": np.array([[1, 0], [0, 1], [0, 0], [1, 0]]),
        "new": np.array([1, 0, 0, 1]),
        "old": np.array([0, 1, 0, 0]),
        "paid": np.array([1, 1, 0, 0]),
    }
    found = {entry.name: entry for entry in context_entries(model, contexts)}
    assert list(found) == ["kind_0, kind_1", "new, old", "paid"]
    assert list(found["new, old"].groups) == ["new=1", "old=1", "none of new, old"] and not found["paid"].groups
    assert [name for name, _ in found["paid"].segments()] == ["paid=0", "paid=1"]


def test_the_leader_of_each_segment_is_that_of_the_programs_formula(devices, tmp_path):
    model, draws, contexts = devices
    overview = arm_overview(model, ["a", "b"], np.zeros(1, int), draws, contexts)
    segments = {segment.name: segment for segment in overview.by_context.segments}
    assert list(segments) == ["age=0", "age=10", "device=desktop", "device=mobile", "device=tablet"]
    assert [segment.leader for segment in segments.values()] == [1, 1, 0, 0, 1]  # b earns (.5 + 1 + 5) / 3 on average
    mobile, gaps = segments["device=mobile"], draws["mean"][:, 0, 1] - draws["mean"][:, 1, 1]
    assert (
        mobile.share == pytest.approx(1 / 3) and mobile.best_prob == 1.0 and mobile.lead == pytest.approx(gaps.mean())
    )
    assert mobile.lead_interval == pytest.approx(tuple(np.quantile(gaps, [0.025, 0.975])))
    empty = {"title": "t", "evidence": "e", "num_pending": 0, "oldest": ""}
    report = make_report(overview, LossesAfter({}, np.nan), played=np.zeros(1, int), **empty)
    (line,) = (line for line in report.text.splitlines() if line.startswith("Segments: "))
    assert line.startswith(
        "Segments: for device=mobile (33% of the contexts) a leads, 1.01 more than b (95% interval 0."
    )
    assert line.endswith("for age=0, age=10, device=tablet b leads.")
    assert report.to_dict()["segments"][3]["leader"] == "a"
    assert "<td" in report.to_html() and "device=mobile</td>" in report.to_html()


def test_a_number_is_split_at_its_median(model, draws):
    contexts = {"age": np.arange(20) - 12.34567, "fixed": np.ones(20), "member": np.zeros(20, int)}
    overview = arm_overview(model, ["a", "b"], np.zeros(1, int), draws, contexts)
    below, above = overview.by_context.segments
    assert (below.name, above.name) == ("age < -2.85", "age >= -2.85") and below.share == above.share == 0.5
    assert (below.leader, above.leader) == (0, 1)


def test_long_columns_are_evenly_spaced_and_whole_numbers_stay_whole(model, draws):
    rng = np.random.default_rng(1)
    contexts = {"age": rng.normal(size=200), "fixed": np.ones(200), "member": rng.integers(0, 1000, size=200)}
    age, member = context_profiles(model, draws, contexts)
    np.testing.assert_allclose(np.diff(age.values), np.diff(age.values)[0])
    assert member.values.dtype.kind in "if" and (member.values == member.values.round()).all()
    assert age.mean.shape == (15, 2)


def test_the_figure_has_a_panel_for_each_entry_and_the_one_that_matters_comes_first(model, draws):
    rng = np.random.default_rng(1)
    contexts = {"age": rng.normal(size=20), "fixed": np.ones(20), "member": rng.integers(0, 2, size=20)}
    overview = arm_overview(model, ["new", "old"], np.zeros(3, int), draws, contexts)
    figure = plot_profiles(context_profiles(model, draws, contexts), overview, "title", "euro")
    assert [axis.get_xlabel() for axis in figure.axes] == ["age", "member"]
    assert figure.axes[0].get_ylabel() == "expected reward (euro)"
    assert len(figure.axes[0].get_lines()) == 2  # one for each arm
    figure_tools().close(figure)
    assert plot_profiles([], overview, "title") is None
