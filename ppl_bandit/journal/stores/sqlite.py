"""SQLite backend: one file, used by several processes of one machine.

Write-ahead logging with `synchronous=FULL`: a committed transaction is on the disk, unless the disk reports a flush that it did
not do. Readers do not wait for writers, so there is one connection for reading and one for writing.
"""

import contextlib
import math
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ppl_bandit.journal.stores.appending import TABLES, VERSION, Execute, Result, upgrades_from
from ppl_bandit.journal.stores.store import CALL, JournalError, JournalTimeout, call_within, seconds_left, timed_lock

_APPLICATION = 0x50504C42  # "PPLB", in the file's header
_MAX_CHECKED_BYTES = 1 << 22  # a file up to this size is checked completely when it is opened, which takes 5 ms


class SqliteBackend:
    """A SQLite file; `sql` says what a backend does.

    Args:
        timeout: seconds that a call may take, also if another process writes.
        read_only: whether to refuse a path without a file, and to write nothing.
    """

    def __init__(self, path: str | os.PathLike, timeout: float = 60.0, *, read_only: bool = False):
        self.label = str(path)
        self._path = Path(path).absolute()  # the working directory may change
        self.timeout, self.read_only, self.version = timeout, read_only, VERSION
        self._reading, self._writing = threading.RLock(), timed_lock(timeout)  # a read waits for no other process
        self._busy = 0  # tenths of a second that the writer waits for other processes
        if self._path.exists() and not stat.S_ISREG(self._path.stat().st_mode):
            raise JournalError(f"{self.label} is not a regular file: give the path of a journal, or of a new file")
        if not self._path.parent.is_dir():
            raise JournalError(f"the folder {self._path.parent} does not exist: create it, or give another path")
        self._refuse_without_log()
        if read_only and not self._path.exists():
            raise JournalError(f"there is no journal {self.label}: give the path that the bandit was given")
        try:
            if not read_only:
                self._create_file()
                self._writer = self._connect()
                self._prepare(self._writer)
            self._reader = self._connect()
            self._file: tuple[int, ...] | None = self._identify_file()
            if read_only:
                self._check(self._reader)
        except sqlite3.Error as error:
            raise self._translated(error) from None

    def read(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple]:
        """Return the rows that a statement finds."""
        with self._reading:
            try:
                if self._reader.in_transaction:  # it writes too, in memory, and Ctrl-C came before a rollback
                    self._reader.execute("ROLLBACK")
                rows = self._reader.execute(statement, parameters).fetchall()
                if (
                    self._is_immutable and self._identify_file() != self._file
                ):  # a process opened it to write: read its log too
                    self._reader.close()
                    self._reader = self._connect()
                    self._file = self._identify_file()
                    rows = self._reader.execute(statement, parameters).fetchall()
            except sqlite3.Error as error:
                raise self._translated(error) from None
            self._refuse_replaced()
            return rows

    def run(self, work: Callable[[Execute], Result], locks: Sequence[str] = (), num_events: int = 0) -> Result:
        """Run work; with locks, in one transaction, as the only writer."""
        if not locks:
            return work(self.read)
        with self._writing:
            connection = self._writer

            def execute(statement: str, parameters: Sequence[Any] = (), is_many: bool = False) -> list[tuple]:
                run = connection.executemany if is_many else connection.execute
                return run(statement, parameters).fetchall()

            try:
                if connection.in_transaction:  # Ctrl-C interrupted an earlier call before its rollback
                    connection.execute("ROLLBACK")
                left = self.timeout if CALL.deadline is None else max(CALL.deadline - time.monotonic(), 0.001)
                busy = math.ceil(10 * min(left, self.timeout))  # tenths of a second
                if busy != self._busy:
                    connection.execute(f"PRAGMA busy_timeout={100 * busy}")
                    self._busy = busy
                connection.execute("BEGIN IMMEDIATE")
                result = work(execute)
                connection.execute("COMMIT")
            except BaseException as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise self._translated(error) from None
                raise
            self._refuse_replaced()
            return result

    def _refuse_replaced(self) -> None:
        """Raise if the path names another file than the one that is open, or none."""
        if self._file is None:  # in memory
            return
        try:
            found = os.stat(self._path)
            is_same = (found.st_dev, found.st_ino) == self._file[:2]
        except OSError:
            is_same = False
        if not is_same:
            raise JournalError(
                f"{self.label} was deleted or replaced while it was open: this call is not recorded in the file that is "
                "there now; restore the file, or open the journal again"
            )

    # Contents of the same length are overwritten in place: pages that shrink would be copied.
    blank_statement = (
        "UPDATE ppl_bandit_personal SET salt = hex(zeroblob(length(salt) / 2)), owner = printf('%0*d', length(owner), 0), "
        "contents = printf('%*s', length(CAST(contents AS BLOB)), '') WHERE experiment = ? AND position = ?"
    )

    can_stage = False

    def scrub(self) -> None:
        """Move the write-ahead log into the file, and empty it: it holds the pages as they were before."""
        with call_within(self.timeout), self._writing:
            while True:
                is_busy = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                if not is_busy:
                    return
                if seconds_left() <= 0.001:
                    raise JournalTimeout(
                        f"{self.label}: the unit is erased, but another process has read the write-ahead log for "
                        f"{self.timeout:g} seconds, so that the log still holds the old pages: call erase again"
                    )
                time.sleep(min(0.01, seconds_left()))

    def turn(self, experiment: str) -> contextlib.AbstractContextManager:
        """Return a context without effect: SQLite has no lock that outlasts a transaction."""
        return contextlib.nullcontext()

    def lead(self, experiment: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Return a function that is true: deciders, which follow a leader, need PostgreSQL."""
        return contextlib.nullcontext(lambda: True)

    def close(self) -> None:
        """Close both connections; SQLite then moves the write-ahead log into the file."""
        for lock, name in ((self._reading, "_reader"), (self._writing, "_writer")):
            with lock:
                if hasattr(self, name):  # there is no writer of a file that is only read
                    getattr(self, name).close()

    def _refuse_without_log(self) -> None:
        """Refuse a journal whose tables are in a write-ahead log that is missing: it would look like a new file."""
        for seconds in (0.0, 0.5):  # another process may be creating the journal at this moment
            time.sleep(seconds)
            if not _is_without_log(self._path):
                return
        raise JournalError(
            f"{self.label} was copied without {self._path.name}-wal, which has its records: copy both files, or copy an open "
            f"journal with `sqlite3 {self._path.name} '.backup COPY'`; if nothing was recorded in it, delete it"
        )

    def _create_file(self) -> None:
        """Create an empty file that only its owner can read; SQLite gives its log the same permissions."""
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        except FileExistsError:
            pass
        except OSError as error:
            raise JournalError(f"{self.label} cannot be created ({error.strerror}): make the folder writable") from None

    def _connect(self) -> sqlite3.Connection:
        # To read a file that no process has open, SQLite would create the files of its log: "immutable" prevents that.
        self._is_immutable = self.read_only and not Path(f"{self._path}-wal").exists()
        mode = "immutable=1" if self._is_immutable else "mode=ro" if self.read_only else "mode=rw"
        connection = sqlite3.connect(
            f"file:{quote(str(self._path))}?{mode}",
            timeout=self.timeout,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten
        return connection

    def _identify_file(self) -> tuple[int, ...]:
        """Return device and inode; for an immutable file, also what changes when a process writes."""
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0)
        changing = (found.st_mtime_ns, found.st_size, Path(f"{self._path}-wal").exists()) if self._is_immutable else ()
        return (found.st_dev, found.st_ino, *changing)

    def _check(self, connection: sqlite3.Connection) -> int:
        """Check that the file is a journal, or empty; return the version of its tables, 0 if it has none."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if application != _APPLICATION and (tables or application or found):
            raise JournalError(
                f"{self.label} is a SQLite file of another application: give the path of a journal, or of a new file"
            )
        if self.read_only and application != _APPLICATION:
            raise JournalError(f"{self.label} is empty: give the path of a journal")
        if found > VERSION:
            raise JournalError(
                f"{self.label} is a journal of version {found}, this release reads up to {VERSION}: upgrade ppl_bandit"
            )
        if self._path.stat().st_size <= _MAX_CHECKED_BYTES:
            fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if fault != "ok":
                raise JournalError(f"{self.label} is damaged ({fault}): restore it from a copy")
        self.version = found if self.read_only else VERSION
        return found if application == _APPLICATION else 0

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check the file; create the tables in an empty one, and those that an earlier release did not have."""
        found = self._check(connection)
        connection.execute("PRAGMA journal_mode=WAL")
        if found < VERSION:
            self._create_tables(connection, found)

    def _create_tables(self, connection: sqlite3.Connection, found: int) -> None:
        connection.execute("BEGIN IMMEDIATE")
        if connection.execute("PRAGMA user_version").fetchone()[0] < VERSION:  # no other process did it in the meantime
            for statement in TABLES:
                connection.execute(statement.format(blob="BLOB"))
            for statement in upgrades_from(found):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={_APPLICATION}")
            connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")

    def _translated(self, error: sqlite3.Error) -> JournalError:
        text = str(error)
        remedies = {
            "not a database": "it is not a journal: give the path of a journal, or of a new file",
            "malformed": "it is damaged: restore it from a copy",
            "full": "nothing of this call was recorded: free space on the disk, and call again",
            "I/O": "nothing of this call was recorded: check the disk, and call again",
            "readonly": "nothing was recorded: make the file and its folder writable",
            "unable to open": "make the file and its folder readable and writable",
            "locked": f"another process has been writing for {self.timeout:g} seconds; nothing was recorded: call again",
            "closed": "the journal was closed: open it again",
        }
        remedy = next((remedy for key, remedy in remedies.items() if key in text), "nothing of this call was recorded")
        kind = JournalTimeout if "locked" in text else JournalError
        return kind(f"{self.label}: {text}; {remedy}")


def _is_without_log(path: Path) -> bool:
    """Return whether a file is in SQLite's write-ahead mode and has no tables and no log (sqlite.org/fileformat2.html)."""
    if not path.is_file() or Path(f"{path}-wal").exists() or not os.access(path, os.R_OK):
        return False
    with path.open("rb") as file:
        header = file.read(105)
    is_write_ahead, application, num_schema_entries = header[18:20] == b"\2\2", header[68:72], header[103:105]
    return is_write_ahead and application == bytes(4) and num_schema_entries == bytes(2)
