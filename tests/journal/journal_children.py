"""What the processes of the journal's tests do; one of them runs without jax, so that it starts in no time.

As a script: `python journal_children.py PATH` records decisions and rewards until it is killed, and prints each as soon as
the journal has acknowledged it.
"""

import os
import queue
import random
import sys
import threading
import time
import types
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ppl_bandit"


def record_forever(path, *, is_nobody=False):
    """Record decisions and rewards with the journal's own code, and nothing else of the package."""
    for name in ("ppl_bandit", "ppl_bandit.journal"):
        module = types.ModuleType(name)
        module.__path__ = [str(PACKAGE.parent / name.replace(".", "/"))]
        sys.modules[name] = module
    from ppl_bandit.journal.events import DECIDED, REWARDED, new_event, new_id
    from ppl_bandit.journal.stores.sql import SqlStore
    from ppl_bandit.journal.stores.sqlite import SqliteBackend

    if is_nobody and os.geteuid() == 0:
        os.seteuid(65534)
    store = SqlStore(SqliteBackend(path))
    number = sum(event.kind == DECIDED for event in store.read("x"))
    while True:
        decision = new_id()
        body = {"absorbed": 0, "propensities": [0.5] * 8}
        event = new_event(DECIDED, body, decision=decision, number=number, arm=0)
        (made,) = store.append("x", [event])
        print("decided", decision, flush=True)
        number += 1
        if number % 3:
            rewards = [new_event(REWARDED, {"reward": {"reward": 1.0}}, decision=decision, arm=0, settles=True)]
            store.append("x", rewards, after=made.position - 1)
            print("rewarded", decision, flush=True)


def conversion(arm):
    import numpyro
    import numpyro.distributions as dist

    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([3]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def open_bandit(url):
    from ppl_bandit import Bandit

    return Bandit(conversion, 3, num_samples=100, journal=url)


def decide_forever(url, pipe):
    """Decide and learn until killed, and tell what was acknowledged."""
    bandit = open_bandit(url)
    rng = random.Random()
    pipe.send(("open", "", 0))
    waiting = []
    while True:
        decision = bandit.select()
        pipe.send(("decided", decision.id, decision.arm))
        waiting.append(decision.id)
        if len(waiting) > rng.randrange(5):
            name = waiting.pop(rng.randrange(len(waiting)))
            bandit.update(name, rng.randrange(2))
            pipe.send(("rewarded", name, 0))


def serve(url, pipe, num_threads):
    """Answer requests of a client, several at once, until told to stop; an answer is sent after the call has returned."""
    bandit = open_bandit(url)
    bandit.warm_up()
    sending = threading.Lock()

    def answer(kind, *arguments):
        start = time.perf_counter()
        if kind == "select":
            decision = bandit.select()
            found = (kind, decision.id, decision.arm)
        else:
            bandit.update(*arguments)
            found = (kind, *arguments)
        with sending:
            pipe.send((*found, time.perf_counter() - start))

    def work():
        while True:
            request = requests.get()
            if request is None:
                return
            try:
                answer(*request)
            except Exception as error:  # the client must see it
                with sending:
                    pipe.send(("error", repr(error), None, 0.0))

    requests = queue.SimpleQueue()
    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    pipe.send(("open", "", None, 0.0))
    while (request := pipe.recv()) is not None:
        requests.put(request)
    for _ in threads:
        requests.put(None)
    for thread in threads:
        thread.join()


def decide_with_others(url, own, queues, num_decisions, results, is_done):
    """Decide, report rewards to whoever, learn what is reported here, and return the posterior once all are done."""
    bandit = open_bandit(url)
    rng = random.Random()

    def learn_one(is_waiting):
        try:
            name, reward = queues[own].get(timeout=0.05) if is_waiting else queues[own].get_nowait()
        except queue.Empty:
            return False
        bandit.update(name, reward)
        results.put(("learnt", own, name))
        return True

    for _ in range(num_decisions):
        decision = bandit.select()
        queues[rng.randrange(len(queues))].put((decision.id, rng.randrange(2)))
        learn_one(False)
    while not is_done.is_set():
        learn_one(True)
    found = bandit.posterior_parameters()["rate"]
    results.put(("posterior", own, (found["concentration1"].tolist(), found["concentration0"].tolist())))


def ask_by_request(url, own, num_requests, pipe, barrier):
    """Ask for the same requests and units as the other processes, in an order of its own, and tell each answer."""
    bandit = open_bandit(url)
    barrier.wait()
    for i in random.Random(own).sample(range(num_requests), num_requests):
        decision = bandit.select(request_id=f"request {i}", unit=f"unit {i}")
        pipe.send((i, decision.id, decision.arm))


if __name__ == "__main__":
    record_forever(sys.argv[1])
