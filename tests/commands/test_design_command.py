"""`ppl-bandit design`: what it prints and writes, and invalid arguments."""

import json

import pytest

from ppl_bandit.commands.cli import main
from ppl_bandit.commands.design import _design
from ppl_bandit.commands.parser import make_parser

STOPS = ["--stop", "superiority:.95", "--stop", "equivalence:.9:.05"]


@pytest.mark.parametrize(
    ("scenarios", "stops"),
    [
        ({"null": ".3"}, STOPS[:2]),
        pytest.param({"null": ".3", "worlds": "prior"}, STOPS, marks=pytest.mark.slow),
    ],
    ids=["one scenario", "two scenarios"],
)
def test_a_design_is_simulated_and_a_report_is_written(scenarios, stops, tmp_path, capsys):
    command = ["design", "bernoulli", "--looks", "50:100:50", *stops, "--trials", "200"]
    for name, values in scenarios.items():
        command += ["--scenario", f"{name}={values}"]
    assert main([*command, "--out", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert f"{len(scenarios)} scenario(s) of 200 trials, 100 decisions each" in printed.err
    table = json.loads(printed.out)["table"]
    assert set(table) == set(scenarios)
    for row in table.values():
        endings = sum(row[name] for name in ("superiority", "equivalence", "futility", "undecided"))
        assert endings == pytest.approx(1.0) and 50.0 <= row["mean_rows"] <= 100.0
    if len(scenarios) > 1:
        # The prior makes arms differ by .33 on average, so that far more trials find a winner than under the null.
        assert table["worlds"]["superiority"] > table["null"]["superiority"]
    page = (tmp_path / "report.html").read_text()
    assert "Superiority: an arm is best" in page and "data:image/png;base64" in page and "seed 0" in page
    assert json.loads((tmp_path / "design.json").read_text())["looks"] == [50, 100]
    assert (tmp_path / "table.csv").read_text().startswith("scenario,superiority")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--looks", "a,b"], "--looks must be numbers such as 100,200,300, or first:last:step, got 'a,b'"),
        (["--looks", "100,50"], "looks must increase"),
        (["--looks", "100", "--stop", "luck:.9"], "--stop names the rule 'luck'"),
        (["--looks", "100", "--stop", "superiority:99"], "must be a probability strictly inside (0, 1)"),
        (["--looks", "100", "--stop", "equivalence:.9"], "has 1 numbers for equivalence"),
        (["--looks", "100", "--stop", "futility:.9:.05"], "the design has none: give control="),
        (["--looks", "100", "--control", "9"], "control is 9, which is no arm"),
        (["--looks", "100", "--control", "new"], "control is 'new', which is no arm; the arms are [0, 1, 2]"),
        (["--looks", "100", "--arms", "a,b"], "arms has 2 names"),
        (["--looks", "100", "--scenario", "half"], "--scenario must be NAME=V,V,..."),
        (["--looks", "100", "--scenario", "two=.1,.2"], "has 2 values for a site of shape"),
        (["--looks", "100", "--scenario", "x=rates:.1"], "must give the sites"),
        (["--looks", "100", "--cap", "2"], "caps must be probabilities in [0, 1]"),
        (["--looks", "100", "--control-share", ".3"], "give --control"),
        (["--looks", "100", "--calibrate", ".05"], "--calibrate needs the null"),
    ],
)
def test_design_refuses_invalid_arguments(arguments, message, tmp_path, capsys):
    assert main(["design", "bernoulli", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("control", "index"), [("1", 2), ("0", 0)])
def test_a_control_that_is_a_number_is_the_arm_of_that_name_if_there_is_one(control, index):
    command = [
        "design",
        "bernoulli",
        "--looks",
        "100",
        "--arms",
        "3,2,1",
        "--control",
        control,
        "--control-share",
        ".5",
    ]
    arguments = make_parser().parse_args(command)
    design = _design(arguments)
    assert design.control_index(arguments.arms) == design.selector.settings["arm"] == index
