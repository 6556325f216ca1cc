"""The service under load: what it answers in a second, what a request costs, and how long callers wait.

Run by hand on two otherwise idle cores, client included: python tests/benchmarks/bench_serving.py [ROW ...] [--runs 5]
[--seconds 2.5]. Without a row it measures all of them in under 5 minutes, and prints a table of goals and medians. Every answer
is sent after its commit, so latencies are compared with the time of writing and syncing 4 kB, measured beside them. CPU us are
those of the service's process for each request (in batches: for each decision); where a machine does something else at the same
time, they alone mean something.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

for folder in ("serving", "journal"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
import postgres_server  # noqa: E402
from service_process import running  # noqa: E402

LINEAR = """
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
context = jnp.zeros(5)


def model(arm, context):
    with numpyro.plate("arms", num_arms):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(5), 1.0).to_event(1))
    LIKELIHOOD
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
    "linear": LINEAR.replace("LIKELIHOOD", 'numpyro.sample("reward", dist.Normal(weights[arm] @ context, 1.0))'),
    "logistic": LINEAR.replace("LIKELIHOOD", 'numpyro.sample("reward", dist.Bernoulli(logits=weights[arm] @ context))'),
}
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

    for number in range(int(rate * seconds)):
        planned = begun + number / rate
        while (ahead := planned - time.perf_counter()) > 0 or not idle:
            await asyncio.sleep(max(ahead, 0.0005))
        send(planned, None)
        if number % 8 == 0:
            await asyncio.sleep(0)
    while num_open:
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


def run(loop, number):
    """Return the run of the median rate, after one that is not counted."""
    asyncio.run(loop())
    found = sorted((asyncio.run(loop()) for _ in range(number)), key=lambda one: one.rate)
    return found[number // 2]


def measure_decisions(service, runs, seconds):
    found = run(lambda: closed_loop(service, 64, seconds, lambda client, answer: decide()), runs)
    yield "durable decisions a second, 64 clients", "2,800 at 260 us", found, f"{found.rate:,.0f} at {found.cpu:.0f} us"


def measure_in_turn(service, runs, seconds):
    found = run(lambda: closed_loop(service, 64, seconds, in_turn), runs)
    yield "decision and reward in turn, requests a second", "2,400", found, f"{found.rate:,.0f} at {found.cpu:.0f} us"


def measure_one_client(service, runs, seconds):
    fsync = fsync_times(service.folder)
    found = run(lambda: closed_loop(service, 1, seconds, lambda client, answer: decide()), runs)
    text = f"{found.at(0.5):.1f} / {found.at(0.99):.1f} ms with fsync {np.median(fsync):.2f} / {np.quantile(fsync, 0.99):.2f}"
    yield "p50 / p99 at one client", "fsync + 1.5 / + 8 ms", found, text


def measure_open_loop(service, runs, seconds):
    found = run(lambda: open_loop(service, 1000, seconds, lambda client, answer: None if answer else decide()), runs)
    yield "1,000 requests a second, p50 / p99", "4 / 15 ms", found, f"{found.at(0.5):.1f} / {found.at(0.99):.1f} ms"


def measure_batches(service, runs, seconds, context=None, goal="10,000"):
    rows = request(f"{DECISIONS}/batch", {"requests": [{} if context is None else {"context": context}] * 1000})
    found = run(lambda: closed_loop(service, 1, seconds, lambda client, answer: rows, 1000), runs)
    text = f"{found.rate:,.0f} at {found.cpu:.0f} us"
    yield f"batch of 1,000, decisions a second{'' if context is None else ', linear D = 5'}", goal, found, text


def measure_linear(service, runs, seconds):
    yield from measure_batches(service, runs, seconds, CONTEXT, "7,000")


def measure_logistic(service, runs, seconds):
    def script(client, answer):
        return decide(CONTEXT) if answer is None else reward(answer)

    found = run(lambda: open_loop(service, 200, 2 * seconds, script), runs)
    text = f"{found.at(0.99):.0f} ms, {found.num_refused} refused, {found.rate:,.0f} requests/s at {found.cpu:.0f} us"
    yield "logistic, 200 decisions and 200 rewards a second, p99", "100 ms, none refused", found, text


def measure_postgres(service, runs, seconds):
    found = run(lambda: closed_loop(service, 64, seconds, lambda client, answer: decide()), runs)
    text = f"{found.rate:,.0f} at {found.cpu:.0f} us"
    yield "PostgreSQL, durable decisions a second, 64 clients", "2,500", found, text


ROWS = {  # {name: (program, measure)}
    "decisions": ("bernoulli", measure_decisions),
    "in_turn": ("bernoulli", measure_in_turn),
    "one_client": ("bernoulli", measure_one_client),
    "open_loop": ("bernoulli", measure_open_loop),
    "batches": ("bernoulli", measure_batches),
    "linear": ("linear", measure_linear),
    "postgres": ("bernoulli", measure_postgres),
    "logistic": ("logistic", measure_logistic),
}


@contextlib.contextmanager
def place_of(row, folder):
    """Yield where the journal of a row is: a new file, or a server of its own."""
    if row != "postgres":
        yield str(folder / "e.db")
        return
    server = postgres_server.Server()
    try:
        yield server.url
    finally:
        server.remove()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], default=[])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--folder", help="on the disk to measure")
    arguments = parser.parse_args()
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    table = []
    for row in arguments.rows or ROWS:
        program, measure = ROWS[row]
        if row == "postgres" and postgres_server.find_binaries() is None:
            print("postgres: there is no server here", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name, place_of(row, Path(name)) as journal:
            (Path(name) / "program.py").write_text(PROGRAMS[program])
            with running(name, ["program.py", "--journal", journal]) as service:
                for what, goal, found, text in measure(service, arguments.runs, arguments.seconds):
                    table.append((what, goal, text + (f"; {found.num_refused} refused" if found.num_refused else "")))
                    print(" | ".join(table[-1]), file=sys.stderr, flush=True)
                service.stop()
    widths = [max(len(line[place]) for line in table) for place in range(3)]
    for line in [("what", "goal", "measured"), *table]:
        print(" | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    main()
