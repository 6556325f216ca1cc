"""The service under load beside the program that one would write without it: rates, CPU of a request, and waiting times.

Run by hand on two otherwise idle cores, client included, in at most 8 minutes; a run sends a fixed number of requests:

    taskset -c 0,1 python tests/benchmarks/bench_serving.py [ROW ...] [--runs 5] [--seconds 4] [--only service | naive]

Without a row it measures all of them, and prints the machine and a table in Markdown: medians over the runs, the goals, and how
many times better the service is than the naive program, whose runs take turns with its own. Rows that need PostgreSQL are left
out where there is none. After its last row, each journal that the service wrote is verified, and its decisions are computed
again. Every answer is sent after its commit, so latencies are compared with the time of writing and syncing 4 kB, measured
beside them. CPU us are those of the serving process for each request (in batches: for each decision); where a machine does
something else at the same time, they alone mean something.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
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


async def closed_loop(service, num_clients, number, seconds, script, size=1):
    """Let clients send their next request as soon as the last was answered.

    Args:
        number: of requests; fewer if they take longer than `seconds`.
        script: (answer or None) -> the next request of a client.
        size: decisions of a request.
    """
    clients = await connect(service.port, num_clients)
    latencies, refused, loop = [], 0, asyncio.get_running_loop()
    begun, cpu = time.perf_counter(), cpu_seconds(service.process.pid)
    finished, num_open, left = loop.create_future(), num_clients, number

    def play(client, answer):
        nonlocal num_open, left
        sent = time.perf_counter()
        if not left or sent - begun >= seconds:
            num_open -= 1
            if not num_open:
                finished.set_result(None)
            return
        left -= 1

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


async def open_loop(service, rate, number, seconds, script):
    """Send requests at a fixed rate, whether earlier ones were answered or not; latencies count from the planned time.

    Args:
        number: of requests; what has no answer after `seconds` more than they are planned to take is counted as refused.
        script: (answer or None) -> the next request; an answered decision is followed by its reward at once.
    """
    idle = await connect(service.port, MAX_OPEN)
    clients, latencies, refused, num_open = list(idle), [], 0, 0
    begun, cpu = time.perf_counter(), cpu_seconds(service.process.pid)
    ends = begun + number / rate + seconds

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

    for index in range(number):
        planned = begun + index / rate
        while ((ahead := planned - time.perf_counter()) > 0 or not idle) and time.perf_counter() < ends:
            await asyncio.sleep(max(ahead, 0.0005))
        if time.perf_counter() >= ends:
            refused += number - index
            break
        send(planned, None)
        if index % 8 == 0:
            await asyncio.sleep(0)
    while num_open and time.perf_counter() < ends:
        await asyncio.sleep(0.001)
    return measured(service, clients, begun, cpu, latencies, refused + num_open)


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
        number: of requests in a run.
        play: (service, number, seconds) -> a run.
        holds: (run, times of fsync) -> whether the goal is met.
        is_rate: whether the goal is one of the rate; otherwise it is one of latencies.
    """

    what: str
    goal: str
    place: tuple[str, str]
    number: int
    play: Callable
    holds: Callable
    is_rate: bool = True

    def show(self, found):
        refused = f", {found.num_refused} refused" if found.num_refused else ""
        rate = f"{found.rate:,.0f}/s{refused}"
        return rate if self.is_rate else f"{found.at(0.5):.1f} / {found.at(0.99):.1f} ms, {rate}"

    def gain(self, service, naive):
        """Return how many times better the service is than the naive program."""
        return service.rate / naive.rate if self.is_rate else naive.at(0.99) / service.at(0.99)


def decide_only(num_clients):
    return lambda service, number, seconds: closed_loop(
        service, num_clients, number, seconds, lambda client, answer: decide()
    )


def batches(context=None):
    rows = request(f"{DECISIONS}/batch", {"requests": [{} if context is None else {"context": context}] * 1000})
    return lambda service, number, seconds: closed_loop(service, 1, number, seconds, lambda client, answer: rows, 1000)


def decisions_at(rate):
    return lambda service, number, seconds: open_loop(
        service, rate, number, seconds, lambda client, answer: None if answer else decide()
    )


def decisions_and_rewards_at(rate, context):
    def script(client, answer):
        return decide(context) if answer is None else reward(answer)

    return lambda service, number, seconds: open_loop(service, rate, number, seconds, script)


def at_rate(rate):
    return lambda found, fsync: found.rate >= rate and not found.num_refused


def within(p50, p99):
    return lambda found, fsync: found.at(0.5) <= p50 and found.at(0.99) <= p99 and not found.num_refused


def beyond_fsync(p50, p99):
    return lambda found, fsync: within(np.median(fsync) + p50, np.quantile(fsync, 0.99) + p99)(found, fsync)


