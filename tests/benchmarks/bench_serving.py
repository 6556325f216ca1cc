"""The service under load beside the program that one would write without it: rates, CPU of a request, and waiting times.

Run by hand on two otherwise idle cores, client included: python tests/benchmarks/bench_serving.py [ROW ...] [--runs 5]
[--seconds 2] [--only service | naive]. Without a row it measures all of them in under 8 minutes, and prints a table of goals
and medians; runs of the service and of the naive program take turns. Every answer is sent after its commit, so latencies are
compared with the time of writing and syncing 4 kB, measured beside them. CPU us are those of the serving process for each
request (in batches: for each decision); where a machine does something else at the same time, they alone mean something.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

for folder in ("serving", "journal"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
import postgres_server  # noqa: E402
from service_process import ROOT, free_port, running  # noqa: E402

LINEAR = """
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
context = jnp.zeros(5)


def model(arm, context):
    with numpyro.plate("arms", num_arms):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(5), 1.0).to_event(1))
    mean = (weights[arm] * context).sum(-1)
    numpyro.sample("reward", LIKELIHOOD)
"""
PROGRAMS = {
    "bernoulli": """
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))
""",
    "linear": LINEAR.replace("LIKELIHOOD", "dist.Normal(mean, 1.0)"),
    "logistic": LINEAR.replace("LIKELIHOOD", "dist.Bernoulli(logits=mean)"),
}
NAIVE = """
import sys

import uvicorn
from fastapi import FastAPI
from program import model
from pydantic import BaseModel

import program
from ppl_bandit import Bandit

bandit = Bandit(model, num_arms=3, context=getattr(program, "context", None), journal=sys.argv[1])
app = FastAPI()


class Asked(BaseModel):
    context: list[float] | None = None


class AskedMany(BaseModel):
    requests: list[Asked]


class Reported(BaseModel):
    decision: str
    reward: float


def answer(made):
    probs = made.best_arm_probs.tolist()
    return {"id": made.id, "arm": made.arm, "propensity": made.propensity, "best_arm_probs": probs}


@app.post("/v1/experiments/default/decisions")
def decide(asked: Asked):
    return answer(bandit.select(asked.context))


@app.post("/v1/experiments/default/decisions/batch")
def decide_many(asked: AskedMany):
    return {"decisions": [answer(bandit.select(one.context)) for one in asked.requests]}


@app.post("/v1/experiments/default/rewards")
def learn(reported: Reported):
    bandit.update(reported.decision, reported.reward)
    return {"recorded": True}


