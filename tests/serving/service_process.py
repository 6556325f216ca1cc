"""A real service in a process of its own, and calls to it."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ppl_bandit.files.keys import KeyFile

ROOT = Path(__file__).parents[2]
CHROMIUM = "/usr/bin/chromium"
PROGRAM = """
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):  # <script>document.title = "taken"</script>
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))
"""
MARKUP = "<img src=x onerror=document.title='taken'>"
CONFIG = f'''
[experiments.banner]
model = "programs.py"
journal = "JOURNAL"
arms = ["control", "low", "{MARKUP}"]
num_samples = 200

[experiments.banner.values]
control = false
low = true
"{MARKUP}" = true

[experiments.other]
model = "programs.py"
journal = "JOURNAL"
num_samples = 200
'''


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Service:
    """A running `ppl-bandit serve`.

    Args:
        folder: for its files.
        arguments: of the command, before those of the address.
        keys: {name: (role, experiments)}.
    """

    def __init__(self, folder, arguments, keys=None):
        self.folder, self.arguments, self.port = Path(folder), list(arguments), free_port()
        self.keys = {}
        for name, (role, experiments) in (keys or {}).items():
            self.keys[name] = KeyFile(self.folder / "keys.toml").create(role, experiments)[1]
        self.process = None
        self.log = self.folder / "log.txt"

    def start(self, seconds=240):
        """Start it, and wait until it is ready."""
        options = ["--keys", str(self.folder / "keys.toml")] if self.keys else []
        command = [sys.executable, "-m", "ppl_bandit.commands.cli", "serve", *self.arguments, *options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            )
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                if self.call("GET", "/readyz")[0] == 200:
                    return self
            time.sleep(0.2)
        raise AssertionError(f"not ready after {seconds} s: {self.log.read_text()}")

    def stop(self, seconds=15):
        """Send SIGTERM, and return the seconds until it ended."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        finally:
            self.process.kill()
        return time.monotonic() - begun

    def call(self, method, path, body=None, key=None, headers=(), raw=None):
        """Send one request; return the status, the headers, and the body, read if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {"Content-Type": "application/json"} if body is not None or raw is not None else {}
        if key is not None:
            given["Authorization"] = f"Bearer {self.keys.get(key, key)}"
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, content, given | dict(headers))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        kind = answer.getheader("Content-Type", "")
        is_json = text and "json" in kind and "nd" not in kind
        return answer.status, answer.headers, json.loads(text) if is_json else text.decode()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running(folder, arguments, keys=None):
    service = Service(folder, arguments, keys)
    try:
        yield service.start()
    finally:
        if service.process is not None and service.process.poll() is None:
            service.process.kill()
            service.process.wait()
