"""The service under load: processes that are killed, a database that stops, hostile requests. The journal is checked after."""

import contextlib
import json
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "journal"):
    sys.path.insert(0, str(folder))
import postgres_server  # noqa: E402
from service_process import CONFIG, PROGRAM, running  # noqa: E402

from ppl_bandit.journal.events import CORRECTED, DECIDED, REWARDED  # noqa: E402
from ppl_bandit.journal.journal import Journal  # noqa: E402
from ppl_bandit.serving import Client  # noqa: E402
from ppl_bandit.serving.client import ServiceError  # noqa: E402

pytestmark = pytest.mark.slow

NUM_CLIENTS = 64
DEADLINE = 5.0


SHIFTED = """
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
context = {"age": jnp.zeros(()), "weights": jnp.zeros(2)}


def model(arm, context):
    with numpyro.plate("arms", num_arms):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(level[arm] + slope * context["age"] + context["weights"].sum(-1), 1.0))
"""


@pytest.fixture
def folder(tmp_path, warm_starts):
    (tmp_path / "programs.py").write_text(PROGRAM)
    return tmp_path


def reward_of(decision):
    return int(decision.encode()[-1]) % 2


class Load:
    """Clients that decide, report the reward of what was acknowledged, and repeat what was not, with the same id."""

    def __init__(self, service, timeout=600):  # a start may take minutes on a busy machine
        self.service, self.timeout, self.stopping = service, timeout, threading.Event()
        self.decided, self.rewarded, self.slowest, self.faults = {}, set(), 0.0, []
        self.threads = [threading.Thread(target=self.play, args=(number,)) for number in range(NUM_CLIENTS)]
        [thread.start() for thread in self.threads]

    def play(self, number):
        client = Client(self.service.url, timeout=self.timeout)
        exchange = client._exchange

        def timed(*args):
            begun = time.monotonic()
            try:
                return exchange(*args)
            finally:
                self.slowest = max(self.slowest, time.monotonic() - begun)

        client._exchange = timed
        count = 0
        while not self.stopping.is_set():
            count += 1
            request = f"{number} {count}"
            try:
                made = client.decide(request_id=request, unit=f"unit {number} {count // 2}")
                self.decided[request] = made
                if client.reward(made["id"], reward_of(made["id"])) or count % 2:
                    self.rewarded.add(made["id"])
            except ServiceError as error:
                self.faults.append((error.status, error.code, str(error)))

    def finish(self):
        self.stopping.set()
        [thread.join(700) for thread in self.threads]

    def check(self, url, program):
        """Compare the journal with what was acknowledged, and compute every decision again."""
        with Journal(url, read_only=True) as journal:
            journal.verify()
            events = journal.events()
        made = [event.decision for event in events if event.kind == DECIDED]
        rewards = Counter(event.decision for event in events if event.kind in (REWARDED, CORRECTED))
        assert len(made) == len(set(made))
        assert {answer["id"] for answer in self.decided.values()} <= set(made)
        assert self.rewarded <= set(rewards) and set(rewards.values()) <= {1}
        values = {event.decision: event.body["reward"]["reward"] for event in events if event.kind == REWARDED}
        assert all(value == reward_of(decision) for decision, value in values.items())
        units = Counter(answer["id"] for answer in self.decided.values())
        assert set(units.values()) <= {1, 2}  # two requests a unit: one decision
        replayed(url, program)