BERNOULLI = ("bernoulli", "sqlite")
ROWS = {
    "decisions": Row(
        "durable decisions, 64 clients",
        "2,800/s, 260 us",
        BERNOULLI,
        8000,
        decide_only(64),
        lambda found, fsync: at_rate(2800)(found, fsync) and found.cpu <= 260,
    ),
    "in_turn": Row(
        "decision and reward in turn, 64 clients",
        "2,400/s",
        BERNOULLI,
        8000,
        lambda service, number, seconds: closed_loop(service, 64, number, seconds, in_turn),
        at_rate(2400),
    ),
    "one_client": Row(
        "decisions of one client, p50 / p99",
        "fsync + 1.5 / + 8 ms",
        BERNOULLI,
        1500,
        decide_only(1),
        beyond_fsync(1.5, 8),
        is_rate=False,
    ),
    "open_loop": Row(
        "1,000 decisions a second, p50 / p99",
        "4 / 15 ms",
        BERNOULLI,
        3000,
        decisions_at(1000),
        within(4, 15),
        is_rate=False,
    ),
    "batches": Row("decisions in batches of 1,000", "10,000/s", BERNOULLI, 30, batches(), at_rate(10_000)),
    "linear": Row("the same, linear D = 5", "7,000/s", ("linear", "sqlite"), 20, batches(CONTEXT), at_rate(7000)),
    "postgres": Row(
        "PostgreSQL: decisions, 64 clients",
        "2,500/s",
        ("bernoulli", "postgres"),
        5000,
        decide_only(64),
        at_rate(2500),
    ),
    "logistic": Row(
        "logistic: 200 decisions and 200 rewards a second, p50 / p99",
        "p99 100 ms, 0 refused",
        ("logistic", "sqlite"),
        800,
        decisions_and_rewards_at(200, CONTEXT),
        within(100, 100),
        is_rate=False,
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


def median_runs(row, services, arguments):
    """Return the run of the median rate of each service; the first runs are short and do not count."""
    found = [[] for _ in services]
    for index in range(arguments.runs + 1):
        for service, runs in zip(services, found, strict=True):
            runs.append(asyncio.run(row.play(service, row.number if index else row.number // 5, arguments.seconds)))
    return [sorted(runs[1:], key=lambda one: one.rate)[arguments.runs // 2] for runs in found]


def check_journal(service, journal):
    """Stop a service, verify its journal, and compute its decisions again; return what the commands say."""
    service.process.terminate()
    service.process.wait(15)
    command = [sys.executable, "-m", "ppl_bandit.commands.cli", "journal", journal]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    said = []
    for action in (["verify"], ["replay", "--model", "program.py"]):
        found = subprocess.run([*command, *action], cwd=service.folder, env=environment, capture_output=True, text=True)
        said.append((found.stdout if found.returncode == 0 else f"FAILED: {found.stdout}{found.stderr}").strip())
    return "; ".join(said)


def measure(place, names, arguments):
    """Yield the lines of the rows of one place, then what the check of its journal says, alone."""
    program, kind = place
    with contextlib.ExitStack() as running_here:
        services, journals = [], []
        for who in arguments.who:
            folder = Path(running_here.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
            journals.append(running_here.enter_context(journal_of(kind, folder)))
            (folder / "program.py").write_text(PROGRAMS[program])
            options = ["program.py", "--journal", journals[-1]]
            start = running(folder, options) if who == "service" else naive(folder, journals[-1])
            services.append(running_here.enter_context(start))
        for name in names:
            row = ROWS[name]
            fsync = fsync_times(folder)
            found = median_runs(row, services, arguments)
            gain = f"{row.gain(*found):.1f}x" if len(found) == 2 else ""
            both = [text for one in found for text in (row.show(one), f"{one.cpu:.0f}")]
            holds = "yes" if row.holds(found[0], fsync) else "no"
            disk = f"{np.median(fsync):.2f} / {np.quantile(fsync, 0.99):.2f}"
            yield (row.what, row.goal, holds, *both, gain, disk)
        if arguments.who[0] == "service":
            yield (f"the journal of {program} on {kind}: {check_journal(services[0], journals[0])}",)


def describe_machine():
    """Return processor, cores, load and versions in one line."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = cpu[0].partition(":")[2].strip() if cpu else platform.machine()
    packages = ", ".join(f"{package} {version(package)}" for package in ("jax", "numpyro", "uvicorn"))
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{name}, {cores} cores (load {load:.1f}), Python {platform.python_version()}, {packages}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], default=[], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="a run that takes longer ends with fewer requests")
    parser.add_argument("--only", choices=["service", "naive"], help="without the other")
    parser.add_argument("--folder", help="on the disk to measure")
    arguments = parser.parse_args()
    arguments.who = [arguments.only] if arguments.only else ["service", "naive"]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of the processes that are measured
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    rows = [name for name in ROWS if name in arguments.rows or not arguments.rows]
    print(f"{describe_machine()}; medians of {arguments.runs} runs\n", flush=True)
    both = [text for who in arguments.who for text in (who, "CPU us")]
    table = [("what", "goal", "holds", *both, "gain", "fsync p50 / p99, ms")]
    table.append(("---",) * len(table[0]))
    checks = []
    for place in dict.fromkeys(ROWS[name].place for name in rows):
        if place[1] == "postgres" and postgres_server.find_binaries() is None:
            checks.append("the row of PostgreSQL is left out: there is no server here")
            continue
        for line in measure(place, [name for name in rows if ROWS[name].place == place], arguments):
            print(" | ".join(line), file=sys.stderr, flush=True)
            if len(line) > 1:
                table.append(line)
            else:
                checks += line
    for line in table:
        print(f"| {' | '.join(line)} |")
    print("", *checks, sep="\n")


if __name__ == "__main__":
    main()
