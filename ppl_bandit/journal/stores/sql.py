"""Event streams in a relational database: the same tables and statements for SQLite and PostgreSQL.

All differences between the databases are in the backends. `backend.run(work, locks)` runs a function in a transaction, and with
locks as the only writer of these experiments. It passes to `work` a function (statement, parameters, is_many=False) -> rows.
Statements mark parameters with `?`. With `is_many` they run once per row, and may run as late as at the end of the
transaction. `work` runs again if its connection breaks, also if it was committed before that.

Threads that append at the same time share one transaction, and so one flush to disk (group commit).
"""

import functools
import hashlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ppl_bandit.journal.events import (
    CHECKPOINT,
    DECIDED,
    ERASED,
    IMPORTED,
    DecisionRecord,
    Event,
    fold_decision,
    imported_records,
    new_ids,
)
from ppl_bandit.journal.stores.appending import (
    COLUMNS,
    IS_SETTING,
    LAST,
    MAX_PARAMETERS,
    VERSION_WITH_HEADS,
    VERSION_WITH_OPENINGS,
    AppendRequest,
    Beside,
    Execute,
    Personal,
    Result,
    append_requests,
    decode,
    digest_of,
    event_from_row,
    joined,
    rows_in,
)
from ppl_bandit.journal.stores.postgres import PostgresBackend
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.staged import (
    STAGING_TABLES,
    find_staged,
    has_staging,
    keys_lock,
    read_staged,
    seal_staged,
    stage_requests,
)
from ppl_bandit.journal.stores.store import (
    CALL,
    STALE,
    DamagedEvent,
    GroupedCalls,
    JournalError,
    JournalTimeout,
    Key,
    ReadingEvent,
    call_within,
    timed_lock,
)

Backend = SqliteBackend | PostgresBackend

_COLUMNS_WITHOUT_DECISION_BODY = COLUMNS.replace("body", "CASE WHEN kind = 'decided' THEN '{}' ELSE body END")
_NUM_OPENINGS = "SELECT num FROM ppl_bandit_openings WHERE experiment = ?"
_NEW_CHECKPOINT = "INSERT INTO ppl_bandit_checkpoints VALUES (?, ?, ?)"
_NO_LIMIT = 1 << 62  # beyond every position
_PAGE = 10_000  # rows read at once to check the chain
_BETWEEN_ANSWERS = 0.02  # seconds
_MAX_REPORTED = 1_000  # rewards learnt at once
_KEPT = 60.0  # seconds that an answer waits for its decider

_PENDING = (
    "FROM ppl_bandit_events made WHERE made.experiment = ? AND made.kind = 'decided' AND made.position > ? AND "
    "made.position < ? AND made.time <= ? AND NOT EXISTS (SELECT 1 FROM ppl_bandit_events later WHERE "
    "later.decision IS NOT NULL AND later.experiment = made.experiment AND later.decision = made.decision "
    "AND later.settles = 1)"
)


class Damage(NamedTuple):
    """The first fault of a stream: its position, and what is wrong there."""

    position: int
    reason: str


