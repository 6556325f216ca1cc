"""A journal: a database with the event streams of one or several experiments.

Also here: where a journal is: a SQLite file or a PostgreSQL database, from a path, a URL or a libpq connection string.

Messages show the scheme, the host, the port and the database only. A text whose parts cannot be told apart is refused
without being shown, because any part of it may be a password.
"""

import os
import re
from os import PathLike
from pathlib import Path
from typing import Any

from ppl_bandit.inputs.numbers import as_seconds, check_count, check_text
from ppl_bandit.journal.audit import Verification
from ppl_bandit.journal.events import Event
from ppl_bandit.journal.stores.postgres import PostgresBackend
from ppl_bandit.journal.stores.sql import Backend, SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.types import check_flag

_EXPECTED = "expected a path, sqlite:///path or postgresql://user@host/database"
_SCHEMES_WITHOUT_SLASHES = ("file", "sqlite", "postgres", "postgresql")
_KEYWORD = re.compile(
    r"(?:^|\s)(?:host|hostaddr|port|dbname|user|password|passfile|service|ssl\w+|options|connect_timeout)\s*=", re.I
)

_SECRET = re.compile(r"(?::|%3a).*(?:@|%40)|(?:password|passwd|passphrase|pwd|secret|token)\s*(?:=|:|%3d)", re.I | re.S)


