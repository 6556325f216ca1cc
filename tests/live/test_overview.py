"""What people look at: summary, notebook table, figure and the account of a contextual bandit."""

import itertools
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from shared_models import bernoulli_bandit, prior_engine

from ppl_bandit import Bandit, RewardModel
from ppl_bandit.commands.demo import DemoResult, draw_demo
from ppl_bandit.comparison.latent_figures import leading_arms
from ppl_bandit.display.figure_style import figure_tools, styles
from ppl_bandit.live.lookahead import LossesAfter
from ppl_bandit.live.overview import Overview, arm_overview, slot_note
from ppl_bandit.live.rendering import arms_text, plot_bandit, posterior_kind
from ppl_bandit.live.report import make_report
from ppl_bandit.numerics.tail_excess import losses_from_table
from ppl_bandit.simulation.figures import draw_by_arm, draw_tuned
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.figures import draw_characteristics
from ppl_bandit.trials.stopping import superiority
from ppl_bandit.types import Explanation

M = 4000


def slopes(arm, context):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Normal(slope[arm] * context, 1.0))


@pytest.fixture(scope="module")
def plain():
    bandit = bernoulli_bandit(2, arms=["<old>", "new"])
    bandit.update_many(arms=["<old>"] * 10 + ["new"] * 10, rewards=[1] * 3 + [0] * 7 + [1] * 6 + [0] * 4)
    return bandit


@pytest.fixture(scope="module")
def contextual():
    return Bandit(slopes, 2, context=jnp.asarray(1.0), num_samples=M)


def test_a_summary_is_the_closed_form(plain):
    table = plain.summary()
    frame = table.set_index("arm")
    posteriors = {"<old>": stats.beta(4, 8), "new": stats.beta(7, 5)}
    grid = (np.arange(20000) + 0.5) / 20000
    best = np.mean(posteriors["new"].pdf(grid) * posteriors["<old>"].cdf(grid))
    top = np.mean(1.0 - posteriors["new"].cdf(grid) * posteriors["<old>"].cdf(grid))  # E max of the two
    for name, law in posteriors.items():
        assert frame.num_rewards[name] == 10
        assert frame.expected_reward[name] == pytest.approx(law.mean(), abs=1e-6)
        assert frame.low[name] == pytest.approx(law.ppf(0.025), abs=1e-5)
        assert frame.high[name] == pytest.approx(law.ppf(0.975), abs=1e-5)
        assert frame.expected_loss[name] == pytest.approx(top - law.mean(), rel=0.01)  # the error of `best_arm_moments`
    assert frame.best_arm_prob["new"] == pytest.approx(best, abs=1e-4)  # the error of the quadrature
    assert frame.best_arm_prob.sum() == pytest.approx(1.0)
    assert table.attrs["source"] == "numbers in closed form"


def test_a_printed_summary_shows_every_column_in_80_columns(plain):
    import pandas

    with pandas.option_context("display.width", 80, "display.max_columns", 0):
        lines = str(plain.summary()).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    assert lines[0].split() == ["num_", "expected_", "best_arm_", "expected_"]
    assert lines[1].split() == ["arm", "rewards", "reward", "low", "high", "prob", "loss"]


def test_the_lead_of_independent_arms_is_that_of_their_difference(plain):
    found = plain._overview()
    mean, low, high = found.lead(1, 0)
    rng = np.random.default_rng(0)
    gaps = rng.beta(7, 5, 400_000) - rng.beta(4, 8, 400_000)
    assert mean == pytest.approx(7 / 12 - 4 / 12, abs=1e-6)
    # Four standard errors of a quantile of 400,000 draws, where the density is about .3: 4 sqrt(.025 .975 / 400,000) / .3.
    np.testing.assert_allclose([low, high], np.quantile(gaps, [0.025, 0.975]), atol=3.3e-3)


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


