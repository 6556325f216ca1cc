"""`ppl-bandit journal`: status, show, replay and export of a recorded experiment."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ppl_bandit import Bandit, Journal
from ppl_bandit.commands.cli import main
from ppl_bandit.journal.model_files import find_program, load_model
from ppl_bandit.journal.open_experiment import ExperimentHeader
from ppl_bandit.journal.stores.store import JournalError

MODEL = """
import numpyro
import numpyro.distributions as dist

num_arms = 2
context = 1.0


def model(arm, context):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Normal(slope[arm] * context, 1.0))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, warm_starts):
    folder = tmp_path_factory.mktemp("journal")
    (folder / "slopes.py").write_text(MODEL)
    (folder / "other.py").write_text(MODEL.replace("0.0, 1.0", "0.0, 2.0"))
    file = load_model(folder / "slopes.py")
    bandit = Bandit(
        file.program, arms=["a", "b"], context=file.context, num_samples=50, journal=folder / "j.db", name="x"
    )
    decisions = bandit.select_many(np.arange(1.0, 6.0))
    bandit.update_many(decisions=decisions[:3], rewards=[0.5, 1.5, 2.5])
    bandit.update(decisions[0], 0.25, correct=True)
    bandit.update(arm="b", reward=1.0, context=2.0)
    bandit.select(3.0)
    return folder, decisions


def run(capsys, *words):
    status = main(["journal", *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_status_counts_and_with_the_model_prints_the_posterior(recorded, capsys):
    folder, _ = recorded
    status, out, _ = run(capsys, folder / "j.db", "status", "--json")
    found = json.loads(out)
    assert status == 0 and found["first_broken_position"] is None
    assert sum(arm["num_decisions"] for arm in found["arms"]) == 6
    assert sum(arm["num_rewards"] for arm in found["arms"]) == 4
    assert sum(arm["num_pending"] for arm in found["arms"]) == 3
    status, out, _ = run(capsys, folder / "j.db", "status", "--model", folder / "slopes.py")
    assert status == 0 and "learnt from 4 rewards" in out and "decisions  pending" in out
    assert "P(best)  loss" in out


def test_status_and_report_write_the_posterior_as_figures_and_a_page(recorded, capsys, tmp_path):
    folder, _ = recorded
    words = folder / "j.db", "status", "--model", folder / "slopes.py", "--json", "--out", tmp_path / "arms.png"
    status, out, _ = run(capsys, *words)
    assert status == 0 and (tmp_path / "arms.png").stat().st_size > 5000
    assert {"expected_reward", "low", "high", "best_arm_prob", "expected_loss"} <= set(json.loads(out)["posterior"][0])
    status, out, err = run(capsys, folder / "j.db", "status", "--out", tmp_path / "found.png")
    assert status == 0 and "P(best)  loss" in out and (tmp_path / "found.png").exists()
    assert "slopes.py:model, as the journal says" in err
    words = folder / "j.db", "report", "--model", folder / "slopes.py", "--more", "50", "--out", tmp_path / "page"
    status, out, _ = run(capsys, *words)
    assert status == 0 and "is the best single arm after 4 rewards" in out and "after 50 more decisions" in out
    assert "is the best single arm after 4 rewards" in (tmp_path / "page" / "report.html").read_text()
    assert (tmp_path / "page" / "report.png").exists()
    status, out, err = run(capsys, folder / "j.db", "report")  # the journal records where its program is
    assert status == 0 and "is the best single arm after 4 rewards" in out
    assert f"program: {folder / 'slopes.py'}:model, as the journal says" in err


def test_show_prints_everything_about_one_decision(recorded, capsys):
    folder, decisions = recorded
    status, out, _ = run(capsys, folder / "j.db", "show", decisions[0].id, "--json")
    story = json.loads(out)
    assert status == 0 and story["reward"] == {"reward": 0.25} and story["context"] == {"context": 1.0}
    assert [event["kind"] for event in story["events"]] == ["rewarded", "corrected"]
    status, out, _ = run(capsys, folder / "j.db", "show", decisions[0].id)
    assert f"arm {decisions[0].arm!r}, played with probability" in out
    status, _, err = run(capsys, folder / "j.db", "show", "nobody")
    assert status == 2 and "has no decision 'nobody'" in err


def test_replay_agrees_and_another_program_is_refused(recorded, capsys):
    folder, _ = recorded
    status, out, _ = run(capsys, folder / "j.db", "replay", "--model", folder / "slopes.py", "--name", "x")
    assert status == 0 and "all agree: 6 of 6 decisions" in out
    status, _, err = run(capsys, folder / "j.db", "replay", "--model", folder / "other.py")
    assert status == 2 and "is not what the experiment was recorded with: program" in err


def test_export_and_pending_give_tables(recorded, capsys, tmp_path):
    import pandas
    import xarray

    folder, decisions = recorded
    assert run(capsys, folder / "j.db", "export", "--to", "csv", "--out", tmp_path / "x.csv")[0] == 0
    table = pandas.read_csv(tmp_path / "x.csv")
    assert len(table) == 7 and table["reward"].notna().sum() == 4
    assert table["context"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 2.0, 3.0]
    assert run(capsys, folder / "j.db", "export", "--to", "netcdf", "--out", tmp_path / "x.nc")[0] == 0
    with xarray.open_dataset(tmp_path / "x.nc") as found:
        np.testing.assert_array_equal(found["propensity"].values, table["propensity"].values)
    status, _, err = run(capsys, folder / "j.db", "export", "--to", "parquet", "--out", tmp_path / "x.parquet")
    if importlib.util.find_spec("pyarrow") is None:
        assert status == 2 and "parquet needs pyarrow: pip install 'ppl_bandit[parquet]', or export --to csv" in err
    else:
        same = pandas.read_parquet(tmp_path / "x.parquet")
        assert list(same) == list(table) and same["decision"].tolist() == table["decision"].fillna("").tolist()
        np.testing.assert_array_equal(same["propensity"], table["propensity"])
    status, out, _ = run(capsys, folder / "j.db", "pending", "--json")
    assert [row["decision"] for row in json.loads(out)][:2] == [decisions[3].id, decisions[4].id]
    assert "0 decisions without a reward" in run(capsys, folder / "j.db", "pending", "--older-than", "3600")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.db", "status"], "there is no journal nowhere.db"),
        (["JOURNAL", "status", "--name", "y"], "has no experiment 'y'; its experiments: x"),
        (["JOURNAL", "pending", "--older-than", "nan"], "--older-than must be seconds"),
        (["JOURNAL", "pending", "--older-than", "1e400"], "--older-than must be seconds"),
        (["mysql://u:pw@h/d", "status"], "scheme 'mysql'"),
    ],
)
def test_invalid_input_is_one_line_and_status_2(recorded, capsys, words, said):
    folder, _ = recorded
    status, out, err = run(capsys, *(folder / "j.db" if word == "JOURNAL" else word for word in words))
    assert status == 2 and said in err and "Traceback" not in err and "pw" not in err


