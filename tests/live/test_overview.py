"""What people look at: summary, notebook table, figure and the account of a contextual bandit."""

import itertools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from ppl_bandit import Bandit
from ppl_bandit.live.show.figures import posterior_kind
from ppl_bandit.numerics.figure_style import styles
from ppl_bandit.types import Explanation

M = 4000


def clicks(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def slopes(arm, context):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Normal(slope[arm] * context, 1.0))


@pytest.fixture(scope="module")
def plain():
    bandit = Bandit(clicks, arms=["<old>", "new"], num_samples=M)
    bandit.update_many(arms=["<old>"] * 10 + ["new"] * 10, rewards=[1] * 3 + [0] * 7 + [1] * 6 + [0] * 4)
    return bandit


@pytest.fixture(scope="module")
def contextual():
    return Bandit(slopes, 2, context=jnp.asarray(1.0), num_samples=M)


def test_a_summary_agrees_with_the_closed_form(plain):
    frame = plain.summary().set_index("arm")
    posteriors = {"<old>": stats.beta(4, 8), "new": stats.beta(7, 5)}
    grid = (np.arange(20000) + 0.5) / 20000
    best = np.mean(posteriors["new"].pdf(grid) * posteriors["<old>"].cdf(grid))
    top = np.mean(1.0 - posteriors["new"].cdf(grid) * posteriors["<old>"].cdf(grid))  # E max of the two
    for name, law in posteriors.items():
        error = 4.0 * law.std() / np.sqrt(M)  # four standard errors of a mean of M draws
        assert frame.num_rewards[name] == 10
        assert frame.expected_reward[name] == pytest.approx(law.mean(), abs=error)
        # The difference of two draws has a standard deviation of at most the sum of theirs.
        assert frame.expected_loss[name] == pytest.approx(top - law.mean(), abs=2 * error)
        # A quantile of M draws: sqrt(q (1 - q) / M) / density there.
        for q, column in ((0.025, "low"), (0.975, "high")):
            at = law.ppf(q)
            assert frame[column][name] == pytest.approx(at, abs=4.0 * np.sqrt(q * (1 - q) / M) / law.pdf(at))
    assert frame.best_arm_prob["new"] == pytest.approx(best, abs=4.0 * np.sqrt(best * (1 - best) / M))
    assert frame.best_arm_prob.sum() == pytest.approx(1.0)


@pytest.mark.slow
def test_a_contextual_summary_averages_over_the_contexts_given(contextual):
    # Before any data, P(best) is one half in every context, and the mean of |x| over them scales the loss.
    frame = contextual.summary(np.array([1.0, -3.0]))
    np.testing.assert_allclose(frame.best_arm_prob, 0.5, atol=4.0 * 0.5 / np.sqrt(M))
    # E[max(d, 0)] for the difference d ~ N(0, 2 x^2) of two arms is |x| / sqrt(pi), with x averaged to 2.
    # At x = 1 and -3 the same draws win and lose: d (1 - 3) / 2 remains of the noise, with sd sqrt(2).
    np.testing.assert_allclose(frame.expected_loss, 2.0 / np.sqrt(np.pi), atol=4.0 * 2.0 * np.sqrt(2.0 / M))
    # The averaged reward is slope x mean(x) = -slope.
    np.testing.assert_allclose(frame.high, 1.96, atol=4.0 * np.sqrt(0.025 * 0.975 / M) / stats.norm.pdf(1.96))
    assert frame.attrs["num_contexts"] == 2


def test_contexts_of_another_shape_are_refused(contextual, plain):
    with pytest.raises(ValueError, match=r"contexts has shape \(2, 3\), expected \(2,\)"):
        contextual.summary(np.ones((2, 3)))
    with pytest.raises(ValueError, match="leading axis with one row per context"):
        contextual.summary(1.0)
    with pytest.raises(ValueError, match="the program takes arm alone"):
        plain.summary(np.ones(2))


@pytest.mark.slow
def test_the_account_of_a_contextual_bandit_shows_where_its_arms_stand(contextual):
    assert "P(best) are at the example context" in contextual.explain()
    assert "at one context" in contextual._repr_html_()
    other = Bandit(contextual.model, num_samples=M)
    other.update_many(arms=[0, 1] * 150, rewards=np.tile([1.0, -1.0], 150), contexts=np.ones(300))
    text = other.explain()
    assert "averaged over the contexts of 200 of these rewards" in text
    assert text.splitlines()[-2].split()[1] == "150" and text.splitlines()[-2].endswith("1.000")


def test_the_notebook_table_names_arms_counts_and_verdict_and_escapes_names(plain):
    html = plain._repr_html_()
    assert "&lt;old&gt;" in html and "<old>" not in html
    assert (
        "EXACT" in html and "20 rewards learnt, 0 decisions pending" in html and "Proved conjugate: rate Beta" in html
    )
    plain.select()
    assert "1 decisions pending" in plain._repr_html_()


def test_the_figure_shows_both_panels_with_units_and_what_was_run(plain, tmp_path):
    figure = plain.plot(unit="clicks a visit")
    left, right = figure.axes
    assert left.get_xlabel() == "expected reward (clicks a visit)" and right.get_ylabel() == "share"
    assert "20 rewards, exact posterior" in figure.get_suptitle() and "double_sampling(" in figure.get_supxlabel()
    areas = [np.trapezoid(line.get_ydata(), line.get_xdata()) for line in left.lines]
    np.testing.assert_allclose(areas, 1.0, atol=0.02)  # folding keeps all mass inside; what is left is the grid's error
    np.testing.assert_allclose([line.get_ydata()[-1] for line in right.lines], 0.5)
    figure.savefig(tmp_path / "bandit.png")


def test_a_figure_says_what_its_posterior_is_however_the_engine_was_chosen():
    given = "exact given noise, spread: mean integrated out, noise, spread represented by 1000 particles"
    for engine, is_exact, reason, words in (
        ("conjugate", True, "conjugate", "exact"),
        ("collapsed", False, given, "exact given noise, spread"),
        ("collapsed", False, f"f is not conjugate: x; so {given}", "exact given noise, spread"),
        ("reweight", False, "f is not conjugate: x; so draws", "approximate (reweight)"),
    ):
        assert posterior_kind(Explanation(engine, is_exact, reason, {}, "")) == words


def test_the_lines_of_a_dozen_arms_are_told_apart():
    assert len(set(itertools.islice(styles(), 49))) == 49
