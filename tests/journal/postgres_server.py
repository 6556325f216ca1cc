"""A real PostgreSQL server on loopback, in a folder of its own, for tests that start, stop and restart it."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

PASSWORD = "s3cret%25word"  # as it stands in a URL


def find_binaries():
    """Return the folder of PostgreSQL's programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


class Server:
    """One server; `url` has a password in it."""

    def __init__(self):
        self.binaries = find_binaries()
        self.folder = Path(tempfile.mkdtemp(prefix="ppl_bandit_pg_"))
        self.user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        secret = self.folder / "password"
        secret.write_text("s3cret%word")
        secret.chmod(0o644)
        self._run("initdb", "-D", self.data, "-U", "tester", "-A", "scram-sha-256", f"--pwfile={secret}", "--no-sync")
        self.start()

    @property
    def data(self):
        return str(self.folder / "data")

    @property
    def url(self):
        return f"postgresql://tester:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def start(self):
        options = f"-p {self.port} -k {self.folder} -c listen_addresses=127.0.0.1 -c shared_buffers=16MB -c max_connections=30"
        self._run("pg_ctl", "-D", self.data, "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode="immediate"):
        self._run("pg_ctl", "-D", self.data, "-w", "-m", mode, "stop")

    def remove(self):
        try:
            self.stop()
        except subprocess.CalledProcessError:
            pass
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program, *arguments):
        command = [str(self.binaries / program), *arguments]
        user = self.user if os.geteuid() == 0 else None
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd=self.folder
        )
