"""Artefacts: what was stored is read, and nothing that somebody else may have written or changed."""

import io
import os
import pickle
import zipfile

import jax
import numpy as np
import pytest

from ppl_bandit.runtime import artefact
from ppl_bandit.runtime.archive import read_archive, write_archive
from ppl_bandit.runtime.artefact import Artefact


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("PPL_BANDIT_CACHE")
    monkeypatch.setattr(artefact, "folder", lambda: tmp_path / "warm_starts")
    return tmp_path / "warm_starts"


def entry(fingerprint="f" * 8):
    return Artefact(lambda: fingerprint)


def load(*given, name="found"):
    return entry(*given).load(name)


def save(own, values, parts=(), name="found"):
    own.save({name: (values, parts)})


VALUES = {"numbers": [1, 2.5, None], "order": {"b": 1, "a": 2}}
PARTS = [b"\x00binary\xff", b""]


@pytest.fixture
def stored(folder):
    save(entry(), VALUES, PARTS)
    (path,) = folder.iterdir()
    return path


def test_what_is_stored_is_read_for_the_same_fingerprint_and_settings_alone(stored):
    found = load()
    assert found == (VALUES, PARTS) and list(found[0]["order"]) == ["b", "a"]
    assert load("other") is None
    assert load(None) is None
    before = entry()
    with jax.default_matmul_precision("highest"):
        assert load() is None and before.load("found") is None  # it was made under other settings
    assert before.load("found") is not None


def test_a_program_that_cannot_be_fingerprinted_has_no_artefact(folder):
    def fails():
        raise TypeError("the program fails")

    save(Artefact(fails), VALUES)
    save(entry(None), VALUES)
    assert not folder.exists() and not Artefact(fails).is_current


def test_results_of_one_key_lie_in_one_file_and_the_oldest_are_dropped(stored):
    for number in range(12):
        save(entry(), number, [bytes(number)], f"result {number}")
    assert list(stored.parent.iterdir()) == [stored]
    assert load() is None and load(name="none") is None
    assert [load(name=f"result {number}") for number in range(12)] == [(n, [bytes(n)]) for n in range(12)]
    save(entry(), "new", name="result 0")
    assert load(name="result 0") == ("new", []) and load(name="result 1") == (1, [b"\x00"])


def test_the_fingerprint_is_computed_once_and_only_if_the_cache_is_on(folder, monkeypatch):
    calls = []
    own = Artefact(lambda: calls.append(1) or "f" * 8)
    with monkeypatch.context() as off:
        off.setattr(artefact, "folder", lambda: None)
        own.save({"found": (VALUES, PARTS)})
        assert own.load("found") is None and not calls
    own.save({"found": (VALUES, PARTS)})
    assert own.load("found") == (VALUES, PARTS) and calls == [1]


def test_only_the_user_can_read_and_write_entries(stored):
    assert stored.stat().st_mode & 0o777 == 0o600
    assert stored.parent.stat().st_mode & 0o777 == 0o700


class Planted:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_damaged_and_foreign_files_are_not_read(stored):
    whole = stored.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    foreign = write_archive({"values": VALUES}, {"parts": []})
    odd = write_archive({"name": stored.name, "inputs": entry().inputs, "results": 3}, {})
    for contents in (
        b"",
        whole[:20],
        whole[:-1],
        changed,
        b"x" + whole,
        b"foreign",
        foreign,
        odd,
        pickle.dumps(Planted()),
    ):
        stored.write_bytes(contents)
        assert load() is None
    stored.write_bytes(whole)
    assert load() is not None


def test_a_renamed_entry_is_not_read(stored):
    save(entry("g" * 8), "other")
    stored.replace(stored.with_name(entry("g" * 8).name))
    assert load("g" * 8) is None
    assert load() is None


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners and modes of files")
def test_entries_that_others_could_have_written_are_not_read(stored, tmp_path, monkeypatch):
    stored.chmod(0o666)
    assert load() is None
    stored.chmod(0o600)
    stored.parent.chmod(0o777)
    assert load() is None
    stored.parent.chmod(0o700)
    elsewhere = tmp_path / "elsewhere"
    stored.replace(elsewhere)
    stored.symlink_to(elsewhere)
    assert load() is None
    stored.unlink()
    elsewhere.replace(stored)
    assert load() is not None
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert load() is None


def test_the_oldest_entries_are_deleted(folder):
    folder.mkdir()
    for index in range(255):  # entries of other programs, each older than the one before; 256 files are kept
        (folder / f"other{index}").touch()
        os.utime(folder / f"other{index}", (1000 - index, 1000 - index))
    for index in range(3):
        save(entry(f"name{index}"), index)
    assert [load(f"name{index}") for index in range(3)] == [(0, []), (1, []), (2, [])]
    others = {path.name for path in folder.glob("other*")}
    assert others == {f"other{index}" for index in range(253)}


def test_an_archive_whose_parts_expand_or_overlap_is_not_read():
    whole = write_archive({"values": VALUES}, {"parts": [np.zeros(1000)]})
    assert read_archive(whole)[0]["values"] == VALUES
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ValueError, match="compressed"):
        read_archive(buffer.getvalue())


def test_an_archive_that_claims_a_large_array_is_not_read():
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000000,), }"
    part = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("header.npy", part)
    with pytest.raises(ValueError, match="cannot be read"):
        read_archive(buffer.getvalue())