def test_numbers_are_checked_and_a_model_that_exits_is_refused(tmp_path, capsys):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    assert main(["check", str(tmp_path / "leaves.py")]) == 2
    assert "leaves.py:2: SystemExit: 3" in capsys.readouterr().out
    for words in (["--devices", "-1"], ["--seed", "9" * 30], ["--seed", "-1"], ["--seed", "x"]):
        with pytest.raises(SystemExit) as error:
            main(["run", "bernoulli", *words])
        assert error.value.code == 2
        assert "whole number" in capsys.readouterr().err


def test_an_export_stays_in_its_folder_and_nothing_else_is_written(recorded, capsys, tmp_path, monkeypatch):
    folder, _ = recorded
    with Journal(folder / "j.db", read_only=True) as journal:
        opened = journal.events("x")[:1]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("../x", "/x", "..", ".hidden"):
        with Journal("j.db") as journal:
            journal.store.append(name, opened)
        assert run(capsys, "j.db", "export", "--to", "csv", "--name", name)[0] == 0
        before = Path("j.db").read_bytes()
        assert run(capsys, "j.db", "status", "--name", name)[0] == 0
        assert Path("j.db").read_bytes() == before
    assert sorted(os.listdir()) == ["_.csv", "__x.csv", "_hidden.csv", "_x.csv", "j.db"]
    assert os.listdir(tmp_path) == ["here"]


def header(source):
    return ExperimentHeader({}, {}, [], frozenset(), 0, 0, [], source)


def test_a_recorded_program_is_found_where_it_was_or_beside_the_journal(tmp_path):
    (tmp_path / "slopes.py").write_text(MODEL)
    url, here = str(tmp_path / "j.db"), str(tmp_path / "slopes.py")
    assert find_program(header((here, "model")), url, "replay") == f"{here}:model"
    assert find_program(header(("/gone/slopes.py", "model")), f"sqlite:///{url}", "replay") == f"{here}:model"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "replay needs the program: give --model .*; the journal does not say where it is"),
        (("/gone/model.py", "model"), r"'model' was not found at /gone/model.py \(no such file\); .*no such file"),
        (("HERE/script.py", "model"), "no model file: it does not define num_arms"),
        (("HERE/slopes.py", "other"), "it defines no function 'other'"),
        (("HERE/broken.py", "model"), "cannot be read"),
    ],
)
def test_a_program_that_is_not_found_is_asked_for_with_the_places_looked_at(tmp_path, source, said):
    (tmp_path / "slopes.py").write_text(MODEL)
    (tmp_path / "script.py").write_text("def model(arm):\n    pass\n\n\nraise SystemExit  # never executed\n")
    (tmp_path / "broken.py").write_text("def model(")
    given = None if source is None else (source[0].replace("HERE", str(tmp_path)), source[1])
    with pytest.raises(JournalError, match=said):
        find_program(header(given), "postgresql://host/base" if source is None else str(tmp_path / "j.db"), "replay")
