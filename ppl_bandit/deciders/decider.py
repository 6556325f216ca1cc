"""A decider: decisions from the newest snapshot of an experiment, recorded beside its stream."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppl_bandit.deciders.sealer import SnapshotExperiment, channel_of, from_answer
from ppl_bandit.inputs.numbers import as_seconds, check_text
from ppl_bandit.journal.identity import arguments_from_identity
from ppl_bandit.journal.journal import Journal, check_location, parse_location
from ppl_bandit.journal.model_files import find_program, load_model
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.stores.appending import encode
from ppl_bandit.journal.stores.postgres import PostgresBackend
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.store import JournalError, call_within
from ppl_bandit.live.bandit import Bandit
from ppl_bandit.live.decisions import Decision, Slate, decision_id
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Engine, Selector, check_flag

_SECONDS_TO_LEARN = 4.0  # in which the process that learns answers; a request to a service ends after 5
_PAUSE = 0.5  # seconds before the journal is tried again, and at most until `close` is seen


class DeciderHealth(NamedTuple):
    """State of a decider.

    Attributes:
        is_working: whether decisions can be recorded, and the posterior is at most `max_staleness` old.
        reason: why not; empty if so.
        version: position of the last event that its snapshot has learnt.
        staleness: seconds since its snapshot was surely the newest posterior; infinite if no `Sealer` was seen.
        stream: identifier of its random number stream.
        num_decisions: made by this decider.
    """

    is_working: bool
    reason: str
    version: int
    staleness: float
    stream: str
    num_decisions: int


class Decider:
    """Decide from the newest posterior of an experiment in PostgreSQL that another process learns.

    It reads no rewards, so its cost does not depend on them. The bandit that learns has a `Sealer` in its process.
    Rewards go to it, or to a decider, which passes them on. A decision is durable when it is returned.

    Args:
        url: of the journal, in PostgreSQL.
        name: of the experiment, which a `Bandit` has opened.
        program: that the experiment was opened with; all settings are those that it was opened with. None takes it from the
            model file that the journal names, which is executed.
        context: the example context, for a program that takes one; None takes that of the model file.
        engine: the engine factory, if it is not part of this library.
        selector: the selector, if it is not part of this library.
        poll_every: seconds, or a timedelta, after which it looks for a snapshot if none was announced.
        max_staleness: seconds, or a timedelta, that the posterior may be old; `health` says when it is older.
        refuse_stale: whether decisions are then refused; otherwise they go on.
        timeout: seconds that a call may take.

    Raises:
        JournalError: if the journal cannot be used, has no such experiment, or it was recorded with another program.
    """

    def __init__(
        self,
        url: str,
        name: str,
        program: Callable | RewardModel | None = None,
        *,
        context: Any = None,
        engine: Callable[[RewardModel], Engine] | None = None,
        selector: Selector | None = None,
        poll_every: Any = 1.0,
        max_staleness: Any = 1.0,
        refuse_stale: bool = False,
        timeout: float = 60.0,
    ):
        self._poll = as_seconds(poll_every, "poll_every")
        self._max_staleness = as_seconds(max_staleness, "max_staleness")
        limit = self._max_staleness if check_flag(refuse_stale, "refuse_stale") else None
        place = parse_location(check_location(url))
        if isinstance(place, Path):
            raise JournalError(
                "a decider needs a journal in PostgreSQL, and this is a file: processes on one machine share a file with "
                "Bandit(..., journal=path)"
            )
        backend = PostgresBackend(place, as_seconds(timeout, "timeout"))
        store = SqlStore(backend, is_staging=True)
        try:
            store.check_name(check_text(name, "name"))
            store.prepare_staging()
            header = read_header(store, name)
            if program is None:
                file = load_model(find_program(header, url, "a decider", "pass it, as in Decider(url, name, program)"))
                program, context = file.program, file.context if context is None else context
            arguments = {"context": context} | arguments_from_identity(header.identity, engine, selector)
            journal = Journal.of(store, backend.label)
            self._bandit = _SnapshotBandit(program, journal=journal, name=name, **arguments)
        except BaseException:
            store.close()
            raise
        self._experiment, self._store, self._backend = self._bandit.follow(limit), store, backend
        self._reason, self._closed = "", threading.Event()
        with call_within(self._store.timeout):
            self._experiment.refresh()
        self._thread = threading.Thread(target=self._follow, name="ppl_bandit decider", daemon=True)
        self._thread.start()

    @property
    def arms(self) -> list[Any]:
        """The arms as in `Decision.arm`, the retired ones included."""
        return self._bandit.arms

    def warm_up(self, batches: bool = False) -> None:
        """Wait until the first decision is compiled; with `batches`, those of `select_many` too."""
        self._bandit.warm_up(batches)

    def select(
        self,
        context: Any = None,
        allowed: Any = None,
        *,
        size: int | None = None,
        unit: str | None = None,
        request_id: str | None = None,
    ) -> Decision | Slate:
        """Decide which arm to play, and record the decision; as `Bandit.select`."""
        options: Any = {"size": size, "unit": unit, "request_id": request_id}
        return self._bandit.select(context, allowed, **options)

    def select_many(
        self,
        contexts: Any = None,
        *,
        num_decisions: int | None = None,
        allowed: Any = None,
        units: Sequence[str | None] | None = None,
        request_ids: Sequence[str | None] | None = None,
    ) -> list[Decision]:
        """Make many decisions at once; as `Bandit.select_many`."""
        options: Any = {"allowed": allowed, "units": units, "request_ids": request_ids}
        return self._bandit.select_many(contexts, num_decisions=num_decisions, **options)

    def update(self, decision: Decision | str, reward: Any, **options: Any) -> bool:
        """Pass a reward on to the bandit that learns, and return whether it was new; as `Bandit.update`.

        Args:
            options: its other arguments, by name.

        Raises:
            JournalTimeout: if no process learns now; the reward is recorded, and learnt as soon as one does.
        """
        (result,) = self.update_each([{"decision": decision, "reward": reward, **options}])
        if isinstance(result, Exception):
            raise result
        return result

    def update_each(self, rows: Sequence[Mapping[str, Any]]) -> list[bool | Exception]:
        """Pass rewards of decisions on to the bandit that learns; as `Bandit.update_each`."""
        return self._bandit.update_each(rows)

    def health(self) -> DeciderHealth:
        """Return whether decisions can be recorded, and how new the posterior behind them is; it never raises JournalError."""
        reason, experiment = self._reason, self._experiment
        if experiment.staleness > self._max_staleness:
            reason = reason or experiment.why_stale(self._max_staleness)
        try:
            experiment.catch_up()
            self._store.ping()
        except JournalError as error:
            reason = str(error)
        return DeciderHealth(
            not reason,
            reason,
            experiment.projection.position,
            experiment.staleness,
            experiment.stream,
            experiment.num_made,
        )

    def close(self) -> None:
        """Close the connections; later calls raise JournalError."""
        self._closed.set()
        self._thread.join()
        self._bandit._is_closed = True
        self._store.close()

    def __enter__(self) -> "Decider":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _follow(self) -> None:
        """Load every snapshot that is announced, and look for one after `poll_every` seconds without."""
        while not self._closed.is_set():
            try:
                with self._backend.listen(channel_of(self._experiment.name)) as wait:
                    while not self._closed.is_set():
                        with call_within(self._store.timeout):
                            self._experiment.refresh()
                        self._reason, until = "", time.monotonic() + self._poll
                        while not self._closed.is_set() and time.monotonic() < until:
                            if wait(min(_PAUSE, self._poll)):
                                break
            except Exception as error:  # told by `health`; decisions go on from the snapshot that is there
                self._reason = str(error)
                self._closed.wait(_PAUSE)


class _SnapshotBandit(Bandit):
    """A bandit that decides from snapshots, once it follows them."""

    def follow(self, max_staleness: float | None) -> SnapshotExperiment:
        """Begin with the state that was opened."""
        self._experiment = followed = SnapshotExperiment(self._experiment, max_staleness)
        return followed

    def update_each(self, rows: Sequence[Mapping[str, Any]]) -> list[bool | Exception]:
        """Let the bandit that learns learn from rewards of decisions, and return its answers."""
        if not isinstance(rows, Sequence) or any(not isinstance(row, Mapping) for row in rows):
            raise ValueError(f"rows must be a list of mappings, the arguments of `update` by name, got {rows!r}")
        found: list[Any] = [None] * len(rows)
        given: dict[int, str] = {}
        for index, row in enumerate(rows):
            try:
                given[index] = encode({**row, "decision": decision_id(row.get("decision"))})
            except (ValueError, TypeError) as error:
                found[index] = error
        store, name = self._experiment.store, self._experiment.name
        with call_within(store.timeout):
            answers = store.report(name, list(given.values()), _SECONDS_TO_LEARN) if given else []
        for index, answer in zip(given, answers, strict=True):
            found[index] = from_answer(answer)
        return found

    def _expire_overdue(self) -> int:
        return 0  # the bandit that learns settles overdue decisions
