"""Checkpoints follow from their stream, or are not read; opening with one reads only what came after it."""

import hashlib
import sqlite3
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import Journal, JournalError
from ppl_bandit.journal import open_experiment
from ppl_bandit.journal.checkpoints import make_checkpoint
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.replay import replay
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


def count_twice(header, trees):
    header.update(num_rows=2 * header["num_rows"])


def retire(header, trees):
    header.update(retired=[0])


def lose_the_last_reward(header, trees):
    header.update(position=header["position"] - 2)


@pytest.mark.parametrize(
    "change, words",
    [
        (swap_arms, "draws of 'rate' from the stored"),
        (count_twice, "num_rows is 20"),
        (retire, "retired is [0]"),
        (lose_the_last_reward, "num_rows is 10, the replayed one is 9"),
    ],
)
def test_replay_finds_a_forged_posterior_that_the_chain_announces(path, change, words):
    with bernoulli_bandit(journal=path) as bandit:
        found = replayed(bandit)
        assert (found.num_checked, found.position) == (NUM_EVENTS // 2, None)
        experiment, store = bandit._experiment, bandit._journal.store
        event, contents = make_checkpoint(experiment, experiment.projection)
        header, trees = read_archive(contents)
        change(header, trees)
        forged = write_archive(header, trees)
        event.body["contents"] = hashlib.sha256(forged).hexdigest()
        store.write_checkpoint("default", event, forged)
        store.check("default")  # the chain is whole
        found = replayed(bandit)
        assert found.position == store.last_position("default") and words in found.difference


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
    from journal_children import open_bandit
    open_bandit({path!r}).close()  # compiles
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        open_bandit({path!r}).close()
        times.append(time.perf_counter() - started)
    print(min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
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
        code = textwrap.dedent(OPENING.format(folder=str(__import__("pathlib").Path(__file__).parent), path=str(path)))
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        found.append([float(number) for number in output.split()[-2:]])
    (short, small), (long, large) = found
    assert long <= 1.5 * short and large <= small + 12 * 1024  # kB
