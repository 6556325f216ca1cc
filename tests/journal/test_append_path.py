"""The path of a call: ids, bodies, searches, and what a process does not do twice."""

import math
from uuid import RFC_4122, UUID

import numpy as np
import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import Journal
from ppl_bandit.journal.checkpoints import save_checkpoint
from ppl_bandit.journal.events import DECIDED, new_event, new_ids
from ppl_bandit.journal.stores.appending import decode, encode


def test_ids_follow_each_other_in_time_and_differ():
    first, later = new_ids(1000), new_ids(1000)
    assert len({*first, *later}) == 2000 and {len(name) for name in first} == {32}
    assert max(name[:12] for name in first) <= min(name[:12] for name in later)
    assert all(UUID(name).version == 7 and UUID(name).variant == RFC_4122 for name in first)


@pytest.mark.parametrize(
    "value",
    [0.1, 1e-300, -0.0, 2**53 - 1, [[1, 2], [3, 4]], np.arange(6.0).reshape(2, 3).T, np.float64(0.1), {"a": None}],
)
def test_a_body_is_restored_to_the_last_bit(value):
    restored = decode(encode({"value": value}))["value"]
    assert repr(restored) == repr(value.tolist() if hasattr(value, "tolist") else value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, np.float64("nan"), np.array([1.0, math.nan]), [{"a": (math.nan,)}]]
)
def test_a_number_that_json_does_not_have_is_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        encode({"value": value, "other": None})


def test_finding_many_decisions_searches_the_index(tmp_path, monkeypatch):
    store = Journal(tmp_path / "j.db").store
    store.append("x", [new_event(DECIDED, {}, decision=f"{i}", number=i) for i in range(20)])
    asked, query = [], store._query
    monkeypatch.setattr(store, "_query", lambda *call: asked.append(call) or query(*call))
    assert set(store.find("x", ["1", "2"])) == {"1", "2"}
    (plan,) = query(f"EXPLAIN QUERY PLAN {asked[0][0]}", *asked[0][1:])
    assert "SEARCH" in plan[-1] and "decision=?" in plan[-1]


@pytest.mark.slow
def test_a_process_does_not_read_its_own_decisions_back(tmp_path, monkeypatch):
    bandit = bernoulli_bandit(journal=tmp_path / "j.db")
    bandit.select()
    read = []
    monkeypatch.setattr(bandit._journal.store, "read", lambda *args, **options: read.append(args[1]) or [])
    for _ in range(3):
        bandit.select()
    assert read == [2, 3, 4] and bandit._experiment.projection.num_played.sum() == 4


def test_a_process_learns_after_its_own_checkpoint_without_trying_again(tmp_path, monkeypatch):
    bandit = bernoulli_bandit(journal=tmp_path / "j.db")
    decision = bandit.select()
    save_checkpoint(bandit._experiment)
    tried, append = [], bandit._journal.store.append
    monkeypatch.setattr(bandit._journal.store, "append", lambda *a, **o: tried.append(a[1]) or append(*a, **o))
    bandit.update(decision, 1)
    assert len(tried) == 1 and bandit.num_rewards == 1
    assert bandit._experiment.projection.position == bandit._journal.store.last_position("default") == 4


@pytest.mark.slow
def test_warmed_up_batches_compile_nothing_later(count_compilations):
    bandit = bernoulli_bandit()
    bandit.warm_up(batches=True)
    with count_compilations() as names:
        for num in (2, 12, 40, 70):
            decisions = bandit.select_many(num_decisions=num)
            bandit.update_many(decisions=decisions, rewards=[1] * num)
    assert not names
