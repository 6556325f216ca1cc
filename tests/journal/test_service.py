"""A web service: several processes with several threads on one journal, killed at random moments, compared with its clients.

The client sends requests to random workers: decisions, late rewards, rewards that it sends twice or to two workers at once.
After a kill it sends again what was not acknowledged. At the end the journal must hold what the client saw, each once.
"""

import multiprocessing
import random
import sys
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from ppl_bandit import Journal
from ppl_bandit.journal.events import DECIDED, REWARDED
from ppl_bandit.journal.replay import replay

sys.path.insert(0, str(Path(__file__).parent))
import journal_children  # noqa: E402
import postgres_server  # noqa: E402

NUM_OUTSTANDING = 6  # requests of one worker that are not answered yet


class Worker:
    """A process, the client's end of its pipe, and the rewards that it has not acknowledged."""

    def __init__(self, context, url, num_threads):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=journal_children.serve, args=(url, theirs, num_threads), daemon=True)
        self.process.start()
        theirs.close()
        self.is_open, self.outstanding = False, Counter()

    def send(self, request):
        self.outstanding[request] += 1
        self.pipe.send(request)

    def receive(self):
        """Return an answer; None if there is none any more."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            return None


def reward_of(decision):
    return int(decision, 16) % 2


class Client:
    """Sends requests to workers, kills some of them, and remembers every acknowledgement."""

    def __init__(self, url, num_workers, num_threads, seed):
        context = multiprocessing.get_context("forkserver")  # forks before jax starts its threads
        context.set_forkserver_preload(["ppl_bandit", "journal_children"])
        self.rng = random.Random(seed)
        self.start = lambda: Worker(context, url, num_threads)
        self.workers = [self.start() for _ in range(num_workers)]
        self.arms, self.rewarded, self.seconds = {}, set(), {"select": [], "update": []}

    def run(self, num_decisions, num_kills):
        """Send requests until so many decisions are acknowledged, with kills in between."""
        kills = sorted(self.rng.randrange(num_decisions // 5, num_decisions) for _ in range(num_kills))
        while len(self.arms) < num_decisions:
            for worker in self.workers:
                while worker.is_open and worker.outstanding.total() < NUM_OUTSTANDING:
                    worker.send(self.request())
            self.receive()
            if kills and len(self.arms) >= kills[0] and all(worker.is_open for worker in self.workers):
                kills.pop(0)
                self.kill(self.rng.randrange(len(self.workers)))

    def request(self):
        waiting = [name for name in self.arms if name not in self.rewarded]
        if waiting and self.rng.random() < 0.5:
            name = self.rng.choice(waiting)  # late, and often already sent to another worker
        elif self.rewarded and self.rng.random() < 0.1:
            name = self.rng.choice(sorted(self.rewarded))  # sent again after it was acknowledged
        else:
            return ("select",)
        return ("update", name, reward_of(name))

    def receive(self):
        by_pipe = {worker.pipe: worker for worker in self.workers}
        ready = wait(list(by_pipe), timeout=120)
        assert ready, "no worker answers"
        for pipe in ready:
            answer = by_pipe[pipe].receive()
            assert answer is not None, "a worker ended"
            self.note(by_pipe[pipe], answer)

    def receive_all(self):
        while any(worker.outstanding.total() or not worker.is_open for worker in self.workers):
            self.receive()

    def note(self, worker, answer):
        kind, name, value, seconds = answer
        assert kind != "error", name
        if kind == "open":
            worker.is_open = True
            return
        worker.outstanding -= Counter([("select",) if kind == "select" else (kind, name, value)])
        self.seconds[kind].append(seconds)
        if kind == "select":
            assert name not in self.arms  # an id is given once
            self.arms[name] = value
        else:
            self.rewarded.add(name)

    def kill(self, index):
        worker = self.workers[index]
        worker.process.kill()
        worker.process.join()
        while (answer := worker.receive()) is not None:  # acknowledged before it died
            self.note(worker, answer)
        self.workers[index] = self.start()

    def finish(self):
        """Send all rewards that were not acknowledged, and end the workers."""
        self.receive_all()
        for name in self.arms:
            if name not in self.rewarded:
                self.rng.choice(self.workers).send(("update", name, reward_of(name)))
        self.receive_all()
        for worker in self.workers:
            worker.pipe.send(None)
            worker.process.join(60)
            assert worker.process.exitcode == 0


def check_journal(url, client):
    """Compare the journal with what the client saw acknowledged."""
    with Journal(url, read_only=True) as journal:
        journal.verify()
        events = journal.events()
        made = {event.decision: event for event in events if event.kind == DECIDED}
        rewards = [event for event in events if event.kind == REWARDED]
        assert len(made) == sum(event.kind == DECIDED for event in events)
        assert {name: made[name].arm for name in client.arms} == client.arms
        assert set(client.arms) == client.rewarded
        assert sorted(event.decision for event in rewards) == sorted(client.rewarded)  # none lost, none doubled
        for event in rewards:
            assert (event.arm, event.body["reward"]) == (
                client.arms[event.decision],
                {"reward": reward_of(event.decision)},
            )
        bandit = journal_children.open_bandit(None)
        task, prior = bandit._build([0, 1, 2])
        found = replay(journal.store, "default", 0, task, prior, bandit._build)
        assert (found.num_checked, found.position) == (len(made), None), found.difference
    # A decision whose worker was killed before it answered is recorded and pending: the client never saw it.
    return len(made) - len(client.arms)


def run_service(url, num_workers, num_threads, num_decisions, num_kills, seed=0):
    client = Client(url, num_workers, num_threads, seed)
    try:
        client.run(num_decisions, num_kills)
        client.finish()
    finally:
        for worker in client.workers:
            worker.process.kill()
    num_unseen = check_journal(url, client)
    assert num_unseen <= num_kills * NUM_OUTSTANDING
    return client


@pytest.mark.slow  # three processes start; test_journal_faults.py kills recorders in the default run
def test_a_service_with_killed_workers_holds_what_its_clients_saw(tmp_path):
    run_service(str(tmp_path / "j.db"), num_workers=2, num_threads=2, num_decisions=60, num_kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_service_under_load_holds_what_its_clients_saw(tmp_path, seed):
    run_service(str(tmp_path / "j.db"), num_workers=3, num_threads=4, num_decisions=4000, num_kills=8, seed=seed)


@pytest.mark.slow
def test_a_service_on_postgresql_holds_what_its_clients_saw():
    pytest.importorskip("psycopg")
    if postgres_server.find_binaries() is None:
        pytest.skip("no PostgreSQL server here: install Debian's postgresql")
    server = postgres_server.Server()
    try:
        run_service(server.url, num_workers=3, num_threads=4, num_decisions=2000, num_kills=5)
    finally:
        server.remove()


if __name__ == "__main__":  # python test_service.py URL: latencies under load
    start = time.perf_counter()
    client = run_service(sys.argv[1], 3, 4, int(sys.argv[2]), 0)
    for kind, seconds in client.seconds.items():
        ranked = sorted(seconds)
        p50, p95 = (1e3 * ranked[int(share * len(ranked))] for share in (0.5, 0.95))
        print(f"{kind}: {len(ranked)} calls, p50 {p50:.0f} ms, p95 {p95:.0f} ms")
    print(f"{time.perf_counter() - start:.0f} s in all")