def test_a_contextual_overview_tells_what_choosing_by_context_is_worth():
    """Arm a earns x slope_a at context x: the leader changes with the sign of x. Exact figures are those of the normal law."""
    rng = np.random.default_rng(0)
    slope = np.array([1.0, 0.4]) + np.array([0.1, 0.2]) * rng.normal(size=(M, 2))
    model = RewardModel(slopes, 2, context=jnp.asarray(1.0))
    contexts = np.array([-1.0, -1.0, 2.0, 1.0, 3.0])
    found = arm_overview(model, ["a", "b"], np.zeros(1, int), {"slope": slope}, contexts)
    assert found.by_context.lead_shares.tolist() == [0.6, 0.4]
    # a earns .8 slope_a alone; by context (6 slope_a - 2 slope_b) / 5: .4 (slope_a - slope_b) more.
    gain, error = 0.4 * 0.6, 0.4 * np.hypot(0.1, 0.2)
    assert found.by_context.gain == pytest.approx(gain, abs=4 * error / np.sqrt(M))
    # The standard error of a .025 quantile of M draws is error * sqrt(.025 * .975) / .0584 / sqrt(M).
    ends = gain - 1.96 * error, gain + 1.96 * error
    assert found.by_context.gain_interval == pytest.approx(ends, abs=4 * error * 2.7 / np.sqrt(M))
    prob = stats.norm.cdf(0.6 / np.hypot(0.1, 0.2))
    assert found.by_context.single_best_prob[0] == pytest.approx(prob, abs=4 * 0.05 / np.sqrt(M))
    report = make_report(
        found, LossesAfter({}, np.nan), played=np.zeros(1, int), title="t", evidence="e", num_pending=0, oldest=""
    )
    lines = str(report).splitlines()
    assert lines[0].startswith("a is the best single arm after 1 reward") and "averaged over 5 contexts" in lines[0]
    assert lines[1].startswith("It is the best single one of 2 arms with probability")
    assert lines[2].startswith(
        "Share of the 5 contexts in which each arm leads: a 60%, b 40%. Choosing the leader of each"
    )
    assert report.lead_shares == {"a": 0.6, "b": 0.4} and report.to_dict()["gain"] == report.gain
    same = arm_overview(model, ["a", "b"], np.zeros(1, int), {"slope": slope}, np.array([1.0, 2.0]))
    again = make_report(
        same, LossesAfter({}, np.nan), played=np.zeros(1, int), title="t", evidence="e", num_pending=0, oldest=""
    )
    assert again.gain == 0.0 and "It leads in each of the 2 contexts" in str(again)


def test_contexts_of_another_shape_are_refused(plain):
    contextual = Bandit(slopes, 2, context=jnp.asarray(1.0), engine=prior_engine)
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
    row = next(line for line in text.splitlines() if line.startswith("    0 ")).split()
    assert row[1] == "150" and row[-2] == "1.000"


def test_the_notebook_table_names_arms_counts_and_verdict_and_escapes_names(plain):
    html = plain._repr_html_()
    assert "&lt;old&gt;" in html and "<old>" not in html
    assert (
        "EXACT" in html and "20 rewards learnt, 0 decisions pending" in html and "Proved conjugate: rate Beta" in html
    )
    plain.select()
    assert "1 decisions pending" in plain._repr_html_()


def test_the_figure_shows_the_exact_density_and_the_share_of_plays(plain, tmp_path):
    figure = plain.plot(unit="clicks a visit")
    left, right = figure.axes
    assert left.get_xlabel() == "expected reward (clicks a visit)" and right.get_ylabel() == "share of plays"
    assert "20 rewards, exact posterior" in figure.get_suptitle()
    assert figure.get_supxlabel() == "numbers in closed form; decisions by double_sampling"
    for line, law in zip(left.lines, (stats.beta(4, 8), stats.beta(7, 5)), strict=True):
        x, height = line.get_data()
        assert height[0] == height[-1] == 0.0
        inner = slice(2, -2)
        np.testing.assert_allclose(height[inner], law.pdf(x[inner]), atol=0.01 * law.pdf(x[inner]).max())
    np.testing.assert_allclose([line.get_ydata()[-1] for line in right.lines], 0.5)
    figure.savefig(tmp_path / "bandit.png")


