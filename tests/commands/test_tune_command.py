"""`ppl-bandit tune`: its output, and invalid arguments."""

import json

import pytest

from ppl_bandit.commands.cli import main


@pytest.mark.slow
def test_tune_prints_the_standings_and_writes_the_table_and_the_figure(tmp_path, capsys):
    command = ["tune", "bernoulli", "--horizon", "10", "--selectors", "ds,ts", "--num-worlds", "256"]
    assert main([*command, "--tolerance", "0.99", "--out", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["best"].startswith(("selectors.double_sampling(", "selectors.thompson("))
    # With so wide a tolerance it stops at the smallest number of worlds, not at the largest.
    assert found["standings"][0]["num_worlds"] == 128
    assert "after 128 worlds" in printed.err and "after 256 worlds" not in printed.err
    assert "selector=selectors." in (tmp_path / "tune.md").read_text() and (tmp_path / "tune.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tolerance", "1.5"], "tolerance must be a number in [0, 1), got 1.5; 0 plays all num_worlds"),
        (["--doubt", "0.5"], "doubt must be a number of at least 1, got 0.5"),
        (["--tolerance", "nan"], "tolerance must be a number in [0, 1), got nan"),
        (["--criterion", "median"], "--criterion must be mean or a quantile such as 0.95, got 'median'"),
        (["--selectors", "nosuch"], "nosuch"),
    ],
)
def test_tune_refuses_invalid_arguments(arguments, message, tmp_path, capsys):
    assert main(["tune", "bernoulli", "--horizon", "10", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
