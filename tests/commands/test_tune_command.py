"""`ppl-bandit tune`: its output, and invalid arguments."""

import json

import pytest

from ppl_bandit.commands.cli import main


@pytest.mark.slow
def test_tune_prints_the_standings_and_writes_the_table_and_the_figure(tmp_path, capsys):
    command = ["tune", "bernoulli", "--horizon", "10", "--selectors", "ds,ts", "--num-worlds", "64"]
    assert main([*command, "--out", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["best"].startswith(("selectors.double_sampling(", "selectors.thompson("))
    assert found["num_worlds"] == 64 and "2 of 2 candidates have played" in printed.err
    assert "selector=selectors." in (tmp_path / "tune.md").read_text() and (tmp_path / "tune.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-worlds", "0"], "num_worlds must be a positive integer, got 0"),
        (["--criterion", "median"], "--criterion must be mean or a quantile such as 0.95, got 'median'"),
        (["--selectors", "nosuch"], "nosuch"),
    ],
)
def test_tune_refuses_invalid_arguments(arguments, message, tmp_path, capsys):
    assert main(["tune", "bernoulli", "--horizon", "10", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