def made_up(num_arms, seed=0):
    """An overview of many arms, from made-up draws."""
    rng = np.random.default_rng(seed)
    draws = rng.normal(rng.normal(size=num_arms), 0.3, (400, num_arms))
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    best = np.bincount(draws.argmax(axis=1), minlength=num_arms) / len(draws)
    none = np.zeros(num_arms, bool)
    names = [f"arm {index}" for index in range(num_arms)]
    counts = np.full(num_arms, 10)
    return Overview(names, counts, draws.mean(axis=0), none, low, high, best, losses_from_table(draws), draws, 0)


def test_nothing_is_black_in_a_style_with_a_black_background():
    with figure_tools().style.context("dark_background"):
        colours = {colour for (colour, _), _ in zip(styles(), range(7), strict=False)}
        for num_arms in (6, 20):
            for axis in plot_bandit(made_up(num_arms), np.arange(num_arms), "title", "caption").axes:
                colours |= {line.get_color() for line in axis.lines}
    assert "white" in colours and not {"black", "k", "#000000"} & colours


@pytest.mark.parametrize(("num_arms", "num_rows"), [(1, 0), (6, 0), (7, 7), (16, 16), (34, 16), (1000, 16)])
def test_figures_and_tables_of_many_arms_show_the_leaders_and_the_number_of_others(num_arms, num_rows, tmp_path):
    found = made_up(num_arms)
    figure = plot_bandit(found, np.arange(num_arms), "title", "caption")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "axes sizes collapsed to zero"
        figure.savefig(tmp_path / "arms.png", dpi=50)
    left = figure.axes[0]
    if num_rows:
        names = [label.get_text() for label in left.get_yticklabels()]
        assert len(names) == num_rows and names[0] == f"arm {found.mean.argmax()}"
        assert (names[-1] == f"{num_arms - 15} others") == (num_arms > 16)
    else:
        assert len(left.lines) == num_arms
    lines = arms_text(found)
    assert len(lines) == 1 + (num_arms if num_arms <= 20 else 16) and max(map(len, lines)) <= 80


def test_a_figure_says_what_its_posterior_is_however_the_engine_was_chosen():
    given = "exact given noise, spread: mean integrated out, noise, spread represented by 1000 particles"
    for engine, is_exact, reason, words in (
        ("conjugate", True, "conjugate", "exact"),
        ("collapsed", False, given, "exact given noise, spread"),
        ("collapsed", False, f"f is not conjugate: x; so {given}", "exact given noise, spread"),
        ("reweight", False, "f is not conjugate: x; so draws", "approximate (reweight)"),
    ):
        assert posterior_kind(Explanation(engine, is_exact, reason, {}, "")) == words


def test_an_explanation_starts_with_the_verdict_and_the_arms_and_ends_with_the_certificate(plain):
    lines = plain.explain().splitlines()
    assert lines[0].startswith("conversion: EXACT") and "learnt from 20 rewards" in lines[2]
    assert lines[4].split()[:2] == ["<old>", "10"]
    assert lines[-2].startswith("  checked: the closed form is proved") and "nats" not in plain.explain()
    assert "nats" in plain.explain(details=True) and "real-analytic" in plain.explain(details=True)


def test_a_bandit_prints_what_it_is(plain):
    assert (
        repr(plain)
        == "<Bandit on conversion: 20 rewards, exact posterior; 2 arms (<old>, new); decisions by double_sampling>"
    )


def test_the_lines_of_a_dozen_arms_are_told_apart():
    assert len(set(itertools.islice(styles(), 49))) == 49