bandit.update(bandit.select(program.context if hasattr(program, "context") else None), 1.0)
uvicorn.run(app, port=int(sys.argv[2]), access_log=False, log_level="warning")
"""
CONTEXT = [0.1, -0.2, 0.3, -0.4, 0.5]
DECISIONS, REWARDS = "/v1/experiments/default/decisions", "/v1/experiments/default/rewards"
MAX_OPEN = 512  # requests that wait for their answers in the open loop


class Measured(NamedTuple):
    """One run: requests (or decisions of batches) a second, CPU us of each, and latencies in ms."""

    rate: float
    cpu: float
    latencies: np.ndarray
    num_refused: int = 0

    def at(self, quantile):
        return float(np.quantile(self.latencies, quantile))


class Connection(asyncio.Protocol):
    """One connection: sends a request, and calls back with the status and the body of its answer."""

    def __init__(self):
        self.parts, self.done = b"", None

    def connection_made(self, transport):
        self.transport = transport

    def send(self, request, done):
        self.done = done
        self.transport.write(request)

    def data_received(self, data):
        self.parts += data
        head, found, body = self.parts.partition(b"\r\n\r\n")
        if found and len(body) >= int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]):
            self.parts, done = b"", self.done
            done(int(head[9:12]), body)


def request(path, body):
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def decide(context=None):
    return request(DECISIONS, {} if context is None else {"context": context})


def reward(answer):
    decision = json.loads(answer)["id"]
    return request(REWARDS, {"decision": decision, "reward": int(decision.encode()[-1]) % 2})


def cpu_seconds(process):
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def connect(port, number):
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(number)]


async def closed_loop(service, num_clients, seconds, script, size=1):
    """Let clients send their next request as soon as the last was answered.

    Args:
        script: (answer or None) -> the next request of a client.
        size: decisions of a request.
    """
    clients = await connect(service.port, num_clients)
    latencies, refused, loop = [], 0, asyncio.get_running_loop()
    begun, cpu = time.perf_counter(), cpu_seconds(service.process.pid)
    finished, num_open = loop.create_future(), num_clients

    def play(client, answer):
        nonlocal num_open
        if time.perf_counter() - begun >= seconds:
            num_open -= 1
            if not num_open:
                finished.set_result(None)
            return
        sent = time.perf_counter()

        def done(status, body):
            nonlocal refused
            latencies.append(time.perf_counter() - sent)
            refused += status != 200
            play(client, body if status == 200 else None)

        client.send(script(client, answer), done)

    for client in clients:
        play(client, None)
    await finished
    return measured(service, clients, begun, cpu, latencies, refused, size)


async def open_loop(service, rate, seconds, script):
    """Send requests at a fixed rate, whether earlier ones were answered or not; latencies count from the planned time.

    A service that cannot follow is given up after three times as long.

    Args:
        script: (answer or None) -> the next request; an answered decision is followed by its reward at once.
    """
    idle = await connect(service.port, MAX_OPEN)
    clients, latencies, refused, num_open = list(idle), [], 0, 0
    begun, cpu = time.perf_counter(), cpu_seconds(service.process.pid)

    def send(planned, answer):
        nonlocal num_open
        client, num_open = idle.pop(), num_open + 1

        def done(status, body):
            nonlocal refused, num_open
            latencies.append(time.perf_counter() - planned)
            refused, num_open = refused + (status != 200), num_open - 1
            idle.append(client)
            if status == 200 and b'"id"' in body and script(None, body) is not None:
                send(time.perf_counter(), body)

        client.send(script(None, answer), done)

    ends = begun + 3 * seconds
    for number in range(int(rate * seconds)):
        planned = begun + number / rate
        while (ahead := planned - time.perf_counter()) > 0 or not idle:
            await asyncio.sleep(max(ahead, 0.0005))
        if time.perf_counter() > ends:
            break
        send(planned, None)
        if number % 8 == 0:
            await asyncio.sleep(0)
    while num_open and time.perf_counter() < ends:
        await asyncio.sleep(0.001)
    return measured(service, clients, begun, cpu, latencies, refused)


def measured(service, clients, begun, cpu, latencies, refused, size=1):
    seconds = time.perf_counter() - begun
    number = size * len(latencies)
    for client in clients:
        client.transport.close()
    used = 1e6 * (cpu_seconds(service.process.pid) - cpu) / number
    return Measured(number / seconds, used, 1000 * np.array(latencies), refused)


def in_turn(client, answer):
    """Decide and report the reward in turn."""
    if answer is None or b'"id"' not in answer:
        return decide()
    return reward(answer)


def fsync_times(folder):
    """Milliseconds of writing and syncing 4 kB, 300 times."""
    times = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(300):
            start = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            os.fsync(file.fileno())
            times.append(1000 * (time.perf_counter() - start))
    return np.array(times)


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        place: (program, kind of journal); lines of one place share a service.
        play: (service, seconds) -> a run.
        goal_of: rate or latency.
    """

    what: str
    goal: str
    place: tuple[str, str]
    play: Callable
    goal_of: str = "rate"

    def show(self, found):
        refused = f", {found.num_refused} refused" if found.num_refused else ""
        rate = f"{found.rate:,.0f}/s at {found.cpu:.0f} us"
        if self.goal_of == "rate":
            return rate + refused
        return f"{found.at(0.5):.1f} / {found.at(0.99):.1f} ms, {rate}{refused}"

    def gain(self, service, naive):
        """Return how many times better the service is than the naive program."""
        return service.rate / naive.rate if self.goal_of == "rate" else naive.at(0.99) / service.at(0.99)


def decide_only(num_clients):
    return lambda service, seconds: closed_loop(service, num_clients, seconds, lambda client, answer: decide())


def batches(context=None):
    rows = request(f"{DECISIONS}/batch", {"requests": [{} if context is None else {"context": context}] * 1000})
    return lambda service, seconds: closed_loop(service, 1, seconds, lambda client, answer: rows, 1000)


def decisions_at(rate):
    return lambda service, seconds: open_loop(
        service, rate, seconds, lambda client, answer: None if answer else decide()
    )


def decisions_and_rewards_at(rate, context):
    def script(client, answer):
        return decide(context) if answer is None else reward(answer)

    return lambda service, seconds: open_loop(service, rate, 2 * seconds, script)


