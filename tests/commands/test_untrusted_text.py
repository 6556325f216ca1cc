"""Names and cells that others wrote: no formula in a CSV file, no control character on the terminal."""

import csv

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

from ppl_bandit import Bandit, Interaction, RewardModel
from ppl_bandit.commands.cli import main
from ppl_bandit.display.csv_cells import original_cell, safe_cell, safe_frame
from ppl_bandit.display.terminal import printable
from ppl_bandit.inputs.data_files import read_data, write_data

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\uff1d1", "=cmd|' /C calc'!A0"]


def clicks(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


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
    model, arms = RewardModel(clicks, 2), ["-10%", "=A1"]
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
    with Bandit(clicks, arms=["a\x1b[31m", "=b"], num_samples=20, journal=tmp_path / "e.db")._journal:
        pass
    assert main(["journal", str(tmp_path / "e.db"), "status"]) == 0
    said = capsys.readouterr()
    assert "a\\x1b[31m" in said.out and "\x1b" not in said.out + said.err
    assert main(["journal", str(tmp_path / "e.db"), "show", "\x1b[2Jx"]) == 2
    assert "\x1b" not in capsys.readouterr().err
