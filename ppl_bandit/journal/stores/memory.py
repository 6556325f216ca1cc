"""The tables of a journal in memory, for a bandit without one."""

import sqlite3
import threading

from ppl_bandit.journal.stores.appending import Execute
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.tables import VERSION

__all__ = ["MemoryBackend"]


class MemoryBackend(SqliteBackend):
    """A SQLite database without a file: one connection, and no other process."""

    is_private = True
    timeout = 86_400.0  # threads that learn may wait for one that compiles

    def __init__(self) -> None:
        self.label, self.read_only, self.version = "memory", False, VERSION
        self._is_immutable, self._file, self._busy = False, (0, 0), 0
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._locks = dict.fromkeys((False, True), threading.RLock())
        self._connections = dict.fromkeys((False, True), connection)
        self._create_tables(connection, 0)

    def data_version(self, execute: Execute) -> int | None:
        """Return a constant: there is no other connection."""
        return 0

    def _identify_file(self) -> tuple[int, ...]:
        return self._file
