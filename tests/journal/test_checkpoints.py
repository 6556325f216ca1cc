"""Checkpoints follow from their stream, or are not read; opening with one reads only what came after it."""

import hashlib
import json
import re
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from shared_models import bernoulli_bandit, bernoulli_program

from ppl_bandit import Bandit, Journal, JournalError
from ppl_bandit.commands.cli import main
from ppl_bandit.journal import checkpoints, open_experiment
from ppl_bandit.journal.checkpoints import make_checkpoint, save_checkpoint
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.replay import replay
from ppl_bandit.journal.stores.appending import IS_SETTING
from ppl_bandit.runtime.archive import read_archive, write_archive

NUM_EVENTS = 20


def play(bandit, num):
    for number in range(num):
        bandit.update(bandit.select(), number % 2)


def counts(bandit):
    return {name: values.tolist() for name, values in bandit.posterior_parameters()["rate"].items()}


@pytest.fixture
def path(tmp_path):
    with bernoulli_bandit(journal=tmp_path / "j.db") as bandit:
        play(bandit, NUM_EVENTS // 2)
    return tmp_path / "j.db"


def edit(path, change):
    """Change the header and the arrays of the checkpoint, with a digest of its own that fits."""
    with sqlite3.connect(path) as file:
        (contents,) = file.execute("SELECT contents FROM ppl_bandit_checkpoints").fetchone()
        header, trees = read_archive(contents)
        change(header, trees)
        file.execute("UPDATE ppl_bandit_checkpoints SET contents = ?", (write_archive(header, trees),))


def swap_arms(header, trees):
    trees["state"] = [leaf[::-1].copy() if np.ndim(leaf) else leaf for leaf in trees["state"]]


EDITS = {
    "a posterior swapped between arms": swap_arms,
    "a position moved back": lambda header, trees: header.update(position=header["position"] - 4),
    "a position moved forward": lambda header, trees: header.update(position=header["position"] + 1),
    "another number of rows": lambda header, trees: header.update(num_rows=3),
}
STATEMENTS = {
    "moved to an earlier event": "UPDATE ppl_bandit_checkpoints SET position = position - 4",
    "one garbled byte": "UPDATE ppl_bandit_checkpoints SET contents = CAST(X'00' || substr(contents, 2) AS BLOB)",
    "empty": "UPDATE ppl_bandit_checkpoints SET contents = X''",
    "a text": "UPDATE ppl_bandit_checkpoints SET contents = 'x'",
}


@pytest.mark.parametrize("kind", [*EDITS, *STATEMENTS])
def test_a_checkpoint_that_does_not_follow_from_the_stream_is_not_read_and_noticed(path, kind):
    with Journal(path) as journal:
        head = journal.head()
        journal.verify(head=head)
    if kind in EDITS:
        edit(path, EDITS[kind])
    else:
        with sqlite3.connect(path) as file:
            file.execute(STATEMENTS[kind])
    with Journal(path) as journal, pytest.raises(JournalError, match="checkpoint"):
        journal.verify(head=head)
    whole = bernoulli_bandit()
    play(whole, NUM_EVENTS // 2)
    bandit = bernoulli_bandit(journal=path)
    assert counts(bandit) == counts(whole) and bandit.num_rewards == NUM_EVENTS // 2


def replayed(bandit):
    experiment = bandit._experiment
    header = read_header(experiment.store, "default")
    task, prior = bandit._build(list(header.identity["arms"]))
    return replay(experiment.store, "default", header.last_change, task, prior, bandit._build)


def announce(bandit, change):
    """Store a changed posterior, and append an event that announces it, so that the chain of digests is whole."""
    event, contents = make_checkpoint(bandit._experiment, bandit._experiment.projection)
    header, trees = read_archive(contents)
    change(header, trees)
    forged = write_archive(header, trees)
    event.body["contents"] = hashlib.sha256(forged).hexdigest()
    bandit._journal.store.write_checkpoint("default", event, forged)


def set_header(**fields):
    return lambda header, trees: header.update(fields)


FORGERIES = {
    "a posterior swapped between arms": (swap_arms, "draws of 'rate' from the stored"),
    "rows that count twice": (set_header(num_rows=20), "num_rows is 20"),
    "a retired arm": (set_header(retired=[0]), "retired is [0]"),
    "a position before the last reward": (
        lambda header, trees: header.update(position=header["position"] - 2),
        "num_rows is 10, the replayed one is 9",
    ),
    "a position before the first event": (set_header(position=0, head=""), "that of position 0"),
    "a position that is not announced yet": (set_header(position=23), "that of position 23, announced at 23"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_verify_and_replay_find_a_forged_posterior_that_the_chain_announces(path, kind):
    """As by somebody who may write everything, after the head that was kept elsewhere."""
    change, words = FORGERIES[kind]
    with bernoulli_bandit(journal=path) as bandit:
        head = bandit._journal.head()
        found = bandit.verify(head)
        assert (found.num_posteriors, found.num_recomputed) == (1, 1) and "1 of 1 stored posteriors recomputed" in str(
            found
        )
        found = replayed(bandit)
        assert (found.num_checked, found.num_posteriors, found.position) == (NUM_EVENTS // 2, 1, None)
        announce(bandit, change)
        told = bandit._journal.verify(head=head)  # without the program the chain alone can be checked
        assert (
            told.num_recomputed is None and "NOT recomputed from the events, because no program is known" in told.text
        )
        with pytest.raises(JournalError, match=f"the event at position {NUM_EVENTS + 3} of .*{re.escape(words)}"):
            bandit.verify(head)
        found = replayed(bandit)
        assert found.position == NUM_EVENTS + 3 and words in found.difference


def test_a_position_moved_forward_by_whole_rewards_is_found(path):
    """The rewards between would not be learnt."""
    with bernoulli_bandit(journal=path) as bandit:
        earlier = bandit._experiment.projection
        play(bandit, 2)
        store, experiment = bandit._journal.store, bandit._experiment
        event, contents = make_checkpoint(experiment, earlier)
        header, trees = read_archive(contents)
        position = experiment.projection.position
        forged = write_archive(header | {"position": position, "head": store.digest_at("default", position)}, trees)
        event.body["contents"] = hashlib.sha256(forged).hexdigest()
        store.write_checkpoint("default", event, forged)
        with pytest.raises(JournalError, match="the stored num_rows is 10, the replayed one is 12"):
            bandit.verify()


def test_a_posterior_of_rare_rates_that_is_swapped_is_found(tmp_path):
    """Differences are relative to the draws of the same entry, however small these are."""
    with bernoulli_bandit(journal=tmp_path / "j.db") as bandit:
        bandit.update_many(arms=[0] * 4000 + [1] * 1000, rewards=[0.0] * 5000)

        def scale(header, trees):
            leaves = [leaf * (1.0 + 1e-5) if leaf.dtype.kind == "f" else leaf for leaf in trees["state"]]
            trees["state"] = leaves

        announce(bandit, scale)
        with pytest.raises(JournalError, match="draws of 'rate' from the stored"):
            bandit.verify()


def test_verify_on_the_command_line_learns_posteriors_again_if_it_finds_the_program(tmp_path, capsys):
    path, code = tmp_path / "j.db", tmp_path / "model.py"
    lines = ["from shared_models import bernoulli_program", "model = bernoulli_program(3)", "num_arms = 3"]
    code.write_text("\n".join(lines))
    with Bandit(bernoulli_program(3), 3, journal=path) as bandit:
        play(bandit, 5)
    command = ["journal", str(path), "verify"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "NOT recomputed from the events, because no program is known" in said and "give --model" in said
    assert main([*command, "--model", str(code), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["damage"], found["num_posteriors"], found["num_recomputed"]) == (None, 1, 1)
    with Bandit(bernoulli_program(3), 3, journal=path) as bandit:
        announce(bandit, swap_arms)
    assert main(command) == 0  # the chain is whole
    capsys.readouterr()
    assert main([*command, "--model", str(code)]) == 1
    assert "does not follow from the events before it" in capsys.readouterr().out
    code.write_text("\n".join(line.replace("program(3)", "program(4)") for line in lines))
    assert main([*command, "--model", str(code)]) == 2


def test_opening_reads_the_events_after_the_checkpoint_and_no_others(path, monkeypatch):
    before = bernoulli_bandit(journal=path)
    decision = before.select()
    play(before, 2)
    read = []
    folded = open_experiment.Experiment.fold
    monkeypatch.setattr(
        open_experiment.Experiment,
        "fold",
        lambda self, batch, **options: read.extend(batch) or folded(self, batch, **options),
    )
    bandit = bernoulli_bandit(journal=path)
    assert min(event.position for event in read) == NUM_EVENTS + 2  # 20 events and the first, which opened it
    assert counts(bandit) == counts(before) and bandit.num_rewards == NUM_EVENTS // 2 + 2
    assert bandit.pending().decision.tolist() == [decision.id]
    assert bandit.num_rewards == len(bandit.history())
    first = bandit.history().decision[0]
    bandit.update(first, 1, correct=True)  # a row from before the checkpoint
    before.catch_up() if hasattr(before, "catch_up") else before.pending()
    assert counts(bandit) == counts(before)


def test_opening_reads_no_announcement_of_a_checkpoint_by_the_index_of_its_own(path):
    with bernoulli_bandit(journal=path) as bandit:
        for _ in range(5):
            save_checkpoint(bandit._experiment)
        store = bandit._journal.store
        assert [event.kind for event in store.settings("default")] == ["opened"]
        plan = store._query(
            f"EXPLAIN QUERY PLAN SELECT body FROM ppl_bandit_events WHERE experiment = 'x' AND {IS_SETTING}"
        )
        assert "USING INDEX ppl_bandit_set " in str(plan)
    with sqlite3.connect(path) as file:  # as an earlier version left it
        file.execute("DROP INDEX ppl_bandit_set")
        file.execute("CREATE INDEX ppl_bandit_settings ON ppl_bandit_events (experiment) WHERE kind = 'opened'")
        file.execute("PRAGMA user_version=4")
    bernoulli_bandit(journal=path).close()
    with sqlite3.connect(path) as file:
        names = [row[0] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'index'")]
    assert "ppl_bandit_set" in names and "ppl_bandit_settings" not in names


def test_opening_after_a_correction_does_not_refit_again(path, monkeypatch):
    bandit = bernoulli_bandit(journal=path)
    bandit.update(bandit.history().decision[0], 1, correct=True)
    monkeypatch.setattr(checkpoints, "rows_until", lambda *_: pytest.fail("all rows were read"))
    assert counts(bernoulli_bandit(journal=path)) == counts(bandit)


def test_the_first_sweep_for_overdue_decisions_goes_on_where_the_last_process_was(tmp_path):
    options = {"journal": tmp_path / "j.db", "reward_window": 0.05}
    with bernoulli_bandit(**options) as bandit:
        play(bandit, 3)
        time.sleep(0.1)
        bandit.expire()
        settled = bandit._experiment.settled_until
        assert settled == 7
        bandit.select()
    bandit = bernoulli_bandit(**options)
    assert bandit._experiment.settled_until == settled
    time.sleep(0.06)
    assert bandit.expire() == 1 and bandit.pending().empty


def test_the_newest_valid_checkpoint_is_read(path):
    with bernoulli_bandit(journal=path) as bandit:
        play(bandit, 3)
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT COUNT(*) FROM ppl_bandit_checkpoints").fetchone() == (2,)
        file.execute(
            "UPDATE ppl_bandit_checkpoints SET contents = X'00' WHERE position = (SELECT MAX(position) FROM "
            "ppl_bandit_checkpoints)"
        )
    again = bernoulli_bandit(journal=path)
    assert again._experiment.checkpoint_position == NUM_EVENTS + 1
    assert counts(again) == counts(bernoulli_bandit(journal=path)) and again.num_rewards == NUM_EVENTS // 2 + 3


def test_a_closed_bandit_says_so_and_leaves_a_journal_that_it_was_given_open(tmp_path):
    with Journal(tmp_path / "j.db") as journal:
        bandit = bernoulli_bandit(journal=journal)
        decision = bandit.select()
        bandit.close()
        bandit.close()
        for use in (bandit.select, lambda: bandit.update(decision, 1), bandit.pending):
            with pytest.raises(JournalError, match="was closed"):
                use()
        assert journal.experiments() == ["default"]
    with bernoulli_bandit() as bandit:
        bandit.select()
    with pytest.raises(JournalError, match="was closed"):
        bandit.select()


OPENING = """
    import resource, sys, time
    sys.path.insert(0, {folder!r})
    from shared_models import bernoulli_bandit
    bernoulli_bandit().warm_up()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(5):
        started = time.process_time()
        bernoulli_bandit(journal={path!r}).close()
        times.append(time.process_time() - started)
    print(min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_opening_takes_as_long_for_a_long_journal_as_for_a_short_one(tmp_path):
    found = []
    for num in (2_000, 60_000):
        path = tmp_path / f"{num}.db"
        with bernoulli_bandit(journal=path) as bandit:
            for _ in range(num // 4000 or 1):
                decisions = bandit.select_many(num_decisions=min(num // 2, 2000))
                bandit.update_many(decisions=decisions, rewards=[1] * len(decisions))
        code = textwrap.dedent(OPENING.format(folder=str(Path(__file__).parents[1]), path=str(path)))
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        found.append([float(number) for number in output.split()[-2:]])
    (short, small), (long, large) = found
    print(f"{1e3 * short:.2f} ms, {small} kB; {1e3 * long:.2f} ms, {large} kB")
    assert long <= 1.5 * short and large <= small + 12 * 1024  # kB
