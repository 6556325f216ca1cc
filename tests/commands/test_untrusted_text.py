"""Names and cells that others wrote: no formula in a CSV file, no control character on the terminal."""

import csv

import numpy as np
import pandas as pd
import pytest
from shared_models import bernoulli_bandit, bernoulli_engine, bernoulli_model

from ppl_bandit import Design, Interaction, evaluate, operating_characteristics, selectors, stopping
from ppl_bandit.commands.cli import main
from ppl_bandit.display.terminal import original_cell, printable, safe_cell, safe_frame
from ppl_bandit.inputs.data_files import read_data, write_data

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\uff1d1", "=cmd|' /C calc'!A0"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_text_and_can_be_read_back(text):
    assert safe_cell(text) == "'" + text and original_cell(safe_cell(text)) == text


@pytest.mark.parametrize("value", ["a", "a=b", "", "'quoted'", -1.5, 3, None, True, "1-2", "50%"])
def test_other_cells_stay(value):
    assert safe_cell(value) is value and (not isinstance(value, str) or original_cell(value) == value)


def test_a_frame_is_safe_in_its_cells_its_index_and_its_columns():
    frame = safe_frame(pd.DataFrame({"=a": ["=1", "b"], "n": [-1.0, 2.0]}, index=["@x", "y"]))
    assert frame.to_csv() == ",'=a,n\n'@x,'=1,-1.0\ny,b,2.0\n"


def test_arms_with_signs_are_written_as_text_and_read_back(tmp_path):
    model, arms = bernoulli_model(2), ["-10%", "=A1"]
    rows = Interaction(np.array([0, 1, 1]), np.array([0.0, 1.0, 0.0]))
    write_data(tmp_path / "log.csv", model, rows, arms)
    cells = [row[0] for row in csv.reader((tmp_path / "log.csv").open())]
    assert cells == ["arm", "'-10%", "'=A1", "'=A1"]
    assert read_data(tmp_path / "log.csv", model, arms).arm.tolist() == [0, 1, 1]
    (tmp_path / "plain.csv").write_text("arm,reward\n-10%,1\n=A1,0\n")
    assert read_data(tmp_path / "plain.csv", model, arms).arm.tolist() == [0, 1]


def test_control_characters_are_written_as_escapes():
    assert printable("a\x1b[2Jb\x07\x9b1m\u202ec\r") == "a\\x1b[2Jb\\x07\\x9b1m\\u202ec\\r"
    assert printable("né\t上\n") == "né\t上\n"


def test_no_command_prints_the_control_characters_of_a_journal(tmp_path, capsys):
    with bernoulli_bandit(2, arms=["a\x1b[31m", "=b"], journal=tmp_path / "e.db")._journal:
        pass
    assert main(["journal", str(tmp_path / "e.db"), "status"]) == 0
    said = capsys.readouterr()
    assert "a\\x1b[31m" in said.out and "\x1b" not in said.out + said.err
    assert main(["journal", str(tmp_path / "e.db"), "show", "\x1b[2Jx"]) == 2
    assert "\x1b" not in capsys.readouterr().err


HOSTILE = "a\x1b[2J\x9b1m\u202e\r\nThe data support b\x00"


def texts(name, value):
    """Yield what a value prints, on a terminal and in a notebook."""
    yield f"repr of {name}", repr(value)
    yield f"str of {name}", str(value)
    if hasattr(value, "_repr_html_"):
        yield f"HTML of {name}", value._repr_html_()
    if hasattr(value, "to_string"):
        yield f"text of {name}", value.to_string()


def test_nothing_that_is_printed_carries_the_control_characters_of_a_name():
    arms, rng = [HOSTILE, "b"], np.random.default_rng(0)
    design = Design([26, 60], stopping=[stopping.superiority(0.999)], control=HOSTILE)
    bandit = bernoulli_bandit(2, arms=arms, design=design, selector=selectors.fixed())
    drifting = bernoulli_bandit(2, arms=arms, selector=selectors.fixed())
    for _ in range(25):
        bandit.update(bandit.select(), float(rng.integers(2)))
    waiting = bandit.select()
    for row in range(150):  # the rewards of each arm change, which is an alarm
        drifting.update(drifting.select(), float(row > 75))
    log, equal = bandit.logged_decisions(), {"rate": np.array([0.5, 0.5])}
    values = {
        "bandit": bandit,
        "decision": waiting,
        "report": bandit.report(),
        "look": bandit.look(),
        "summary": bandit.summary(),
        "history": bandit.history(),
        "pending": bandit.pending(),
        "alarms": drifting.alarms(),
        "records": list(bandit.records()),
        "design": design,
        "evaluation": evaluate(log, HOSTILE),
        "difference": evaluate(log, (HOSTILE, "b")),
        "policy": evaluate(log, {HOSTILE: 0.5, "b": 0.5}),
        "trials": operating_characteristics(
            bernoulli_model(2), design, {HOSTILE: equal}, num_trials=4, arms=arms, engine=bernoulli_engine(2)
        ).table(),
    }
    assert HOSTILE in bandit.arms and len(values["alarms"]) > 1
    printed = [pair for name, value in values.items() for pair in texts(name, value)]
    printed += [("explain", bandit.explain(details=True)), ("page", bandit.report().to_html())]
    printed += [("verdict", values["evaluation"].verdict), ("report.text", values["report"].text)]
    assert any("a\\x1b[2J" in text for _, text in printed)
    for name, text in printed:
        assert printable(text) == text and "\nThe data support b" not in text, name
