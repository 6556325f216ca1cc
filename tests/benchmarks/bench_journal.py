"""Cost of full durability: decisions and rewards a second in batches, and the latency of a single one.

Run by hand: python tests/benchmarks/bench_journal.py [--folder FOLDER] [--postgres URL] [--rounds 20]. Three Bernoulli arms,
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

BATCH = 500


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


def main():
    """Print one line per place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="where the SQLite file is put (a temporary folder)")
    parser.add_argument("--postgres", help="URL of a PostgreSQL database")
    parser.add_argument("--rounds", type=int, default=20, help="batches of 500 (%(default)s)")
    arguments = parser.parse_args()
    model = RewardModel(conversion, 3)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
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
