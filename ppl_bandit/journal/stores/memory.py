"""The tables of a journal in memory, for a bandit without one."""

import sqlite3

from ppl_bandit.journal.stores.calls import timed_lock
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.tables import VERSION

__all__ = ["MemoryBackend"]


class MemoryBackend(SqliteBackend):
    """A SQLite database without a file: one connection, and no other process."""

    is_private = True
    timeout = 86_400.0  # threads that learn may wait for one that compiles

    def __init__(self) -> None:
        self.label, self.read_only, self.version = "memory", False, VERSION
        self._is_immutable, self._busy = False, 0
        self._reading = self._writing = timed_lock(self.timeout)
        self._reader = self._writer = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._create_tables(self._writer, 0)

    def _refuse_replaced(self) -> None:
        """There is no file."""
