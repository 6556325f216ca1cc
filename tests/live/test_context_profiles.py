"""The expected reward along each entry of the context, against the program's own formula."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, RewardModel
from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.live.show.overview import arm_overview
from ppl_bandit.live.show.reward_curves import context_profiles, plot_profiles

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
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == sorted(["0", "1"], key=lambda name: -report.lead_shares[int(name)])
    figure_tools().close(figure)
    assert report.to_html(tmp_path / "page.html").count("<figure>") == 2


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