class SqlStore:
    """Event streams in a database, one per experiment. Threads may share a store.

    Args:
        is_staging: whether decisions are recorded beside the stream (see `staged`), until another process seals them.
    """

    def __init__(self, backend: Backend, *, is_staging: bool = False):
        self._backend, self.timeout = backend, backend.timeout  # seconds that a call may take
        self._pid = os.getpid()
        self._has_staging = False  # as far as was seen
        self._writing = timed_lock(self.timeout)
        self._append = GroupedCalls[AppendRequest](self._writing, functools.partial(self._record, append_requests))
        stage = functools.partial(self._record, stage_requests)
        self._stage = GroupedCalls[AppendRequest](self._writing, stage) if is_staging else None

    def append(
        self,
        experiment: str,
        events: Sequence[Event],
        after: int | None = None,
        keys: Sequence[Key] = (),
        beside: Beside = (),
    ) -> list[Event]:
        """Append events, all or none, and return them with their positions; they are durable when this returns.

        Threads that append at the same time share a transaction.

        Args:
            after: the last position that the caller has read; None if the events depend on no earlier event.
            keys: to record with the events.
            beside: see `AppendRequest`.

        Raises:
            KeyTaken: if a key has another value than expected.
            Conflict: if the stream has an event other than a decision or a checkpoint beyond `after`.
        """
        if not -STALE <= (CALL.deadline or -math.inf) - time.monotonic() <= self.timeout:  # also one that Ctrl-C left
            with call_within(self.timeout):
                return self.append(experiment, events, after, keys, beside)
        request = AppendRequest(experiment, events, after, keys, beside)
        if self._stage is not None and all(event.kind == DECIDED for event in events):
            return self._stage(request)
        return self._append(request)

    def settings(self, experiment: str) -> list[Event]:
        """Return the events that set identity, arms and looks."""
        return self._select(experiment, f"{IS_SETTING} ORDER BY position")

    def read(
        self,
        experiment: str,
        after: int = 0,
        before: int | None = None,
        *,
        kinds: Sequence[str] = (),
        limit: int | None = None,
        whole: bool = False,
    ) -> list[Event]:
        """Return the events between two positions, both excluded, in order.

        Args:
            kinds: only events of these kinds, which exclude decisions.
            whole: whether decisions have a body.
        """
        condition, parameters = "position > ?", list[Any]([after])
        if before is not None:
            condition += " AND position < ?"
            parameters.append(before)
        if kinds:
            condition += f" AND kind <> 'decided' AND kind IN ({', '.join('?' * len(kinds))})"
            parameters += kinds
        condition += " ORDER BY position"
        if limit is not None:
            condition += " LIMIT ?"
            parameters.append(limit)
        columns = COLUMNS if whole else _COLUMNS_WITHOUT_DECISION_BODY
        statement = f"SELECT {columns} FROM ppl_bandit_events WHERE experiment = ? AND {condition}"
        rows = self._query(statement, (experiment, *parameters))
        return self._events(experiment, rows) if rows else []

    def _select(self, experiment: str, condition: str, *parameters: Any) -> list[Event]:
        """Return the events of an experiment for which a condition holds."""
        statement = f"SELECT {COLUMNS} FROM ppl_bandit_events WHERE experiment = ? AND {condition}"
        return self._events(experiment, self._query(statement, (experiment, *parameters)))

    def _events(self, experiment: str, rows: Sequence[tuple]) -> list[Event]:
        """Return the events in rows of `COLUMNS`, with their personal parts."""
        events = [event_from_row(experiment, row) for row in rows]
        sealed = [event.position for event in events if "personal" in event.body]
        if not sealed:
            return events
        parts = self._personal(experiment, sealed)
        for index, event in enumerate(events):
            if "personal" in event.body:
                with ReadingEvent(experiment, event.position):
                    events[index] = joined(event, parts.get(event.position))
        return events

    def _personal(self, experiment: str, positions: Sequence[int]) -> dict[int, Personal]:
        """Return the personal parts of the events at some positions."""
        rows = rows_in(self._query, "position, salt, contents", "personal", experiment, "position", positions)
        return {row[0]: Personal(*row[1:]) for row in rows}

    def keys(self, experiment: str, names: Sequence[str]) -> dict[str, Key]:
        """Return the keys with some names; unknown ones are left out."""
        rows = rows_in(self._query, "name, value, owner, arguments", "keys", experiment, "name", names)
        return {row[0]: Key(*row) for row in rows}

    def owned(self, experiment: str, owner: str) -> list[Event]:
        """Return the events with a personal part of a unit, given its key, that was not erased; staged ones are sealed."""
        self.seal(experiment)
        own = "SELECT position FROM ppl_bandit_personal WHERE experiment = ? AND owner = ?"
        events = self._select(experiment, f"position IN ({own}) ORDER BY position", experiment, owner)
        return [event for event in events if ERASED not in event.body]

    def erasure(self, experiment: str, owner: str, events: Sequence[Event], checkpoint: bytes) -> Beside:
        """Return what blanks the personal parts of a unit's events, beside events that say so.

        A decision that is made for the unit meanwhile is that of a new unit, and keeps its key. The last of the events that
        say so announces a checkpoint, which replaces all others. Rewards of these decisions that were reported to deciders and
        are not learnt yet are removed. `scrub` has to follow.

        Args:
            owner: the key of the unit.
            events: all of it, see `owned`.
        """

        ids = {str(event.decision) for event in events}
        of_decisions = (
            "DELETE FROM ppl_bandit_reported WHERE experiment = ? AND "
            "EXISTS (SELECT 1 FROM unnest(?::text[]) AS id WHERE strpos(arguments, id) > 0)"
        )
        reported = [(of_decisions, [(experiment, list(ids))])] if self.stages() else []
        of_unit = "DELETE FROM ppl_bandit_keys WHERE experiment = ? AND owner = ? AND value = ?"
        return [
            (self._backend.blank_statement, [(experiment, event.position) for event in events]),
            (of_unit, [(experiment, owner, id) for id in ("", *ids)]),  # the keys of updates stand for no decision
            *reported,
            ("DELETE FROM ppl_bandit_checkpoints WHERE experiment = ?", [(experiment,)]),
            (_NEW_CHECKPOINT, [(experiment, LAST, checkpoint)]),
        ]

    def scrub(self) -> None:
        """Remove what the database keeps of contents that were blanked."""
        self._backend.scrub()

    def last_position(self, experiment: str) -> int:
        """Return the position of the last event; 0 for an experiment that does not exist."""
        return self._query("SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?", (experiment,))[0][0] or 0

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions, in order; unknown decisions are left out.

        Staged decisions are sealed; a store that stages finds those that have keys where they are.
        """
        found: dict[str, list[Event]] = defaultdict(list)
        missing = list(decisions)
        for is_last in (False, True):
            rows = rows_in(self._query, COLUMNS, "events", experiment, "decision", missing)
            # With ORDER BY position, or with `decision IS NOT NULL`, SQLite reads the whole index: it is sorted here.
            for event in self._events(experiment, sorted(rows, key=lambda row: row[0])):
                found[str(event.decision)].append(event)
            if is_last or len(found) == len(decisions) or not self.stages():
                break
            missing = [decision for decision in decisions if decision not in found]
            if self._stage is None:
                self.seal(experiment)
            else:
                found |= self._run(lambda execute: find_staged(execute, experiment, missing))  # noqa: B023
                missing = [decision for decision in missing if decision not in found]  # sealed meanwhile
        return dict(found)

    def first_after(self, experiment: str, until: float, after: int) -> tuple[int, float]:
        """Return position and time of the first decision beyond a position that was made after a time.

        If there is none: the next position, and infinity.
        """
        statement = (
            "SELECT position, time FROM ppl_bandit_events WHERE experiment = ? AND kind = 'decided' AND position > ? "
            "AND time > ? ORDER BY position LIMIT 1"
        )
        last = self.last_position(experiment)  # read first: decisions may be recorded in the meantime
        rows = self._query(statement, (experiment, after, until))
        return rows[0] if rows else (last + 1, math.inf)

    def pending(
        self, experiment: str, until: float | None = None, after: int = 0, before: int | None = None
    ) -> list[Event]:
        """Return the decisions made until a time, and between two positions, whose reward is pending, oldest first."""
        columns = ", ".join(f"made.{name}" for name in COLUMNS.split(", "))
        given = experiment, after, _NO_LIMIT if before is None else before, 1e300 if until is None else until
        return self._events(experiment, self._query(f"SELECT {columns} {_PENDING} ORDER BY made.position", given))

    def num_pending(self, experiment: str, until: float | None = None, after: int = 0) -> int:
        """Return the number of decisions made until a time, and beyond a position, whose reward is pending."""
        given = experiment, after, _NO_LIMIT, 1e300 if until is None else until
        return int(self._query(f"SELECT COUNT(*) {_PENDING}", given)[0][0])

    def decisions(self, experiment: str, after: int = 0) -> Iterator[DecisionRecord]:
        """Yield every decision beyond a position, and what became of it, oldest first, without keeping them.

        Raises:
            DamagedEvent: if an event cannot be read.
        """
        statement = (
            "SELECT decision FROM ppl_bandit_events WHERE experiment = ? AND kind = 'decided' AND position > ? "
            "ORDER BY position LIMIT ?"
        )
        ids = [""] * MAX_PARAMETERS
        while len(ids) == MAX_PARAMETERS:
            ids = [row[0] for row in self._query(statement, (experiment, after, MAX_PARAMETERS))]
            found = self.find(experiment, ids) if ids else {}
            for events in map(found.__getitem__, ids):
                after = events[0].position
                with ReadingEvent(experiment, events[-1].position):
                    record = fold_decision(events)
                yield record

    def newest_decisions(self, experiment: str, limit: int) -> list[Event]:
        """Return the newest decisions, oldest first."""
        return self._select(experiment, "kind = 'decided' ORDER BY position DESC LIMIT ?", limit)[::-1]

    def next_decisions(self, experiment: str, after: int, limit: int) -> list[Event]:
        """Return the first decisions beyond a position."""
        return self._select(experiment, "kind = 'decided' AND position > ? ORDER BY position LIMIT ?", after, limit)

    def ping(self) -> None:
        """Begin to write, and commit nothing.

        Raises:
            JournalError: if nothing can be written now.
        """
        self._run(lambda execute: None, ["ppl_bandit ping"])

    def imported(self, experiment: str) -> Iterator[DecisionRecord]:
        """Yield the plays that another system decided, oldest first."""
        for event in self.read(experiment, kinds=(IMPORTED,)):
            with ReadingEvent(experiment, event.position):
                plays = list(imported_records(event))
            yield from plays

    def checkpoints(self, experiment: str) -> Iterator[tuple[int, bytes, str | None]]:
        """Yield the checkpoints, newest first.

        Yields:
            The position of the event that announces it, its contents, and the body of that event; None if there is none.
        """
        statement = (
            "SELECT stored.position, stored.contents, made.body FROM ppl_bandit_checkpoints stored LEFT JOIN ppl_bandit_events "
            "made ON made.experiment = stored.experiment AND made.position = stored.position AND made.kind = 'checkpoint' "
            "WHERE stored.experiment = ? AND stored.position < ? ORDER BY stored.position DESC LIMIT 1"
        )
        before = _NO_LIMIT
        while rows := self._query(statement, (experiment, before)):
            before, contents, body = rows[0]
            yield before, contents.encode() if isinstance(contents, str) else bytes(contents), body

    def write_checkpoint(self, experiment: str, event: Event, contents: bytes) -> int:
        """Store a checkpoint with the event that announces it, and return its position; the one before it stays.

        If a unit was erased that its posterior does not know of, only the event is recorded.
        """
        older = (
            "DELETE FROM ppl_bandit_checkpoints WHERE experiment = ? AND position < "
            "(SELECT MAX(position) FROM ppl_bandit_checkpoints WHERE experiment = ?)"
        )
        unless_erased = (
            "INSERT INTO ppl_bandit_checkpoints SELECT ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM ppl_bandit_events WHERE "
            "experiment = ? AND position > ? AND kind <> 'decided' AND kind = 'forgotten')"
        )
        stored = experiment, LAST, contents, experiment, event.body["position"]
        beside: Beside = [(older, [(experiment, experiment)]), (unless_erased, [stored])]
        return self.append(experiment, [event], beside=beside)[0].position

    def newest_snapshot(self, experiment: str) -> tuple[int, float | None, float]:
        """Return the position of the event that announces the newest checkpoint, 0 if there is none, and two times.

        They are, by the server's clock, when a sealer last said that it is the newest, None if none ever did, and now.
        """
        statement = (
            "SELECT (SELECT MAX(position) FROM ppl_bandit_checkpoints WHERE experiment = ?), "
            "(SELECT time FROM ppl_bandit_sealers WHERE experiment = ?), extract(epoch FROM clock_timestamp())::float8"
        )
        ((position, said, now),) = self._query(statement, (experiment, experiment))
        return position or 0, said, now

    def say_newest(self, experiment: str, channel: str) -> None:
        """Record that the newest checkpoint is the newest posterior now, and tell the deciders that listen to a channel."""
        self._query(
            "INSERT INTO ppl_bandit_sealers VALUES (?, extract(epoch FROM clock_timestamp())::float8) "
            "ON CONFLICT (experiment) DO UPDATE SET time = excluded.time",
            (experiment,),
        )
        self._query("SELECT pg_notify(?, '')", (channel,))

    def prepare_staging(self) -> None:
        """Create the tables of staged decisions.

        Raises:
            JournalError: if the journal is not in PostgreSQL.
        """
        if not self._backend.can_stage:
            raise JournalError(f"{self._backend.label}: deciders need a journal in PostgreSQL")
        self._run(lambda execute: [execute(statement) for statement in STAGING_TABLES], ["ppl_bandit tables"])

    def lead(self, experiment: str) -> AbstractContextManager[Callable[[], bool]]:
        """Return the context in which this process tries to be the only one that seals and publishes; see the backend."""
        return self._backend.lead(experiment)

    def new_stream(self, experiment: str) -> str:
        """Count an opening of an experiment, and return the identifier of its random number stream, which no other has.

        The first opening gets the empty text, the next ones "1", "2", ...; one that can only read decides nothing.
        """
        if self._backend.read_only:
            return ""

        def work(execute: Execute) -> int:
            execute(
                "INSERT INTO ppl_bandit_openings VALUES (?, 1) "
                "ON CONFLICT (experiment) DO UPDATE SET num = ppl_bandit_openings.num + 1",
                (experiment,),
            )
            return int(execute(_NUM_OPENINGS, (experiment,))[0][0])

        num = self._run(work, [experiment])
        return "" if num == 1 else str(num - 1)

    def seal(self, experiment: str, seconds: float = math.inf) -> int:
        """Append the decisions that deciders have staged to the stream, and return the number of their calls.

        Args:
            seconds: after which no further transaction is begun.
        """
        if self._backend.read_only or not self.num_staged(experiment):
            return 0
        num_sealed, has_more, until = 0, True, time.monotonic() + seconds
        with call_within(self.timeout):
            while has_more:
                with self._writing:
                    num, has_more = self._run(lambda execute: seal_staged(execute, experiment), [experiment])
                num_sealed, has_more = num_sealed + num, has_more and time.monotonic() < until
        return num_sealed

    def _staged(self, experiment: str) -> Iterator[Event]:
        calls, number = [list[Event]()], 0
        while calls and self.stages():
            calls, number = self._run(lambda execute: read_staged(execute, experiment, number))  # noqa: B023
            yield from (event for call in calls for event in call)

    def report(self, experiment: str, rows: Sequence[str], seconds: float) -> list[str]:
        """Record rewards for the process that learns, and return its answers.

        Raises:
            JournalTimeout: if there is none within some seconds; the rewards stay recorded, and are learnt later.
        """
        ids, answers = new_ids(len(rows)), dict[str, str]()
        record = (
            "INSERT INTO ppl_bandit_reported (id, experiment, arguments) SELECT unnest(?::text[]), ?, unnest(?::text[]) "
            "ON CONFLICT DO NOTHING"
        )
        take = "DELETE FROM ppl_bandit_reported WHERE id = ANY(?) AND answer IS NOT NULL RETURNING id, answer"
        until = time.monotonic() + seconds
        with call_within(self.timeout):
            self._run(lambda execute: execute(record, (ids, experiment, list(rows))))
            while len(answers) < len(ids):
                if time.monotonic() > until:
                    raise JournalTimeout(
                        f"{len(ids) - len(answers)} rewards are recorded and not learnt within {seconds:g} seconds: they will "
                        "be when a process with a Sealer runs; reporting them again changes nothing"
                    )
                time.sleep(_BETWEEN_ANSWERS)
                answers |= dict(self._run(lambda execute: execute(take, (ids,))))
        return [answers[id] for id in ids]

    def reported(self, experiment: str) -> dict[str, str]:
        """Return the oldest rewards that were reported to deciders and are not answered, {id: arguments}."""
        where = "WHERE experiment = ? AND answer IS NULL ORDER BY number LIMIT ?"
        return dict(self._query(f"SELECT id, arguments FROM ppl_bandit_reported {where}", (experiment, _MAX_REPORTED)))

    def answer(self, answers: Mapping[str, str]) -> None:
        """Answer rewards that were reported to deciders, and forget those for which nobody waits any more."""
        self._query(
            "UPDATE ppl_bandit_reported SET answer = given.answer, arguments = '' "
            "FROM unnest(?::text[], ?::text[]) AS given(id, answer) WHERE ppl_bandit_reported.id = given.id",
            (list(answers), list(answers.values())),
        )
        self._query(
            "DELETE FROM ppl_bandit_reported WHERE answer IS NOT NULL AND time < extract(epoch FROM clock_timestamp()) - ?",
            (_KEPT,),
        )

    def num_staged(self, experiment: str) -> int:
        """Return the number of decisions that are not sealed yet."""
        statement = "SELECT COALESCE(SUM(num_decisions), 0) FROM ppl_bandit_staged WHERE experiment = ?"
        return int(self._query(statement, (experiment,))[0][0]) if self.stages() else 0

    def stages(self) -> bool:
        """Return whether deciders may have recorded decisions in this database."""
        if self._backend.can_stage and not self._has_staging:
            self._has_staging = self._run(lambda execute: has_staging(execute))
        return self._has_staging

    def copy_to(self, other: "SqlStore", experiment: str, stream: str | None = None) -> None:
        """Copy an experiment, as it is now, to a store that does not have it.

        Args:
            stream: random number stream of the next opening of the copy; None: as here.
        """
        heads = self._query("SELECT * FROM ppl_bandit_heads WHERE experiment = ?", (experiment,))
        num_openings = int(stream or 0)
        if stream is None and self._backend.version >= VERSION_WITH_OPENINGS:
            num_openings = sum(num for (num,) in self._query(_NUM_OPENINGS, (experiment,)))
        position = heads[0][1] if heads else 0

        def work(execute: Execute) -> None:
            for table in ("events", "personal", "checkpoints"):
                statement = (
                    f"SELECT * FROM ppl_bandit_{table} WHERE experiment = ? AND position > ? AND position <= ? "
                    "ORDER BY position LIMIT ?"
                )
                after = 0
                while rows := self._query(statement, (experiment, after, position, _PAGE)):
                    after = rows[-1][1]
                    execute(f"INSERT INTO ppl_bandit_{table} VALUES ({', '.join('?' * len(rows[0]))})", rows, True)
            keys = self._query("SELECT * FROM ppl_bandit_keys WHERE experiment = ?", (experiment,))
            execute("INSERT INTO ppl_bandit_keys VALUES (?, ?, ?, ?, ?)", keys, True)
            execute("INSERT INTO ppl_bandit_heads VALUES (?, ?, ?)", heads, True)
            execute("INSERT INTO ppl_bandit_openings VALUES (?, ?)", [(experiment, num_openings)], True)

        other._run(work, [experiment])

    def digest_at(self, experiment: str, position: int) -> str:
        """Return the digest of an event; the empty text for position 0, or if there is no such event."""
        return self._digests(experiment, [position]).get(position, "")

    def _digests(self, experiment: str, positions: Sequence[int]) -> dict[int, str]:
        """Return the digests of the events at some positions."""
        rows = rows_in(self._query, "position, digest", "events", experiment, "position", positions)
        return {row[0]: row[1] for row in rows}

    def experiments(self) -> list[str]:
        """Return the names of the experiments."""
        return [row[0] for row in self._query("SELECT DISTINCT experiment FROM ppl_bandit_events ORDER BY experiment")]

    def head(self, experiment: str) -> tuple[int, str]:
        """Return the position and the digest of the last event; (0, "") for an experiment that does not exist."""
        rows = self._query(
            "SELECT position, digest FROM ppl_bandit_events WHERE experiment = ? ORDER BY position DESC LIMIT 1",
            (experiment,),
        )
        return (int(rows[0][0]), str(rows[0][1])) if rows else (0, "")

    def find_damage(
        self, experiment: str, head: tuple[int, str] | None = None, since: tuple[int, str] | None = None
    ) -> Damage | None:
        """Check the chain of digests, the head record and the checkpoints; return the first fault, or None.

        Args:
            head: position and digest of an event, kept elsewhere, to compare with.
            since: position and digest of an event up to which the chain was checked before; the checkpoints are then not
                checked, because those that do not follow from the stream are not read.
        """
        heads = [] if head is None else [(*head, "given")]
        if self._backend.version >= VERSION_WITH_HEADS:  # read first: events may be appended in the meantime
            rows = self._query(
                "SELECT (SELECT position FROM ppl_bandit_heads WHERE experiment = ?), (SELECT digest FROM ppl_bandit_heads "
                "WHERE experiment = ?), (SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?)",
                [experiment] * 3,
            )
            at, recorded, last = rows[0]
            if at is None and last is not None:
                return Damage(last, "the record of its last event was removed")
            heads += [] if at is None else [(at, recorded, "recorded")]
        position, digest = since or (0, "")
        sealed: list[Event] = []
        announced: dict[int, str] = {}
        versions: dict[tuple[int, str], int] = {}  # position and digest of a snapshot: of the first decision from it
        for row in self._rows_with_digest(experiment, position):
            position += 1
            event = Event._make((*row[:7], bool(row[7]), row[8], {}))
            digest = digest_of(digest, experiment, event, row[9])
            if row[0] != position or row[10] != digest:
                return Damage(position, "the event does not follow from those before it")
            if '"personal":' in row[9]:
                sealed.append(Event._make((*row[:7], bool(row[7]), row[8], decode(row[9]))))
            if row[1] == DECIDED and '"snapshot":' in row[9]:
                with ReadingEvent(experiment, position):
                    body = decode(row[9])
                    versions.setdefault((body["absorbed"], body["snapshot"]), position)
            if row[1] == CHECKPOINT:
                with ReadingEvent(experiment, position):
                    announced[position] = decode(row[9])["contents"]
            for at, expected, source in heads:
                if at == position and expected != digest:
                    return Damage(position, f"the event has another digest than the {source} head")
        for at, _, source in heads:
            if at > position:
                return Damage(position + 1, f"events were removed: the {source} head is at position {at}")
        parts = self._personal(experiment, [event.position for event in sealed])
        for event in sealed:
            try:
                joined(event, parts.get(event.position))
            except ValueError as error:
                return Damage(event.position, str(error))
        for event in self._staged(experiment):
            versions.setdefault((event.body["absorbed"], event.body["snapshot"]), position + 1)
        digests = self._digests(experiment, list({at for at, _ in versions}))
        for (at, claimed), made in versions.items():
            if claimed != digests.get(at):
                return Damage(
                    made, f"the decision names a snapshot of position {at} with another digest than the event there"
                )
        if announced and since is None:  # checkpoints of version 0.1.0 are announced by no event, and are never read
            for at, contents, _ in self.checkpoints(experiment):
                if announced.get(at) != hashlib.sha256(contents).hexdigest():
                    return Damage(at, "the checkpoint there is not the one that the event announces")
        return None

    def check(
        self, experiment: str, head: tuple[int, str] | None = None, since: tuple[int, str] | None = (0, "")
    ) -> None:
        """Check that no event was edited or removed; the arguments are those of `find_damage`.

        Raises:
            DamagedEvent: with the first position at which the stream is not what was recorded.
        """
        damage = self.find_damage(experiment, head, since)
        if damage is not None:
            raise DamagedEvent(
                f"the experiment {experiment!r} is damaged at position {damage.position}: {damage.reason}; it was edited or is "
                f"incomplete: restore {self._backend.label} from a copy"
            )

    def check_name(self, experiment: str) -> None:
        """Check that an experiment exists.

        Raises:
            JournalError: with the names of those that do.
        """
        if not self.last_position(experiment):
            known = ", ".join(self.experiments()) or "none"
            raise JournalError(
                f"{self._backend.label} has no experiment {experiment!r}; its experiments: {known}: give one of these names"
            )

    def _rows_with_digest(self, experiment: str, after: int) -> Iterator[tuple]:
        while True:
            rows = self._query(
                f"SELECT {COLUMNS}, digest FROM ppl_bandit_events WHERE experiment = ? AND position > ? "
                "ORDER BY position LIMIT ?",
                (experiment, after, _PAGE),
            )
            yield from rows
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def turn(self, experiment: str) -> AbstractContextManager:
        """Wait until no other process learns; a hint that avoids conflicts, given up after a second."""
        return self._backend.turn(experiment)

    def close(self) -> None:
        """Close the connection."""
        self._backend.close()

    def _query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple]:
        if os.getpid() != self._pid:
            raise self._forked()
        if -STALE <= (CALL.deadline or -math.inf) - time.monotonic() <= self.timeout:
            return self._backend.read(statement, parameters)
        with call_within(self.timeout):
            return self._backend.read(statement, parameters)

    def _forked(self) -> JournalError:
        return JournalError(
            f"{self._backend.label} was opened before this process was forked: open the journal in each process, after the fork"
        )

    def _read_only(self) -> JournalError:
        return JournalError(f"{self._backend.label} was opened to read only; nothing was recorded")

    def _run(self, work: Callable[[Execute], Result], locks: Sequence[str] = ()) -> Result:
        if os.getpid() != self._pid:
            raise self._forked()
        if locks and self._backend.read_only:
            raise self._read_only()
        with call_within(self.timeout):
            return self._backend.run(work, locks)

    def _record(
        self,
        record: Callable[..., list[list[Event] | Exception]],
        requests: Sequence[AppendRequest],
    ) -> None:
        """Record the events of all requests for the experiment of the first in one transaction: all, or none if it fails.

        Args:
            record: `append_requests` or `stage_requests`.
        """
        if os.getpid() != self._pid:
            raise self._forked()
        if self._backend.read_only:
            raise self._read_only()
        experiment = requests[0].experiment
        requests = [request for request in requests if request.experiment == experiment]
        locks = [keys_lock(experiment)] if any(request.keys for request in requests) else []
        locks += [experiment] if record is append_requests else []
        try:
            work = functools.partial(record, experiment=experiment, requests=requests)
            num_events = sum(len(request.events) for request in requests)
            results = self._backend.run(work, sorted(locks), num_events)
        except Exception as error:
            for request in requests:
                request.error = error
            if not isinstance(error, JournalError):
                raise
            return
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, Exception):
                request.error = result
            else:
                request.result = result


def read_batches(
    store: SqlStore, experiment: str, after: int, before: int | None = None, whole: bool = False
) -> Iterator[list[Event]]:
    """Yield the events between two positions, those of one call together."""
    size = _PAGE
    while True:
        events = store.read(experiment, after, before, limit=size, whole=whole)
        is_last_page = len(events) < size
        batch: list[Event] = []
        for event in events:
            if batch and event.batch != batch[0].batch:
                yield batch
                after, batch = batch[-1].position, []
            batch.append(event)
        if is_last_page:
            if batch:
                yield batch
            return
        size = _PAGE if len(batch) < size else 2 * size  # the events of the last call may continue on the next page