def test_places_of_a_list_of_candidates_are_noticed():
    candidates = SimpleNamespace(context=np.zeros((20, 8)), num_arms=20, latent_shapes={"weights": (8,)})
    assert "places in a list of candidates" in slot_note(candidates)
    for context, shapes in ((np.zeros((20, 8)), {"weights": (20, 8)}), (np.zeros(8), {"weights": (8,)}), (None, {})):
        assert slot_note(SimpleNamespace(context=context, num_arms=20, latent_shapes=shapes)) == ""


def test_comparisons_and_simulations_of_many_arms_draw_the_leading_ones():
    found = made_up(34)
    shown, note = leading_arms(SimpleNamespace(overviews={"reference": found}))
    assert list(shown) == list(found.leaders[:15]) and note == " (the 15 of 34 arms with the largest means)"
    assert leading_arms(SimpleNamespace(overviews={"reference": made_up(16)}))[1] == ""
    axes = figure_tools().figure().subplots(1, 2)
    shares = [np.full((5, 34), 0.5 / 33), np.full((5, 34), 0.5 / 33)]
    shares[0][:, 9] = shares[1][:, 20] = 0.5
    draw_by_arm(axes, shares, "share")
    drawn = [[(line.get_label(), line.get_color()) for line in axis.lines] for axis in axes]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 7  # the legend of one panel holds for the others
    assert {"28 others", "arm 9", "arm 20"} <= {label for label, _ in drawn[0]}
    for axis in axes:
        np.testing.assert_allclose(sum(line.get_ydata() for line in axis.lines), 1.0)


def test_the_figure_of_a_design_with_many_arms_draws_those_that_are_played_most():
    design, num, rng = Design((100, 200), stopping=superiority(0.99)), 30, np.random.default_rng(0)
    counts = np.cumsum(rng.multinomial(100, np.arange(1, 41) / 820, (num, 2)), axis=1)
    codes = {"ending": np.full(num, 1), "look": np.ones(num, int), "arm": np.zeros(num, int)}
    record = SimpleNamespace(counts_by_look=counts, mean=rng.normal(size=(num, 40)), truth=np.zeros((num, 40)), **codes)
    figure = draw_characteristics(design, {"null": record}, list(range(40)))
    legend = figure.axes[2].get_legend()
    assert legend.get_title().get_text() == "7 of 40 arms" and "arm 39" in [
        text.get_text() for text in legend.get_texts()
    ]
    figure_tools().close(figure)


def test_the_regret_of_candidates_is_on_a_linear_axis_unless_it_differs_much(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_tools(), "close", lambda figure: None)
    for ratio, scale in ((2.0, "linear"), (100.0, "log")):
        made = [
            SimpleNamespace(name=f"{m}", mean=m, error=0.1, high=2 * m, highest=3 * m) for m in (10.0, 10.0 * ratio)
        ]
        draw_tuned(SimpleNamespace(standings=made, name="10.0", horizon=10, num_worlds=5), tmp_path, "")
        assert figure_tools().gca().get_xscale() == scale
    monkeypatch.undo()
    figure_tools().close("all")


def test_the_demos_band_reaches_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_tools(), "close", lambda figure: None)
    is_best = np.random.default_rng(0).random((40, 300)) < np.linspace(0.3, 0.9, 300)
    draw_demo([DemoResult("f", "f: Beta", "Beta", {}, 3, is_best, "def f(arm): ...")], tmp_path / "demo.png", "note")
    (band,) = figure_tools().gcf().axes[1].collections
    ends = band.get_paths()[0].vertices[:, 0]
    assert (ends.min(), ends.max()) == (0, 300)
    monkeypatch.undo()
    figure_tools().close("all")


def test_a_summary_marks_retired_arms():
    bandit = bernoulli_bandit(arms=["a", "b", "c"])
    assert "is_retired" not in bandit.summary()
    bandit.retire_arm("b")
    assert bandit.summary().is_retired.tolist() == [False, True, False]
