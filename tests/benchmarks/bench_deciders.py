"""CPU of one thread for each part of an experiment with deciders, and decisions a second from one and two processes.

python tests/benchmarks/bench_deciders.py            # starts a PostgreSQL server of its own
python tests/benchmarks/bench_deciders.py --appends  # instead, decisions a second by the clock: on an idle machine
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "journal")]

from postgres_server import Server  # noqa: E402
from shared_models import bernoulli_bandit, bernoulli_parts  # noqa: E402

from ppl_bandit import Decider  # noqa: E402
from ppl_bandit.deciders.sealer import publish  # noqa: E402
from ppl_bandit.journal.checkpoints import load_checkpoint  # noqa: E402


def cpu(call, num_units=1, repeats=7, num_calls=30):
    """Return the least and the median CPU of a unit over some repeats, in microseconds."""
    call()
    found = []
    for _ in range(repeats):
        begun = time.thread_time()
        for _ in range(num_calls):
            call()
        found.append((time.thread_time() - begun) / num_calls / num_units * 1e6)
    return f"{min(found):8.1f} {float(np.median(found)):8.1f}"


def open_decider(url):
    model, engine = bernoulli_parts(3)
    decider = Decider(url, "bench", model, engine=engine, max_staleness=3600.0, poll_every=3600.0)
    decider.warm_up(batches=True)
    return decider


def parts(url):
    with bernoulli_bandit(journal=url, name="bench", num_samples=1000) as bandit:
        bandit.warm_up(batches=True)
        bandit.update_many(arms=[0, 1, 2] * 10, rewards=[1, 0, 0] * 10)
        bandit._experiment.store.prepare_staging()
        publish(bandit._experiment)
        with open_decider(url) as decider:
            experiment, store = decider._experiment, bandit._experiment.store
            print("us of CPU, least and median of 7 repeats")
            for size in (1, 16, 64, 256):
                num_calls = 100 if size < 64 else 20
                line = cpu(lambda size=size: decider.select_many(num_decisions=size), size, num_calls=num_calls)
                print(f"a decision, batch of {size:3d}            {line}")
            load = lambda: load_checkpoint(experiment.store, "bench", dict(experiment.identity), experiment.initial, 0)  # noqa: E731
            print(f"load a snapshot                    {cpu(load)}")
            num = store.num_staged("bench")
            begun = time.thread_time()
            store.seal("bench")
            print(f"seal a decision ({num:,} in a row)    {(time.thread_time() - begun) / num * 1e6:8.1f}")
            made = iter(bandit.pending()["decision"])

            def learn():
                rows = [{"decision": next(made), "reward": number % 2} for number in range(256)]
                assert bandit.update_each(rows) == [True] * 256

            print(f"learn a reward, batch of 256       {cpu(learn, 256, num_calls=3)}")
            before = bandit._experiment.projection
            print(
                f"publish a snapshot                 {cpu(lambda: publish(bandit._experiment, before._replace(task=None)))}"
            )


def append(url, seconds, num_threads):
    """Print how many decisions this process records in some seconds, by threads that share transactions."""
    with open_decider(url) as decider:
        print("ready", flush=True)
        sys.stdin.readline()
        until, counts = time.monotonic() + seconds, [0] * num_threads

        def work(number):
            while time.monotonic() < until:
                counts[number] += len(decider.select_many(num_decisions=16))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sum(counts), flush=True)


def appends(url, seconds=10.0, num_threads=8):
    bernoulli_bandit(journal=url, name="bench").close()
    for num in (1, 2, 1, 2):
        command = [sys.executable, str(HERE), "--child", url]
        children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num)
        ]
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        total = sum(int(child.communicate()[0]) for child in children)
        load = os.getloadavg()[0]
        print(
            f"{num} processes, {num_threads} threads, batches of 16: {total / seconds:,.0f} decisions/s (load {load:.1f})",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--appends", action="store_true")
    parser.add_argument("--child", metavar="URL")
    given = parser.parse_args()
    if given.child is not None:
        append(given.child, 10.0, 8)
        return
    server = Server()
    try:
        (appends if given.appends else parts)(server.url)
    finally:
        server.remove()


if __name__ == "__main__":
    main()
