"""Keys of the service: a file with the SHA-256 of each key, its role, and the experiments that it opens.

A key is 256 random bits, shown once, when it is made. A role opens nothing else: `decide` makes decisions and reports rewards,
`read` reads, `admin` reads and changes. A key may be bound to experiments.
"""

import contextlib
import datetime
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

ROLES = ("decide", "read", "admin")
_SECONDS_BETWEEN_LOOKS = 1.0  # a revoked key opens nothing after this time
_FIELDS = {"id", "role", "experiments", "sha256", "created"}


class Access(NamedTuple):
    """What a caller may do: its role (None opens everything, without keys), and the experiments (None: all)."""

    role: str | None
    experiments: frozenset[str] | None = None

    def has_role(self, role: str) -> bool:
        """Return whether the caller has a role; who may change an experiment may read it."""
        return self.role in (None, role) or (role == "read" and self.role == "admin")

    def opens(self, experiment: str) -> bool:
        """Return whether the caller may use an experiment, whether it exists or not."""
        return self.experiments is None or experiment in self.experiments


class KeyRecord(NamedTuple):
    """One key of the file, without the key itself."""

    id: str
    role: str
    experiments: tuple[str, ...]
    sha256: str
    created: str


class KeyFile:
    """A file of keys; it is read again when it changes.

    Args:
        path: of the TOML file; only its owner may read it.
    """

    def __init__(self, path: str | PathLike):
        self.path = Path(path)
        self._stamp: tuple[int, ...] | None = None
        self._looked = -_SECONDS_BETWEEN_LOOKS
        self._keys: list[tuple[str, Access]] = []

    def find(self, key: str) -> Access | None:
        """Return what a key opens; None for an unknown one. All keys are compared, each in constant time."""
        now = time.monotonic()
        if now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = now
            self._reload()
        digest, found = hashlib.sha256(key.encode()).hexdigest(), None
        for known, access in self._keys:
            if hmac.compare_digest(known, digest):
                found = access
        return found

    def check(self) -> None:
        """Read the file.

        Raises:
            ValueError: if it cannot be read, or has no key.
        """
        if not self.records():
            raise ValueError(
                f"{self.path} has no key: make one with `ppl-bandit keys create --role decide --file {self.path}`"
            )

    def records(self) -> list[KeyRecord]:
        """Return the keys of the file, oldest first; none if there is no file.

        Raises:
            ValueError: for a file that is not one of keys.
        """
        try:
            content = tomllib.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise ValueError(f"the keys in {self.path} cannot be read ({error}); restore the file") from None
        return [self._record(table) for table in content.get("keys", [])]

    def create(self, role: str, experiments: Sequence[str] = ()) -> tuple[KeyRecord, str]:
        """Add a key; return its record and the key, which is stored nowhere."""
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
        key = f"ppl_{secrets.token_urlsafe(32)}"
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        digest = hashlib.sha256(key.encode()).hexdigest()
        record = KeyRecord(secrets.token_hex(4), role, tuple(experiments), digest, created)
        with self._locked():
            self._write([*self.records(), record])
        return record, key

    def revoke(self, id: str) -> KeyRecord:
        """Remove a key; a running service refuses it within a second.

        Raises:
            ValueError: if there is no key with this id.
        """
        with self._locked():
            records = self.records()
            found = [record for record in records if record.id == id]
            if not found:
                raise ValueError(
                    f"{self.path} has no key {id!r}; its keys: {', '.join(r.id for r in records) or 'none'}"
                )
            self._write([record for record in records if record.id != id])
        return found[0]

    def _record(self, table: object) -> KeyRecord:
        if not isinstance(table, dict) or set(table) - _FIELDS or not {"id", "role", "sha256"} <= set(table):
            raise ValueError(
                f"{self.path}: a [[keys]] entry needs id, role and sha256, and may have experiments, created"
            )
        experiments = table.get("experiments", [])
        is_list = isinstance(experiments, list) and all(isinstance(name, str) for name in experiments)
        is_digest = isinstance(table["sha256"], str) and re.fullmatch("[0-9a-f]{64}", table["sha256"])
        if table["role"] not in ROLES or not is_digest or not is_list:
            raise ValueError(f"{self.path}: the key {table['id']!r} has a wrong role, sha256 or list of experiments")
        return KeyRecord(
            str(table["id"]), table["role"], tuple(experiments), table["sha256"], str(table.get("created", ""))
        )

    def _reload(self) -> None:
        """Read the file again if it changed; while it cannot be read, no key opens anything."""
        try:
            status = self.path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp == self._stamp:
                return
            records = self.records()
        except (OSError, ValueError):
            self._stamp, self._keys = None, []
            return
        self._stamp = stamp
        self._keys = [
            (record.sha256, Access(record.role, frozenset(record.experiments) if record.experiments else None))
            for record in records
        ]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a lock on the folder: two commands at once would lose a key, or the revocation of one."""
        try:
            folder = os.open(self.path.absolute().parent, os.O_RDONLY)
        except OSError as error:
            raise ValueError(f"the folder of {self.path} cannot be opened ({error.strerror}): create it") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write(self, records: Sequence[KeyRecord]) -> None:
        blocks = ["# Keys of ppl-bandit serve: SHA-256 of each key. Change it with `ppl-bandit keys`.\n"]
        for record in records:
            # The JSON form of a text, and of a list of texts, is also its TOML form, unless it has a DEL.
            fields = {**record._asdict(), "experiments": list(record.experiments)}
            blocks.append("[[keys]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()))
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # a service may read it as another user
                before = self.path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            file.write("\n".join(blocks))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
