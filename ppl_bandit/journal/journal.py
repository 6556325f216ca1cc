"""A journal: a database with the event streams of one or several experiments."""

import os
from os import PathLike
from pathlib import Path
from typing import Any

from ppl_bandit.journal.events import Event
from ppl_bandit.journal.stores.postgres import PostgresBackend
from ppl_bandit.journal.stores.sql import Backend, SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.store import JournalError

__all__ = ["Journal"]


class Journal:
    """A SQLite file or a PostgreSQL database that records experiments.

    Args:
        url: a path, `sqlite:///path` (`sqlite:////path` from the root), or `postgresql://user@host/database`.
        must_exist: whether to refuse a path without a file, instead of creating a journal there.

    Raises:
        JournalError: if it cannot be opened, is not a journal, is damaged, or was written by a later release.
    """

    def __init__(self, url: str | PathLike, *, must_exist: bool = False):
        text = os.fspath(url)
        if not isinstance(text, str) or not text:
            raise ValueError(f"url must be a path, sqlite:///path or postgresql://..., got {type(url).__name__}")
        scheme, _, rest = text.partition("://")
        backend: Backend
        if not rest or scheme == "sqlite":
            path = Path(rest.removeprefix("/") if rest else text).expanduser()
            if must_exist and not path.exists():
                raise JournalError(f"there is no journal {path}: give the path that the bandit was given")
            backend = SqliteBackend(path)
        elif scheme in ("postgresql", "postgres"):
            backend = PostgresBackend(text)
        else:
            raise ValueError(f"url has the scheme {scheme!r}, expected a path, sqlite:///path or postgresql://...")
        self._label, self.store = backend.label, SqlStore(backend)

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
        if not self.store.last_position(name):
            known = ", ".join(self.experiments()) or "none"
            raise JournalError(f"{self._label} has no experiment {name!r}; its experiments: {known}")
        return self.store.read(name, after, whole=True)

    def close(self) -> None:
        """Close the connection; bandits that use this journal then raise JournalError."""
        self.store.close()
