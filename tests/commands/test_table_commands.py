"""From a table to an answer without Python: report, import and evaluate of a CSV file."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from ppl_bandit.commands.check import check_model
from ppl_bandit.commands.cli import main
from ppl_bandit.commands.report import choose_program, table_program
from ppl_bandit.inputs.tables import Table
from ppl_bandit.journal.model_files import bundled_models

SUCCESSES, PLAYS = {"a": 20, "b": 45}, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("tables")
    rows = ["variant,converted,price"]
    for row in range(PLAYS):
        rows += [f"{arm},{int(row < SUCCESSES[arm])},{price}" for arm, price in (("a", 10), ("b", 4))]
    order = np.random.default_rng(0).permutation(np.arange(1, len(rows)))
    (found / "log.csv").write_text("\n".join([rows[0], *(rows[i] for i in order)]) + "\n")
    return found


def run(capsys, *words):
    status = main([*map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_one_command_answers_with_an_interval_and_names_the_program(folder, capsys, warm_starts):
    status, out, _ = run(capsys, "report", folder / "log.csv", "--html", folder / "page.html")
    posterior = stats.beta(1 + SUCCESSES["b"], 1 + PLAYS - SUCCESSES["b"])
    low, high = posterior.ppf([0.025, 0.975])
    assert status == 0 and out.startswith("b leads after 400 rewards: expected reward")
    assert f"95% interval {low:.4g} to {high:.4g}" in out.splitlines()[0]
    assert "Program: a success rate for each arm, because every reward is 0 or 1; to change it, write it with" in out
    page = (folder / "page.html").read_text()
    assert "Pending:" not in out + page and "Table: " in page and "data:image/png" in page


def test_a_price_times_a_sale_is_a_rate_times_a_worth(folder, capsys, warm_starts):
    words = ("report", folder / "log.csv", "--value", "price*converted", "--save-model", folder / "mine.py", "--json")
    status, out, _ = run(capsys, *words)
    found = json.loads(out)
    assert status == 0 and found["leader"] == "a"
    arms = {row["arm"]: row["expected_reward"] for row in found["arms"]}
    assert arms == {
        "a": pytest.approx(10 * 21 / 202),
        "b": pytest.approx(4 * 46 / 202),
    }  # price times the mean of a Beta
    assert "worth = [10.0, 4.0]  # of a success" in (folder / "mine.py").read_text()
    status, _, err = run(capsys, *words)
    assert status == 2 and "exists already" in err


@pytest.mark.slow
def test_an_imported_table_continues_as_an_experiment(folder, capsys, warm_starts):
    run(capsys, "report", folder / "log.csv", "--save-model", folder / "continued.py")
    words = ("import", folder / "log.csv", "--journal", folder / "e.db", "--model", folder / "continued.py")
    status, out, _ = run(capsys, *words, "--propensity", "equal")
    assert status == 0 and "recorded 400 rows" in out
    status, out, _ = run(capsys, "journal", folder / "e.db", "report", "--model", folder / "continued.py")
    assert status == 0 and out.startswith("b leads after 400 rewards")
    status, out, _ = run(capsys, "evaluate", folder / "e.db", "--contrast", "b", "a", "--out", folder / "out")
    assert status == 0 and out.startswith("b beats a by")
    status, _, err = run(capsys, *words)
    assert status == 2 and "has an experiment 'default' already" in err


def test_evaluate_reads_a_table_and_reports_all_arms_at_once(folder, capsys):
    status, _, err = run(capsys, "evaluate", folder / "log.csv")
    assert status == 2 and "--propensity equal" in err and "report" in err
    status, out, _ = run(
        capsys, "evaluate", folder / "log.csv", "--propensity", "equal", "--json", "--out", folder / "evaluated"
    )
    found = json.loads(out)
    assert status == 0 and found["verdict"] == "b earns more than every other arm."
    low, high = found["arms"]["b"]["interval"]
    error = np.sqrt(0.225 * 0.775 / PLAYS)  # of a mean; the level of each of two arms is .975
    assert high - low == pytest.approx(2 * stats.norm.ppf(0.9875) * error, rel=0.15)
    words = ("--contrast", "b", "a", "--propensity", "equal", "--out", folder / "evaluated")
    status, out, _ = run(capsys, "evaluate", folder / "log.csv", *words)
    assert status == 0 and out.startswith("b beats a by")


@pytest.mark.parametrize("target", [(), ("--contrast", "b", "a")])
def test_an_evaluation_is_a_page_with_its_figure(folder, capsys, target):
    words = ("--propensity", "equal", "--out", folder / "paged", "--html", folder / "evaluated.html")
    status, out, _ = run(capsys, "evaluate", folder / "log.csv", *target, *words)
    page = (folder / "evaluated.html").read_text()
    assert status == 0 and "Page: " in out and "data:image/png" in page and "<script" not in page
    assert out.splitlines()[0] in page and "Versions</h2>" in page
    assert (folder / "paged" / "evaluation.png").exists() and (folder / "paged" / "table.csv").exists()


def table(rewards, entries=None):
    arm = ["a", "b"] * (len(rewards) // 2)
    return Table(["a", "b"], arm, np.asarray(rewards, float), None, entries or {}, {}, "")


RNG = np.random.default_rng(1)
WILD, NARROW = RNG.negative_binomial(0.3, 0.23, 100), RNG.integers(4, 6, 100)  # about the mean of both as a variance


@pytest.mark.parametrize(
    ("rewards", "program", "why"),
    [
        ([0, 1, 1, 0], "binary", "every reward is 0 or 1"),
        ([1, 1, 1, 1], "binary", "every reward is 0 or 1"),
        ([0, 12, 9, 0] * 5, "binary", "every reward is 0 or one amount of its arm"),
        ([0, 0, 37.5, 12.1], "real", "50% of the rewards are 0"),  # one sale each: the amounts are not known
        ([0, 0, 37.5, 0] * 5, "real", "75% of the rewards are 0"),  # what a sale of b would be is not known
        ([0, 0, 5, 0, 0, 5] * 5, "binary", "every reward is 0 or one amount of its arm"),
        (RNG.poisson(3.0, 200), "counts", "the rewards are counts"),
        (10 * RNG.poisson(3.0, 200), "real", "vary more than Poisson counts"),
        (RNG.integers(3, 6, 200), "real", "vary less than Poisson counts"),  # ratings
        ([value for pair in zip(WILD, NARROW, strict=True) for value in pair], "real", "of their mean on arm"),
        ([3, 4], "real", "no arm has enough rows"),
        (RNG.gamma(2.0, 5.0, 200), "positive", "every reward is positive"),
        (RNG.lognormal(0.0, 1.7, 400), "real", "do not vary as Gamma outcomes of one shape do"),
        (RNG.gamma([50.0, 0.5] * 100, 5.0), "real", "do not vary as Gamma outcomes of one shape do: arm"),
        (RNG.normal(size=200), "real", "real numbers"),
        (np.where(RNG.random(200) < 0.7, 0, RNG.gamma(2.0, 5.0, 200)), "real", "of the rewards are 0"),
    ],
)
def test_the_program_is_chosen_by_the_kind_of_outcome(rewards, program, why):
    found = choose_program(table(rewards))
    assert found.file.stem == program and why in found.words
    assert compile(found.source, "program.py", "exec")


def test_an_amount_that_an_expression_gives_is_known_after_one_sale():
    sold = table([0, 0, 9, 12])
    assert choose_program(sold).file.stem == "real"
    assert choose_program(sold._replace(has_fixed_amounts=True)).file.stem == "binary"
    assert choose_program(sold, "binary").rewards.tolist() == [0, 0, 1, 1]


def test_a_saved_program_takes_the_amounts_that_it_was_made_for(tmp_path):
    sold = table([0, 0, 9, 12])._replace(has_fixed_amounts=True)
    with table_program(sold, None, None, tmp_path / "mine.py"):
        pass
    with table_program(sold, str(tmp_path / "mine.py"), None) as (_, again):
        assert again.rewards.tolist() == [0, 0, 1, 1]
    with table_program(sold._replace(reward=np.array([0, 1.0, 1, 0])), str(tmp_path / "mine.py"), None) as (_, again):
        assert again.rewards.tolist() == [0, 1, 1, 0]
    source = (tmp_path / "mine.py").read_text().replace("  # of a success on each arm", "  # my own numbers")
    (tmp_path / "own.py").write_text(source)
    with table_program(sold, str(tmp_path / "own.py"), None) as (_, again):
        assert again.rewards.tolist() == [0, 0, 9, 12]


@pytest.mark.filterwarnings("error")
def test_an_arm_without_rows_is_no_arithmetic_error():
    lacking = table(RNG.poisson(3.0, 200))._replace(arms=["a", "b", "c"])
    assert choose_program(lacking).file.stem == "counts"


def test_a_context_is_standardised_in_the_text_of_the_program():
    found = choose_program(table([0.0, 1.5, 2.0, -1.0], {"age": np.array([20.0, 30.0, 40.0, 50.0])}))
    assert found.file.stem == "real_by_context" and 'columns = {"age": [35.0, 11.18]}  # centre' in found.source
    assert "centre, scale = 0.625, 1.192" in found.source


def test_a_kind_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="--kind counts does not fit: the rewards are real numbers"):
        choose_program(table([0.5, -1.0]), "counts")
    assert choose_program(table([1.0, 2.0, 3.0, 0.0]), "real").file.stem == "real"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("binary", "exact"),
        ("counts", "exact"),
        ("real", "exact"),
        ("real_by_context", "exact"),
        ("positive", "exact given shape"),
        ("binary_by_context", "not exact"),
    ],
)
def test_the_ready_programs_are_as_exact_as_they_say(name, verdict):
    path = bundled_models()["bernoulli"].parent / "tables" / f"{name}.py"
    assert check_model(str(path)).verdict == verdict


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys, warm_starts):
    docs = Path(__file__).parents[2] / "docs"
    status, out, _ = run(capsys, "report", docs / "tables" / "price_test.csv", "--value", "price*sold")
    page = (docs / "from-a-table.md").read_text()
    assert status == 0 and all(line in page for line in out.splitlines()[:4])
