"""The paper's evaluation, at sizes that a test can afford."""

import functools
import json
import re

import numpy as np
import pytest
import xarray

from ppl_bandit.commands.cli import main
from ppl_bandit.paper import parts as paper_parts, runs as paper, settings as paper_settings
from ppl_bandit.paper.parts import claims_of_grids
from ppl_bandit.paper.runs import GridRegret
from ppl_bandit.paper.settings import BAYES_UCB, LOWEST, PUBLISHED_REGRETS, SETTINGS, THOMPSON, paper_data
from ppl_bandit.simulation import chunks


def test_the_papers_figures_are_in_the_package():
    curves = paper_data("regret_curves")
    assert curves["bernoulli_TS"]["mean"][-1] == 4.4204 and len(curves["t"]) == len(curves["lingauss_DS"]["mean"])
    assert len(paper_data("bernoulli_kl")["points"]) == 969
    assert len(paper_data("linear_gaussian_kl")["points"]) == 360


def test_every_number_belongs_to_a_setting_that_a_figure_runs():
    run = {part for parts in paper_parts.FIGURE_PARTS.values() for part in parts}
    assert {number.setting for number in PUBLISHED_REGRETS} <= run
    assert run == {*SETTINGS, *paper_parts.GRIDS, *paper_parts.CLAIMS}
    assert set(paper_settings.QUICK.runs) == set(paper_settings.FULL.runs) == set(SETTINGS)


def test_the_divergence_is_the_papers():
    points = paper_data("bernoulli_kl")["points"]
    rates = np.array([point["theta"] for point in points])
    found = paper._bernoulli_divergence(rates[:, -2], rates[:, -1])
    np.testing.assert_allclose(found, [point["min_kl"] for point in points], atol=1e-6)


def test_parts_start_with_the_longest_and_those_without_realizations_are_left_out():
    figures = ["bernoulli-regret", "bernoulli-kl", "linear-kl"]
    parts, left_out = paper_parts.parts_of(figures, paper_settings.QUICK, seed=0, precision="float64")
    assert parts[0].name == "linear" and {part.name for part in parts[1:]} == {"A = 3", "bernoulli"}
    assert set(left_out) == {"Bernoulli, rates (.5, .55)", "Bernoulli grid of 2 arms"}
    assert parts[0].title == "linear Gaussian grid: 6 problems, 20 realizations"
    full, nothing = paper_parts.parts_of(figures, paper_settings.FULL, seed=0, precision="float64")
    assert len(full) == 5 and nothing == []


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(chunks, "num_cores", lambda: 1)  # one process, which sees the other changes
    short = {name: setting._replace(num_steps=40) for name, setting in SETTINGS.items()}
    monkeypatch.setattr(paper, "SETTINGS", short)
    monkeypatch.setattr(paper_settings, "SETTINGS", short)
    monkeypatch.setattr(paper, "_GRID_STEPS", 20)
    monkeypatch.setattr(paper_settings, "QUICK", paper_settings.Sizes(dict.fromkeys(SETTINGS, 30), 3, 2, 2, 5))


def test_finished_parts_are_kept_and_no_verdict_is_given_on_fewer_realizations(monkeypatch, capsys):
    monkeypatch.setattr(paper, "simulate", lambda *arguments, **settings: xarray.Dataset(attrs={"is_complete": 0}))
    cut = functools.partial(paper.run_setting, "bernoulli", 30, precision="float64")
    whole = paper_parts.Part("whole", "whole", lambda executor: 3)
    assert paper_parts.run_parts([whole, paper_parts.Part("cut", "cut", cut)], "executor") == {"whole": 3}
    assert "interrupted: the finished parts are kept" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        paper_parts.run_parts([paper_parts.Part("cut", "cut", cut), whole], "executor")


