"""Cost of full durability: decisions and rewards a second in batches, and the latency of a single one.

Run by hand: python tests/benchmarks/bench_journal.py [--folder FOLDER] [--postgres URL] [--rounds 20], or with --replay 11000
to replay a journal that three workers wrote. Three Bernoulli arms,
the exact engine, M = 1,000; every call returns when its events are on the disk. The time of a bare fsync of 4 kB is printed
first: no durable call can be faster. Batches are of 500 decisions and their 500 rewards; single calls are medians.
"""

import argparse
import os
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


def main():
    """Print one line per place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where the SQLite file is put (a temporary folder)")
    parser.add_argument("--postgres", help="URL of a PostgreSQL database")
    parser.add_argument("--replay", type=int, metavar="N", help="replay N decisions of three workers, and nothing else")
    parser.add_argument("--rounds", type=int, default=20, help="batches of 500 (%(default)s)")
    arguments = parser.parse_args()
    model = RewardModel(conversion, 3)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
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