BERNOULLI = ("bernoulli", "sqlite")
ROWS = {
    "decisions": Row("durable decisions, 64 clients", "2,800/s at 260 us", BERNOULLI, decide_only(64)),
    "in_turn": Row(
        "decision and reward in turn, 64 clients",
        "2,400/s",
        BERNOULLI,
        lambda service, seconds: closed_loop(service, 64, seconds, in_turn),
    ),
    "one_client": Row("p50 / p99 at one client", "fsync + 1.5 / + 8 ms", BERNOULLI, decide_only(1), "latency"),
    "open_loop": Row("1,000 decisions a second, p50 / p99", "4 / 15 ms", BERNOULLI, decisions_at(1000), "latency"),
    "batches": Row("decisions in batches of 1,000", "10,000/s", BERNOULLI, batches()),
    "linear": Row("the same, linear D = 5", "7,000/s", ("linear", "sqlite"), batches(CONTEXT)),
    "postgres": Row("PostgreSQL: decisions, 64 clients", "2,500/s", ("bernoulli", "postgres"), decide_only(64)),
    "logistic": Row(
        "logistic: 200 decisions and 200 rewards a second, p50 / p99",
        "p99 100 ms, 0 refused",
        ("logistic", "sqlite"),
        decisions_and_rewards_at(200, CONTEXT),
        "latency",
    ),
}


@contextlib.contextmanager
def journal_of(kind, folder):
    """Yield where a journal is: a new file, or a server of its own."""
    if kind == "sqlite":
        yield str(folder / "e.db")
        return
    server = postgres_server.Server()
    try:
        yield server.url
    finally:
        server.remove()


@contextlib.contextmanager
def naive(folder, journal):
    """Run the naive program, which has learnt one reward, so that its functions are compiled."""
    (folder / "naive.py").write_text(NAIVE)
    port = free_port()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([sys.executable, "naive.py", journal, str(port)], cwd=folder, env=environment)
    try:
        for _ in range(1200):
            assert process.poll() is None, "the naive program failed"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield SimpleNamespace(port=port, process=process)
    finally:
        process.kill()
        process.wait()


def median_runs(row, services, number, seconds):
    """Return the run of the median rate of each service; the first runs are short and do not count."""
    found = [[] for _ in services]
    for index in range(number + 1):
        for service, runs in zip(services, found, strict=True):
            runs.append(asyncio.run(row.play(service, seconds if index else min(seconds, 0.5))))
    return [sorted(runs[1:], key=lambda one: one.rate)[number // 2] for runs in found]


def measure(place, names, arguments):
    """Yield the lines of the rows of one place."""
    program, kind = place
    with contextlib.ExitStack() as running_here:
        services = []
        for who in ("service", "naive"):
            if arguments.only not in (None, who):
                continue
            folder = Path(running_here.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
            journal = running_here.enter_context(journal_of(kind, folder))
            (folder / "program.py").write_text(PROGRAMS[program])
            start = (
                running(folder, ["program.py", "--journal", journal]) if who == "service" else naive(folder, journal)
            )
            services.append(running_here.enter_context(start))
        for name in names:
            row = ROWS[name]
            fsync = fsync_times(folder) if row.goal_of == "latency" else None
            found = median_runs(row, services, arguments.runs, arguments.seconds)
            gain = f"{row.gain(*found):.1f}x" if len(found) == 2 else ""
            disk = "" if fsync is None else f"{np.median(fsync):.2f} / {np.quantile(fsync, 0.99):.2f} ms"
            yield (row.what, row.goal, *map(row.show, found), gain, disk)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], default=[], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", choices=["service", "naive"], help="without the other")
    parser.add_argument("--folder", help="on the disk to measure")
    arguments = parser.parse_args()
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    rows = [name for name in ROWS if name in arguments.rows or not arguments.rows]
    who = [arguments.only] if arguments.only else ["service", "naive"]
    table = [("what", "goal", *who, "gain", "fsync p50 / p99")]
    for place in dict.fromkeys(ROWS[name].place for name in rows):
        if place[1] == "postgres" and postgres_server.find_binaries() is None:
            print("postgres: there is no server here", file=sys.stderr)
            continue
        for line in measure(place, [name for name in rows if ROWS[name].place == place], arguments):
            table.append(line)
            print(" | ".join(line), file=sys.stderr, flush=True)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print(" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
