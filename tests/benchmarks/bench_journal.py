"""Cost of full durability: decisions and rewards a second in batches, and the latency of a single one.

Run by hand: python tests/benchmarks/bench_journal.py [--folder FOLDER] [--postgres URL] [--rounds 20], or with --replay 11000
to replay a journal that three workers wrote, or with --unit 1000000 to ask for a known unit in a journal of so many events,
which are copies of one decision and its reward. Three Bernoulli arms,
the exact engine, M = 1,000; every call returns when its events are on the disk. The time of a bare fsync of 4 kB is printed
first: no durable call can be faster. Batches are of 500 decisions and their 500 rewards; single calls are medians.
"""

import argparse
import os
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Bandit, RewardModel
from ppl_bandit.journal.events import DECIDED
from ppl_bandit.journal.replay import replay

BATCH = 500
_NUM_RECENT = 200  # rewards that are looked at for a late decision


def conversion(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([3]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def fsync_time(folder):
    """Median seconds of writing and syncing 4 kB."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure(model, place, rounds):
    """Return decisions and rewards a second in batches, and the median seconds of select and of update."""
    bandit = Bandit(model, journal=place, name=None if place is None else f"bench-{time.time()}")
    rng = np.random.default_rng(0)

    def batch():
        decisions = bandit.select_many(num_decisions=BATCH)
        bandit.update_many(decisions=decisions, rewards=rng.integers(0, 2, BATCH).astype(float))

    batch()  # compiles
    start = time.perf_counter()
    for _ in range(rounds):
        batch()
    rate = rounds * BATCH / (time.perf_counter() - start)
    selects, updates = [], []
    for i in range(200):
        start = time.perf_counter()
        decision = bandit.select()
        middle = time.perf_counter()
        bandit.update(decision, i % 2)
        selects.append(middle - start)
        updates.append(time.perf_counter() - middle)
    return rate, float(np.median(selects[20:])), float(np.median(updates[20:]))


def measure_replay(model, place, num_decisions, num_workers=3):
    """Return the share of late decisions, and seconds per decision of verifying, opening and replaying.

    The journal is as several workers write it: each decides from what it read last, while others report rewards.
    """
    bandits = [Bandit(model, journal=place) for _ in range(num_workers)]
    rng, waiting, old = np.random.default_rng(0), [], [bandit._experiment.catch_up() for bandit in bandits]
    all_arms = np.ones(3, bool)
    for number in range(num_decisions):
        worker = number % num_workers
        (event,) = bandits[worker]._experiment.decide(old[worker], all_arms, None, None)
        waiting.append(event.decision)
        if len(waiting) >= 20:
            bandits[worker].update_many(decisions=waiting, rewards=rng.integers(0, 2, len(waiting)).astype(float))
            waiting.clear()
        if number % 5 == 0:
            old[worker] = bandits[worker]._experiment.catch_up()
    store, build = bandits[0]._experiment.store, bandits[0]._build
    decided = [event for event in store.read("default", whole=True) if event.kind == DECIDED]
    changed = [event.position for event in store.read("default") if event.kind != DECIDED]
    num_late = sum(
        any(event.body["absorbed"] < p < event.position for p in changed[-_NUM_RECENT:]) for event in decided[-200:]
    )
    times = [time.perf_counter()]
    assert store.find_damage("default") is None
    times.append(time.perf_counter())
    Bandit(model, journal=place)
    times.append(time.perf_counter())
    task, prior = build([0, 1, 2])
    found = replay(store, "default", 0, task, prior, build)
    times.append(time.perf_counter())
    assert (found.num_checked, found.position) == (num_decisions, None), found.difference
    return num_late / 200, np.diff(times) / num_decisions


def measure_known_unit(model, path, num_events):
    """Return CPU seconds of each of 2,000 calls for a known unit, with 3 events in the journal and with many."""
    with Bandit(model, journal=path) as bandit:
        bandit.update(bandit.select(unit="known"), 1)
        ask = lambda: bandit.select(unit="known")  # noqa: E731
        few = cpu_of_each(ask)
        with sqlite3.connect(path) as file:
            made, rewarded = file.execute("SELECT * FROM ppl_bandit_events ORDER BY position DESC LIMIT 2").fetchall()[
                ::-1
            ]
            tables = {
                name: list(file.execute(f"SELECT * FROM ppl_bandit_{name}").fetchone()) for name in ("personal", "keys")
            }
            for number in range(num_events // 2):
                id, owner = f"{number:032x}", f"unit:{number:064x}"
                for event in (made, rewarded):
                    position = event[1] + 2 * (number + 1)
                    row = [event[0], position, event[2], id, f"{position:032x}", *event[5:]]
                    file.execute(f"INSERT INTO ppl_bandit_events VALUES ({', '.join('?' * len(row))})", row)
                    personal = [event[0], position, owner, *tables["personal"][3:]]
                    file.execute("INSERT INTO ppl_bandit_personal VALUES (?, ?, ?, ?, ?)", personal)
                key = [event[0], owner, id, owner, ""]
                file.execute("INSERT INTO ppl_bandit_keys VALUES (?, ?, ?, ?, ?)", key)
            end = "UPDATE ppl_bandit_heads SET position = ?"
            file.execute(end, (position,))
        experiment = bandit._experiment
        experiment.projection = experiment.projection._replace(position=position)  # the copies are not learnt
        return few, cpu_of_each(ask)


def cpu_of_each(call, num_calls=2000):
    seconds = np.empty(num_calls)
    for number in range(num_calls):
        start = time.thread_time()
        call()
        seconds[number] = time.thread_time() - start
    return seconds


def main():
    """Print one line per place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where the SQLite file is put (a temporary folder)")
    parser.add_argument("--postgres", help="URL of a PostgreSQL database")
    parser.add_argument("--replay", type=int, metavar="N", help="replay N decisions of three workers, and nothing else")
    parser.add_argument("--unit", type=int, metavar="N", help="ask for a known unit at N events, and nothing else")
    parser.add_argument("--rounds", type=int, default=20, help="batches of 500 (%(default)s)")
    arguments = parser.parse_args()
    model = RewardModel(conversion, 3)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.unit:
            found = measure_known_unit(model, Path(folder) / "unit.db", arguments.unit)
            for num_events, seconds in zip((3, arguments.unit), found, strict=True):
                error = 1e3 * seconds.std() / seconds.size**0.5
                print(
                    f"known unit at {num_events} events: median {1e3 * np.median(seconds):.3f} ms, mean "
                    f"{1e3 * seconds.mean():.3f} ms (standard error {error:.3f})"
                )
            return
        if arguments.replay:
            late, seconds = measure_replay(model, Path(folder) / "replay.db", arguments.replay)
            verify, reopen, replayed = 1e3 * seconds
            print(
                f"{arguments.replay} decisions of three workers, {late:.0%} of the last 200 late; milliseconds per decision: "
                f"verify {verify:.3f}, open again {reopen:.3f}, replay {replayed:.2f}"
            )
            return
        print(f"fsync of 4 kB: {1e3 * fsync_time(folder):.2f} ms")
        places = {"memory": None, "sqlite": Path(folder) / "bench.db"}
        if arguments.postgres:
            places["postgresql"] = arguments.postgres
        for name, place in places.items():
            rate, select, update = measure(model, place, arguments.rounds)
            print(
                f"{name:<10} {rate:7.0f} decisions and as many rewards a second in batches of {BATCH}; "
                f"select {1e3 * select:.2f} ms, update {1e3 * update:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
