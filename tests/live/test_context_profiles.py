"""The expected reward along each entry of the context, against the program's own formula."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit
from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.live.show.context_profiles import context_profiles, plot_profiles

NUM_DRAWS = 300


def spending(arm, context):
    """Arm 1 gains with age; the other entry counts for both arms alike; the third never changes."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]))
    mean = slope[arm] * context["age"] + 2.0 * context["member"] + context["fixed"]
    numpyro.sample("reward", dist.Normal(mean, 1.0))


@pytest.fixture(scope="module")
def bandit():
    made = Bandit(spending, 2, context={"age": 0.0, "fixed": 1.0, "member": 0}, num_samples=NUM_DRAWS)
    rng = np.random.default_rng(0)
    arm, age, member = rng.integers(2, size=120), rng.normal(size=120), rng.integers(2, size=120)
    rewards = np.where(arm == 1, age, 0.0) + 2.0 * member + 1.0 + rng.normal(size=120)
    made.update_many(arms=arm.tolist(), rewards=rewards, contexts={"age": age, "fixed": np.ones(120), "member": member})
    return made


def test_a_profile_is_the_programs_formula_averaged_over_the_other_entries(bandit):
    contexts = {"age": np.array([-1.0, 0.0, 1.0]), "fixed": np.ones(3), "member": np.array([0, 1, 1])}
    draws = bandit.posterior(NUM_DRAWS)
    profiles = {profile.name: profile for profile in context_profiles(bandit.model, draws, contexts)}
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


def test_the_report_has_the_figure_and_the_entry_that_matters_comes_first(bandit, tmp_path):
    report = bandit.report(more=(100,))
    figure = report.plot_contexts("euro")
    assert [axis.get_xlabel() for axis in figure.axes if axis.axison] == ["age", "member"]
    assert figure.axes[0].get_ylabel() == "expected reward (euro)"
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == sorted(["0", "1"], key=lambda name: -report.lead_shares[int(name)])
    figure_tools().close(figure)
    assert report.to_html(tmp_path / "page.html").count("<figure>") == 2


def test_a_program_without_context_has_no_such_figure(warm_starts):
    def rates(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    bandit = Bandit(rates, 2, num_samples=50)
    assert bandit.report(more=(10,)).plot_contexts() is None
    assert plot_profiles([], None, "") is None


def test_long_columns_are_evenly_spaced_and_whole_numbers_stay_whole(bandit):
    rng = np.random.default_rng(1)
    contexts = {"age": rng.normal(size=200), "fixed": np.ones(200), "member": rng.integers(0, 1000, size=200)}
    age, member = context_profiles(bandit.model, bandit.posterior(50), contexts)
    np.testing.assert_allclose(np.diff(age.values), np.diff(age.values)[0])
    assert member.values.dtype.kind in "if" and (member.values == member.values.round()).all()
    assert age.mean.shape == (15, 2)