@pytest.mark.slow
@pytest.mark.parametrize("grid", [None, "bernoulli-kl"])
def test_a_figure_is_drawn_with_its_table_and_data(grid, small, tmp_path, capsys):
    figures = ["correct-actions", *([grid] if grid else [])]
    assert main(["reproduce", *figures, "--out", str(tmp_path / "paper"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["setting"] for row in rows} == {"bernoulli"} and {"value", "ours", "verdict"} <= set(rows[0])
    written = {path.name for path in (tmp_path / "paper").iterdir()}
    drawn = {"bernoulli_kl.png"} if grid else set()
    assert written == {"correct_actions.png", "reproduction.md", "bernoulli.nc"} | drawn
    report = (tmp_path / "paper" / "reproduction.md").read_text()
    assert "| Bernoulli, rates (.4, .8) | 40 | 30 | Thompson | 4.52 +- 0.04 | authors |" in report
    assert ("Bernoulli grid, A = 2 (3 problems)" in report) == bool(grid) and "stuck" in report


def test_claims_about_grids_are_judged_by_their_means_and_by_their_largest_reduction():
    def grid(hard, easy):
        relative = {THOMPSON: np.array([hard, easy]), BAYES_UCB: np.array([hard, easy - 0.1])}
        error = dict.fromkeys(relative, np.full(2, 0.01))
        return GridRegret(["hard", "easy"], np.array([0.1, 0.5]), relative, error)

    first, second = claims_of_grids({"A = 3": grid(-0.02, -0.4), "linear": grid(-0.5, -0.42)})
    assert first.verdict == second.verdict == "holds"
    assert "1 of 2 triples: -2.0% below and -40.0% above .25 against Thompson" in first.measured
    assert "-42.0% +- 1.0% against Thompson, on easy; -52.0%" in second.measured
    assert [claim.verdict for claim in claims_of_grids({"A = 3": grid(-0.5, -0.4), "linear": grid(-0.5, -0.2)})] == [
        "does not hold",
        "not reached on these problems",
    ]
    assert claims_of_grids({}) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "claim"),
    [
        (paper_parts.CLAIMS[0], "larger M do not significantly improve regret"),
        (
            paper_parts.CLAIMS[1],
            "the loss of Bayes-UCB on linear Gaussian problems relates to its quantile, alpha = 1/t",
        ),
        ("A = 3", "where the divergence is below .25, performance worsens"),
        ("linear", "reductions of up to 40% against Thompson and 50% against Bayes-UCB"),
    ],
)
def test_each_claim_is_measured_and_judged(part, claim, small, monkeypatch, tmp_path, capsys):
    assert part in paper_parts.FIGURE_PARTS["claims"]
    monkeypatch.setattr(paper_parts, "FIGURE_PARTS", {**paper_parts.FIGURE_PARTS, "claims": (part,)})
    assert main(["reproduce", "claims", "--out", str(tmp_path)]) == 0
    printed, report = capsys.readouterr().out, (tmp_path / "reproduction.md").read_text()
    assert re.search(f"{re.escape(claim)}.*: (holds|does not hold|not supported|not reached)", printed)
    assert re.search(rf"\| .*{re.escape(claim)}.* \| .* \| (holds|does not hold|not supported|not reached)", report)


def test_an_unknown_figure_is_refused(tmp_path, capsys):
    assert main(["reproduce", "regret", "--out", str(tmp_path)]) == 2
    assert "FIGURE has 'regret', expected some of execution" in capsys.readouterr().err


@pytest.mark.slow
def test_the_regrets_of_the_bernoulli_bandit_are_those_of_the_authors():
    # 4,000 realizations of 1,000 steps; `verdicts` allows three standard errors of the difference.
    runs = {"bernoulli": paper.run_setting("bernoulli", 4000, precision="float64")}
    found = paper.verdicts(runs)
    assert {f.number.policy for f in found} >= {THOMPSON, LOWEST}
    assert [f.verdict for f in found] == ["reproduces"] * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear-caption", "linear-figure"])
def test_the_regrets_of_the_linear_bandits_are_those_of_the_authors(name):
    found = paper.verdicts({name: paper.run_setting(name, 1000, precision="float64")})
    authors = [f for f in found if f.number.source == "authors"]
    assert len(authors) == 3 and all(f.verdict == "reproduces" for f in authors)