def check_location(url: Any) -> str:
    """Return a path, a URL or a connection string as a text; an error does not show it.

    Raises:
        ValueError: for anything else, and for a text that no file and no database can have.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        what = "a text that is empty or blank" if isinstance(text, str) else type(url).__name__
        raise ValueError(f"url must be a path, sqlite:///path or postgresql://user@host/database, got {what}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("url holds half of a surrogate pair, which is not valid text: give another path") from None
    if "\0" in text:
        raise ValueError("url holds a null character, which no path and no URL can have: remove it")
    return text


def parse_location(text: str) -> Path | str:
    """Return the path of a SQLite file, or the URL or connection string of a PostgreSQL database, as libpq reads it.

    Raises:
        ValueError: for a text that names neither a file nor a PostgreSQL database without ambiguity.
    """
    scheme, colon, rest = text.partition(":")
    scheme = scheme.lower()
    is_url = rest.startswith("//") or scheme in _SCHEMES_WITHOUT_SLASHES
    if colon and is_url and re.fullmatch(r"[a-z][a-z0-9+.-]+", scheme):
        return _from_url(scheme, rest)
    if text.strip() == ":memory:":
        raise ValueError("url=':memory:' has no file: leave journal=None to keep an experiment in memory")
    if _KEYWORD.search(text):
        return text
    if _SECRET.search(re.sub(r"^[a-z]:[/\\]", "", text, flags=re.I)):  # without the drive of a Windows path
        raise ValueError(
            f"url looks like the address or the settings of a database, {_EXPECTED}; for a file whose path has ':' and '@', or "
            "'password=', give a pathlib.Path"
        )
    return Path(text).expanduser()


def _from_url(scheme: str, rest: str) -> Path | str:
    if scheme == "sqlite":
        return _sqlite_path(rest)
    if scheme not in ("postgres", "postgresql") or not rest.startswith("//"):
        raise ValueError(f"url has the scheme {scheme!r}, {_EXPECTED}")
    rest = rest[2:]
    if "@" in rest.partition("@")[2] or "@" in rest.partition("/")[2]:
        raise ValueError(
            "url of a PostgreSQL database has an '@' or '/' in its user, password or options: write these characters as %40 "
            "and %2F, or use urllib.parse.quote(password, safe='')"
        )
    return f"postgresql://{rest}"


def _sqlite_path(rest: str) -> Path:
    if rest in ("", "//", "///") or rest.endswith(":memory:"):
        raise ValueError("url has the scheme 'sqlite' and no file: leave journal=None to keep an experiment in memory")
    if not rest.startswith("///"):
        raise ValueError("url has the scheme 'sqlite': write sqlite:///path, or sqlite:////path from the root")
    if "?" in rest or "#" in rest:
        raise ValueError(
            "url has the scheme 'sqlite' and options after the path: leave them out, or give the path alone"
        )
    return Path(rest[3:]).expanduser()


_MAX_TIMEOUT = 86_400


class Journal:
    """A SQLite file or a PostgreSQL database that records experiments.

    Args:
        url: a path, `sqlite:///path` (`sqlite:////path` from the root), `postgresql://user@host/database`, or a connection
            string of libpq (`host=... dbname=...`).
        must_exist: whether to refuse a path without a file, instead of creating a journal there.
        read_only: whether to write nothing; the journal must exist.
        timeout: seconds to wait for a lock, a statement or a connection before an error.

    Raises:
        JournalError: if it cannot be opened, is not a journal, is damaged, or was written by a later release.
        ValueError: if the URL names neither a file nor a PostgreSQL database.
    """

    def __init__(
        self, url: str | PathLike, *, must_exist: bool = False, read_only: bool = False, timeout: float = 60.0
    ):
        text = check_location(url)
        check_flag(must_exist, "must_exist")
        check_flag(read_only, "read_only")
        timeout = as_seconds(timeout, "timeout")
        if not 0.1 <= timeout <= _MAX_TIMEOUT:
            raise ValueError(f"timeout must be between 0.1 and {_MAX_TIMEOUT} seconds, got {timeout:g}")
        place = parse_location(text) if isinstance(url, str) else Path(text)
        backend: Backend
        if isinstance(place, Path):
            if must_exist and not place.exists():
                raise JournalError(f"there is no journal {place}: give the path that the bandit was given")
            backend = SqliteBackend(place, timeout, read_only=read_only)
        else:
            backend = PostgresBackend(place, timeout, read_only=read_only)
        self._label, self.store = backend.label, SqlStore(backend)

    @classmethod
    def of(cls, store: SqlStore, label: str) -> "Journal":
        """Return a journal on a store that is open."""
        journal = cls.__new__(cls)
        journal._label, journal.store = label, store
        return journal

    def __repr__(self) -> str:
        return f"Journal({self._label!r})"

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def experiments(self) -> list[str]:
        """Return the names of the experiments."""
        return self.store.experiments()

    def events(self, name: str = "default", after: int = 0) -> list[Event]:
        """Return the events of an experiment beyond a position, in order.

        Raises:
            JournalError: if there is no such experiment.
        """
        self.store.check_name(check_text(name, "name"))
        return self.store.read(name, check_count(after, "after", 0), whole=True)

    def head(self, name: str = "default") -> str:
        """Return `POSITION:DIGEST` of the last event; kept elsewhere, it shows later whether the events up to it changed.

        Raises:
            JournalError: if there is no such experiment.
        """
        self.store.check_name(check_text(name, "name"))
        return "{}:{}".format(*self.store.head(name))

    def verify(self, name: str = "default", head: str | None = None) -> Verification:
        """Check that no event was edited or removed; the result says what was checked.

        A journal knows no program, so stored posteriors are compared with their digests alone.
        `Bandit.verify` learns them again.

        Args:
            head: what `head` returned earlier.

        Raises:
            JournalError: with the first position at which the stream is not what was recorded.
        """
        check_text(name, "name")
        kept = None if head is None else _parse_head(head)
        if kept is None:
            self.store.check_name(name)
        self.store.check(name, kept, since=None)
        num_posteriors, num_unsealed = len(list(self.store.checkpoints(name))), self.store.num_staged(name)
        last = "{}:{}".format(*self.store.head(name))
        return Verification(name, last, kept is not None, num_posteriors, None, num_unsealed)

    def num_unsealed(self, name: str = "default") -> int:
        """Return the number of decisions that deciders have recorded and no `Sealer` has moved into the stream yet."""
        return self.store.num_staged(check_text(name, "name"))

    def close(self) -> None:
        """Close the connection; bandits that use this journal then raise JournalError."""
        self.store.close()


def _parse_head(text: Any) -> tuple[int, str]:
    found = re.fullmatch(r"(\d{1,18}):([0-9a-f]{64})", text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"head must be POSITION:DIGEST as Journal.head returns it, got {text!r}")
    return int(found[1]), found[2]
