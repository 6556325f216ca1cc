"""Journals, checkpoints and saved files of earlier releases: they open and replay to the same posterior."""

import json
import shutil
import sqlite3

import jax
import numpy as np
import pytest
from earlier_programs import FOLDER, OPTIONS, load_numbers, numbers, open_earlier

from ppl_bandit import Bandit
from ppl_bandit.commands import cli
from ppl_bandit.journal.identity import library_versions
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.open_experiment import read_header

# Sums of at most thirty float64 numbers, added in another order where a checkpoint is not read.
ROUNDING = 1e-9


def copy_of(name, folder):
    path = folder / f"{name}.db"
    shutil.copy(FOLDER / path.name, path)
    with Journal(path) as journal:
        same_versions = read_header(journal.store, "default").versions == library_versions()
    return path, {"allow_changed": not same_versions}  # another version gives the same program another fingerprint


def assert_same(found, expected):
    parameters = jax.tree.leaves(found.pop("parameters")), jax.tree.leaves(expected.pop("parameters"))
    for one, other in zip(*parameters, strict=True):
        np.testing.assert_allclose(one, other, rtol=ROUNDING, atol=ROUNDING)
    assert json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("outcomes", "linear", "lanes", "version3_kalman")
        else name
        for name in OPTIONS
    ],
)
def test_an_earlier_journal_opens_to_the_same_posterior_and_replays(name, tmp_path, capsys):
    path, allowed = copy_of(name, tmp_path)
    model = tmp_path / "model.py"
    names = {"program": "model", "num_arms": "num_arms", "context": "context", "outcomes": "outcomes"}
    lines = [f"{names[key]} = OPTIONS[{name!r}][{key!r}]" for key in OPTIONS[name] if key in names]
    model.write_text("\n".join(["from earlier_programs import OPTIONS", "num_arms = 2", *lines]))
    if not allowed["allow_changed"]:
        assert cli.main(["journal", str(path), "replay", "--model", str(model)]) == 0
        assert "all agree" in capsys.readouterr().out
    with sqlite3.connect(path) as file:
        num_events = file.execute("SELECT COUNT(*) FROM ppl_bandit_events").fetchone()[0]
        bodies = file.execute("SELECT position, body, digest FROM ppl_bandit_events ORDER BY position").fetchall()
    assert_same(numbers(open_earlier(name, path, **allowed)), load_numbers(name))
    with sqlite3.connect(path) as file:  # no event was rewritten
        assert (
            file.execute("SELECT position, body, digest FROM ppl_bandit_events ORDER BY position").fetchmany(num_events)
            == bodies
        )
        file.execute("DELETE FROM ppl_bandit_checkpoints")
    again = open_earlier(name, path, **allowed)
    assert_same(numbers(again), load_numbers(name))
    if name != "linear":
        decision = again.select()
        again.discard(decision)
        assert again._experiment.stream == "2"  # that of the first opening, and its numbers, belong to earlier releases


def test_an_earlier_saved_bandit_loads_to_the_same_posterior():
    loaded = Bandit.load(FOLDER / "conjugate.bandit", OPTIONS["conjugate"]["program"], allow_changed=True)
    assert_same(numbers(loaded), load_numbers("conjugate"))


def test_a_saved_journal_of_version_3_loads_to_the_same_posterior_and_random_stream():
    loaded = Bandit.load(FOLDER / "version3.bandit", OPTIONS["version3"]["program"], allow_changed=True)
    assert_same(numbers(loaded), load_numbers("version3"))
    assert loaded._experiment.stream == ""


def test_an_earlier_saved_bandit_is_saved_again_with_its_decisions(tmp_path):
    program = OPTIONS["conjugate"]["program"]
    loaded = Bandit.load(FOLDER / "conjugate.bandit", program, allow_changed=True)
    loaded.save(tmp_path / "again.db")
    again = Bandit.load(tmp_path / "again.db", program)
    assert_same(numbers(again), load_numbers("conjugate"))
    assert again.select().arm == loaded.select().arm
    again.discard(again.pending().decision[0])


def test_an_altered_earlier_file_is_refused(tmp_path):
    path, program = tmp_path / "b.npz", OPTIONS["conjugate"]["program"]
    whole = (FOLDER / "conjugate.bandit").read_bytes()
    for contents in (whole + b"\0", whole + whole, whole[:-2] + b"\3\0abc"):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="other bytes precede or follow it"):
            Bandit.load(path, program)
    path.write_bytes(whole)
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    name = next(name for name, array in arrays.items() if name != "header" and array.size and array.dtype.kind == "f")
    np.savez(path, **(arrays | {name: arrays[name] + 1}))
    with pytest.raises(ValueError, match="is not a saved bandit: its contents are not what was written"):
        Bandit.load(path, program)