def replayed(url, program):
    """Compute every decision of a journal again in a process of its own, and return what it prints as JSON."""
    command = [sys.executable, "-m", "ppl_bandit.commands.cli", "journal", str(url), "replay", "--json"]
    found = subprocess.run([*command, "--model", str(program)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return json.loads(found.stdout)


def test_twenty_kills_lose_nothing_and_double_nothing(folder):
    with running(folder, ["programs.py", "--journal", "e.db"]) as service:
        load = Load(service)
        for _ in range(20):
            time.sleep(random.uniform(0.5, 2))
            service.process.kill()
            service.process.wait()
            service.start()
        time.sleep(1)
        load.finish()
        answered = dict(list(load.decided.items())[-50:])
        client = Client(service.url)
        for request, made in answered.items():  # a repeated request gives the same body, from another process too
            number, count = request.split()
            assert client.decide(request_id=request, unit=f"unit {number} {int(count) // 2}") == made
        assert service.stop() < 10
    assert len(load.decided) > 200 and load.faults == []
    load.check(folder / "e.db", folder / "programs.py")


@pytest.mark.skipif(not postgres_server.find_binaries(), reason="PostgreSQL is not installed")
def test_a_database_that_stops_six_times_loses_nothing(folder):
    server = postgres_server.Server()
    try:
        with running(folder, ["programs.py", "--journal", server.url]) as service:
            load = Load(service)
            for _ in range(6):
                time.sleep(2)
                server.stop()
                time.sleep(1)
                assert service.call("GET", "/healthz")[0] == 200
                server.start()
                wait_until(lambda: service.call("GET", "/readyz")[0] == 200)
            time.sleep(2)
            load.finish()
            assert service.stop() < 10
        assert len(load.decided) > 200 and load.faults == []
        assert load.slowest < DEADLINE + 2
        load.check(server.url, folder / "programs.py")
    finally:
        server.remove()


def wait_until(condition, seconds=30):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.2)


def test_a_stop_under_load_loses_no_answer_and_ends_within_ten_seconds(folder):
    with running(folder, ["programs.py", "--journal", "e.db"]) as service:
        load = Load(service, timeout=5)
        time.sleep(3)
        seconds = service.stop()
        load.stopping.set()
        for thread in load.threads:
            thread.join(90)
    assert seconds < 10 and len(load.decided) > 100
    load.check(folder / "e.db", folder / "programs.py")


@pytest.mark.parametrize("num_waiting", [0, 4])
def test_a_stop_while_the_journal_is_locked_ends_within_ten_seconds(num_waiting, folder):
    with running(folder, ["programs.py", "--journal", "e.db"]) as service, ThreadPoolExecutor(8) as pool:
        made = [Client(service.url).decide() for _ in range(4)]
        lock = sqlite3.connect(folder / "e.db", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        path = "/v1/experiments/default"
        waiting = [pool.submit(service.call, "POST", f"{path}/decisions", {}) for _ in range(num_waiting)]
        bodies = [{"decision": one["id"], "reward": 1} for one in made[:num_waiting]]
        waiting += [pool.submit(service.call, "POST", f"{path}/rewards", body) for body in bodies]
        time.sleep(0.5)
        seconds = service.stop(30)
        assert seconds < 9, seconds
        assert {one.result()[0] for one in waiting} <= {504}
        lock.close()


def test_a_journal_that_is_locked_answers_within_the_deadline_and_then_works_again(folder):
    """While the file is locked, requests are answered 504 at their deadline, or 503 where the queue is full."""
    with running(folder, ["programs.py", "--journal", "e.db"]) as service:
        before = service.call("GET", "/v1/experiments/default/history")[2].count("\n")
        lock = sqlite3.connect(folder / "e.db", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        statuses, seconds = Counter(), []

        def send():
            begun = time.monotonic()
            status, headers, problem = service.call(
                "POST", "/v1/experiments/default/decisions/batch", {"requests": [{}] * 500}
            )
            seconds.append(time.monotonic() - begun)
            statuses[status, problem["code"], headers["Retry-After"]] += 1

        threads = [threading.Thread(target=send) for _ in range(12)]
        [thread.start() for thread in threads]
        wait_until(lambda: service.call("GET", "/readyz")[0] == 503, 8)  # it was not written for 5 s
        [thread.join() for thread in threads]
        lock.execute("ROLLBACK")
        lock.close()
        assert max(seconds) < DEADLINE + 2
        assert statuses[503, "queue_full", "1"] >= 6  # 2,048 rows wait, and one batch is at the journal
        assert set(statuses) <= {(503, "queue_full", "1"), (504, "deadline", "1"), (504, "journal_timeout", "1")}
        wait_until(lambda: service.call("GET", "/readyz")[0] == 200)
        assert service.call("POST", "/v1/experiments/default/decisions", {})[0] == 200
        after = service.call("GET", "/v1/experiments/default/history")[2].count("\n")
        assert after - before <= 501  # at most the batch that was at the journal, and the decision after it


def test_hostile_requests_leave_it_serving(folder):
    """Malformed, oversized, slow and half-closed requests."""
    rng = random.Random(0)
    head = b"POST /v1/experiments/default/decisions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    heads = [head, head.replace(b"decisions", b"arms")]
    heads += [head.replace(b"POST", b"PUT").replace(b"decisions", b"decisions/d/reward")]
    heads += [head.replace(b"/v1/experiments/default/decisions", b"/login")]
    cases = [
        b"\x00" * 50,
        b"GET / HTTP/9.9\r\n\r\n",
        head + b"Content-Length: 10\r\n\r\n{",
        head + b"Content-Length: abc\r\n\r\n{}",
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        head + b"Content-Length: 99999999999\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFF\r\n" + b"x" * 1000,
        head + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
        b"POST " + b"/" * 40_000 + b" HTTP/1.1\r\n\r\n",
        head + b"Content-Length: 2\r\n\r\n\xff\xfe",
        head + b"Content-Length: 2000\r\n\r\n" + b"[" * 2000,
        head + b"Content-Length: 18\r\n\r\n" + b'{"context": 1e999}',
        head + b"Content-Length: 2\r\n\r\n{}" * 5,
        head[:40],
        rng.randbytes(200),
    ]

    def send(number):
        for _ in range(number):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", service.port), 0.3) as caller:
                caller.sendall(rng.choice(cases).replace(head, rng.choice(heads)))
                if rng.random() < 0.3:
                    caller.shutdown(socket.SHUT_WR)
                if rng.random() < 0.5:
                    caller.recv(100)

    with running(folder, ["programs.py", "--journal", "e.db"]) as service, contextlib.ExitStack() as open_callers:
        slow = []
        for number in range(300):
            caller = open_callers.enter_context(socket.create_connection(("127.0.0.1", service.port)))
            own = heads[number % len(heads)]
            caller.sendall(own[: 10 + number % 30] if number % 3 else own + b"Content-Length: 100\r\n\r\n{")
            slow.append(caller)
        threads = [threading.Thread(target=send, args=(10_000 // 16,)) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        time.sleep(12)
        for caller in slow:  # those that send nothing more were ended
            caller.settimeout(1)
            while caller.recv(10_000):
                pass
        assert service.call("POST", "/v1/experiments/default/decisions", {})[0] == 200
        assert service.stop() < 10
    with Journal(folder / "e.db", read_only=True) as journal:
        journal.verify()


def test_schemathesis_finds_nothing(folder):
    command = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("schemathesis is not installed")
    (folder / "experiments.toml").write_text(CONFIG.replace("JOURNAL", "e.db"))
    keys = {"decide": ("decide", ()), "admin": ("admin", ())}
    with running(folder, ["experiments.toml"], keys) as service:
        for key, choice in (("decide", "--include-tag"), ("admin", "--exclude-tag")):
            found = subprocess.run(
                [
                    *(command, "--config-file", str(Path(__file__).with_name("schemathesis.toml"))),
                    *("run", f"{service.url}/openapi.json", choice, "decide", choice, "OpenFeature", "--seed", "1"),
                    *("-H", f"Authorization: Bearer {service.keys[key]}", "--no-color", "-n", "100"),
                    *("--generation-database", ":memory:"),
                ],
                capture_output=True,
                text=True,
                cwd=folder,
            )
            assert found.returncode == 0, found.stdout[-6000:]


def test_propensities_are_the_frequencies_of_the_arms_and_replay_agrees(folder):
    """20,000 decisions from one posterior, alone and in batches, of two processes at the same time."""
    start = (folder, ["programs.py", "--journal", "e.db"])
    with running(*start) as service, running(*start) as other:
        client = Client(service.url)
        for count in range(9):  # so few that every arm still has a chance
            client.reward(client.decide()["id"], count % 2)
        answers = []
        lock = threading.Lock()

        def decide():
            own = Client(service.url)
            found = [own.decide() for _ in range(125)]
            with lock:
                answers.extend(found)

        threads = [threading.Thread(target=decide) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for _ in range(9):
            with ThreadPoolExecutor(2) as pool:
                rows = [pool.submit(Client(own.url).decide_many, [{}] * 1000) for own in (service, other)]
                answers += [answer for own in rows for answer in own.result()]
        assert service.stop() < 10 and other.stop() < 10
    with Journal(folder / "e.db", read_only=True) as journal:
        events = {event.decision: event for event in journal.events() if event.kind == DECIDED}
    assert len(answers) == 20_000 and len({event.stream for event in events.values()}) > 1
    # An arm's draw has variance e (1 - e) given its propensity e, so the sum over decisions is normal.
    for arm in range(3):
        mine = [answer for answer in answers if answer["arm"] == arm]
        probs = np.array([events[answer["id"]].body["propensities"][arm] for answer in answers])
        assert all(answer["propensity"] == events[answer["id"]].body["propensities"][arm] for answer in mine)
        variance = (probs * (1 - probs)).sum()
        assert variance > 100 and abs(len(mine) - probs.sum()) < 4 * np.sqrt(variance)
    assert replayed(folder / "e.db", folder / "programs.py")


def test_requests_that_arrive_together_do_not_refuse_each_other(folder):
    """A wrong context among right ones is refused alone, though they are decided in one call of the library."""
    (folder / "shifted.py").write_text(SHIFTED)
    path = "/v1/experiments/default/decisions"
    right = {"age": 0.5, "weights": [1, 2]}
    wrong = [None, 3, {"age": 0.5}, {**right, "more": 1}, {"age": "x", "weights": [1, 2]}, {"age": 1, "weights": [1]}]
    found = {}

    def send(index, context):
        found[index] = service.call("POST", path, {"context": context})

    threads = [threading.Thread(target=send, args=item) for item in enumerate([right, *wrong] * 3)]
    with running(folder, ["shifted.py", "--journal", "e.db"]) as service:
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        body = {"context": {"targetingKey": "u", "age": 1, "weights": [1, 2], "plan": "free"}}
        assert service.call("POST", "/ofrep/v1/evaluate/flags/default", body)[2]["reason"] == "SPLIT"
        del body["context"]["age"]
        assert service.call("POST", "/ofrep/v1/evaluate/flags/default", body)[2]["errorCode"] == "INVALID_CONTEXT"
    size = 1 + len(wrong)
    assert {index: found[index][0] for index in found} == {i: 422 if i % size else 200 for i in range(3 * size)}
    assert all(found[index][2]["code"] == "invalid_context" for index in found if index % size)


def test_rewards_that_arrive_together_wait_for_no_compilation_where_the_engine_stores_its_rows(folder):
    """A logistic program: no reward is late, though an update of so many rows was never compiled."""
    text = SHIFTED.replace("dist.Normal(level", "dist.Bernoulli(logits=level").replace(".sum(-1), 1.0)", ".sum(-1))")
    (folder / "logistic.py").write_text(text)
    context = {"age": 0.5, "weights": [1, 2]}
    with running(folder, ["logistic.py", "--journal", "e.db"]) as service, ThreadPoolExecutor(16) as pool:
        client = Client(service.url, timeout=DEADLINE)
        made = client.decide_many([{"context": context}] * 48)
        assert list(pool.map(lambda one: client.reward(one["id"], reward_of(one["id"])), made)) == [True] * 48
        assert service.call("GET", "/v1/experiments/default", None)[2]["engine"] == "reweight"
