"""The sealer: what the process that learns does for deciders.

Also here: snapshots: the posterior that one process publishes, and that others decide from.

A snapshot is a checkpoint. Its event in the chain announces the digest of its contents, and the contents hold the position and
the digest of the last event that it has learnt, so it can be neither forged nor newer than the chain it names. A
decision records both, and replay makes the posterior again from the events up to that position.
"""

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit import types
from ppl_bandit.inputs.numbers import as_seconds
from ppl_bandit.journal.checkpoints import load_checkpoint, make_checkpoint
from ppl_bandit.journal.events import Event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import identity_differences
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.projection import Projection, initial_projection
from ppl_bandit.journal.stores.appending import decode, encode
from ppl_bandit.journal.stores.store import JournalError, call_within, seconds_left
from ppl_bandit.live.bandit import Bandit
from ppl_bandit.live.reported_rewards import learn_rows
from ppl_bandit.types import BanditError


def channel_of(experiment: str) -> str:
    """Return the channel on which the snapshots of an experiment are announced."""
    return f"ppl_bandit_{hashlib.sha256(experiment.encode()).hexdigest()[:32]}"


def is_changed(projection: Projection, published: Projection | None, burn_in: int) -> bool:
    """Return whether decisions from a projection may differ from those of the last that was published."""
    if published is None:
        return True
    names = ("learner", "task", "retired", "is_paused", "look")
    if any(getattr(projection, name) is not getattr(published, name) for name in names):
        return True
    # A design counts all decisions to its next look, a burn-in the first ones of each arm.
    counted = np.iinfo(np.int64).max if projection.task.design is not None else burn_in
    return bool((np.minimum(projection.num_played, counted) > published.num_played).any())


def publish(experiment: Experiment, published: Projection | None = None) -> tuple[Projection, int]:
    """Store the posterior as a snapshot and tell the deciders, unless it is the one that was published last.

    Returns:
        The projection that is published now, and the position of the event that announces it; 0 if it was published before.
    """
    # An event between would make a call that learns begin anew.
    with call_within(experiment.store.timeout), experiment.fold_lock, experiment.turn():
        projection = experiment.catch_up()
        if published is not None and not is_changed(projection, published, experiment.burn_in):
            return published, 0
        announced = experiment.store.write_checkpoint(experiment.name, *make_checkpoint(experiment, projection))
        experiment.checkpoint_position = projection.position
        experiment.store.say_newest(experiment.name, channel_of(experiment.name))
        return projection, announced


class SnapshotExperiment(Experiment):
    """An experiment whose projection is the newest snapshot; it folds no events.

    Args:
        opened: the experiment as it was opened.
        max_staleness: seconds that the posterior may be old; older ones are refused, unless it is None.

    Attributes:
        num_made: number of decisions that this process has made.
    """

    def __init__(self, opened: Experiment, max_staleness: float | None):
        store, name, start = opened.store, opened.name, opened.projection
        super().__init__(store, name, opened.initial, opened._build, opened.burn_in, opened.identity, opened.stream)
        self._refusal = ""  # why no decision can be made
        self._newest = 0  # position of the last checkpoint that was looked at
        self._max_staleness = max_staleness
        self._known_at = -math.inf  # by the monotonic clock, when the snapshot was surely the newest posterior
        self._said: float | None = None  # by the server's clock, the last word of a sealer
        self._looked_at = -math.inf  # by the monotonic clock, when that was read
        self.num_made = 0
        self.restore(start._replace(digest=store.digest_at(name, start.position)), opened.num_decisions)

    def catch_up(self, *, wait: bool = True) -> Projection:
        """Return the newest snapshot that `refresh` has loaded."""
        if self._refusal:
            raise JournalError(self._refusal)
        if self._max_staleness is not None and self.staleness > self._max_staleness:
            raise JournalError(self.why_stale(self._max_staleness))
        return self.projection

    @property
    def staleness(self) -> float:
        """Seconds since the snapshot was surely the newest posterior; infinite if there was no sealer."""
        return time.monotonic() - self._known_at

    def why_stale(self, limit: float) -> str:
        """Return in words that the snapshot is too old."""
        seconds = self.staleness
        known = "no Sealer was seen" if math.isinf(seconds) else f"the last word of its Sealer is {seconds:.1f} s old"
        return (
            f"the posterior of the experiment {self.name!r} may be older than max_staleness={limit:g} seconds: {known}; look "
            "whether the process that learns runs with a Sealer, and whether the server answers"
        )

    def refresh(self) -> bool:
        """Load the newest snapshot, if there is one that is not loaded, and return whether there was.

        Raises:
            JournalError: if the journal cannot be read, or the experiment goes on with another program or other settings.
        """
        asked = time.monotonic()
        newest, said, now = self.store.newest_snapshot(self.name)
        if newest == self._newest:
            self._hear(asked, said, now)
            return False
        identity = dict(self.identity or {})
        least = self.projection.position + 1  # the snapshot before it may still be there
        checkpoint = load_checkpoint(self.store, self.name, identity, self.initial, least)
        if checkpoint is None:  # of other arms, or another program
            header = read_header(self.store, self.name)
            differences = identity_differences(header.identity, identity)
            if differences:
                self._refusal = (
                    f"the experiment {self.name!r} was changed while this decider was open: {'; '.join(differences)}. "
                    "Start the decider again with the program that it has now"
                )
                raise JournalError(self._refusal)
            if len(header.names) > len(self.initial.task.arms):
                self.initial = initial_projection(*self._build(header.names))
                checkpoint = load_checkpoint(self.store, self.name, identity, self.initial, least)
        self._newest = newest
        self._hear(asked, said, now)
        with self.fold_lock:
            if checkpoint is None or checkpoint[0].position <= self.projection.position:
                return False
            snapshot, next_number, settled_until = checkpoint
            with self._numbering:  # a thread that decides takes its number meanwhile
                self.restore(snapshot, max(self.num_decisions, next_number), settled_until)
        return True

    def _hear(self, asked: float, said: float | None, now: float) -> None:
        """Note when the snapshot was the newest: a word that is new was said after the last look, wherever a clock was set."""
        if said is not None and said != self._said:
            self._known_at = max(asked - (now - said) if said <= now else -math.inf, self._looked_at)
        self._said, self._looked_at = said, asked

    def decide(self, *arguments: Any, **options: Any) -> list[Event]:
        """Make decisions and record them; own ones count for the burn-in."""
        decisions = super().decide(*arguments, **options)
        with self.fold_lock:
            self.num_made += len(decisions)
            num_played = self.projection.num_played
            new = np.bincount([int(event.arm or 0) for event in decisions], minlength=num_played.size)
            self.projection = self.projection._replace(num_played=num_played + new)
        return decisions


_SHORTEST = 0.001  # seconds between two rounds
_SEALING = 1.0  # seconds in each round, at most; more if rounds are seldom
_SAYING = 0.25  # seconds after which deciders are told that nothing has changed


def as_answer(result: bool | Exception) -> str:
    """Return what was done with a reported reward, as the decider that passed it on reads it."""
    if not isinstance(result, Exception):
        return encode({"recorded": result})
    return encode({"error": type(result).__name__, "text": str(result), "entry": getattr(result, "entry", "")})


def from_answer(answer: str) -> bool | Exception:
    """Return what `as_answer` has written."""
    found = decode(answer)
    if "recorded" in found:
        return found["recorded"]
    kind = getattr(types, found["error"], ValueError)
    return (
        kind(found["text"], *filter(None, [found["entry"]]))
        if issubclass(kind, BanditError)
        else ValueError(found["text"])
    )


class SealerHealth(NamedTuple):
    """State of a sealer.

    Attributes:
        is_working: whether its last round succeeded.
        is_leading: whether it is the one that seals and publishes; another waits until that one ends.
        reason: why it does not work; empty if it does.
        version: position of the last event that the published snapshot has learnt.
        num_unsealed: decisions that are recorded and not in the stream yet; None if the journal cannot be read.
    """

    is_working: bool
    is_leading: bool
    reason: str
    version: int
    num_unsealed: int | None


class Sealer:
    """Publish the posterior of a bandit to deciders, and move their decisions into the stream, in a thread until `close`.

    Use it in the process that learns: `with Sealer(bandit): ...`. A reward for a decision that is not sealed yet seals it, so
    rewards never wait. If several processes have one for the same experiment, a lock of the server lets one of them work; when
    it ends, or loses its connection, another takes over.

    Args:
        bandit: with a journal in PostgreSQL.
        publish_every: seconds between two rounds, or a timedelta; a snapshot is published only if decisions may change.

    Raises:
        JournalError: if the bandit's journal is not in PostgreSQL, or cannot be written.
    """

    def __init__(self, bandit: Bandit, *, publish_every: Any = 0.05):
        if not isinstance(bandit, Bandit):
            raise ValueError(f"bandit must be a Bandit, got {bandit!r}")
        seconds = as_seconds(publish_every, "publish_every")
        if seconds < _SHORTEST:
            raise ValueError(f"publish_every must be at least {_SHORTEST:g} seconds, got {seconds:g}")
        self.bandit, self._experiment, self._seconds = bandit, bandit._experiment, seconds
        self._experiment.store.prepare_staging()
        self._reason, self._closed, self._said_at = "", threading.Event(), -math.inf
        self._published: Projection | None = None
        self._announced = 0  # position of the event that announces it
        self._lock = contextlib.ExitStack()
        self._leads: Callable[[], bool] = _nobody
        self._is_leading, self._next_try = False, -math.inf
        self._round()
        self._thread = threading.Thread(target=self._run, name="ppl_bandit sealer", daemon=True)
        self._thread.start()

    def health(self) -> SealerHealth:
        """Return whether it works; it never raises JournalError."""
        reason, num_unsealed = self._reason, None
        try:
            num_unsealed = self._experiment.store.num_staged(self._experiment.name)
        except JournalError as error:
            reason = reason or str(error)
        version = 0 if self._published is None else self._published.position
        return SealerHealth(not reason, self._is_leading, reason, version, num_unsealed)

    def close(self) -> None:
        """Seal what is staged, as far as a round does, and end; the bandit stays open."""
        self._closed.set()
        self._thread.join(seconds_left())
        try:
            if self._is_leading and not self.bandit._is_closed and not self._thread.is_alive():
                self._round()
        finally:
            self._step_down()

    def __enter__(self) -> "Sealer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _round(self) -> None:
        if not self._is_leader():
            return
        experiment, before, now = self._experiment, self._published, time.monotonic()
        # A backlog, of hours without a sealer, is no reason to publish nothing: it is sealed in several rounds.
        experiment.store.seal(experiment.name, max(_SEALING, self._seconds))
        self._learn_reported()
        self._published, announced = publish(experiment, before)
        if announced:
            self._announced, self._said_at = announced, now
        elif now > self._said_at + _SAYING:
            if experiment.store.newest_snapshot(experiment.name)[0] != self._announced:
                self._published = None  # another bandit has stored a posterior, which may be older: publish again
                return
            experiment.store.say_newest(experiment.name, channel_of(experiment.name))
            self._said_at = now

    def _learn_reported(self) -> None:
        """Learn the rewards that were reported to deciders, and answer each."""
        store = self._experiment.store
        if reported := store.reported(self._experiment.name):
            try:
                results = self.bandit.update_each([decode(row) for row in reported.values()])
            except JournalError:
                raise
            except Exception:  # of one row, which must not keep the others, or of decisions that are overdue
                results = [self._learn_alone(row) for row in reported.values()]
            store.answer(dict(zip(reported, map(as_answer, results), strict=True)))

    def _learn_alone(self, row: str) -> bool | Exception:
        try:
            return learn_rows(self._experiment, [decode(row)])[0]
        except JournalError:
            raise
        except Exception as error:
            return error

    def _is_leader(self) -> bool:
        """Return whether this process holds the lock; without it, try to get it a few times a second."""
        if not self._is_leading and time.monotonic() < self._next_try:
            return False
        self._next_try = time.monotonic() + _SAYING
        with call_within(self._experiment.store.timeout):
            if self._leads is _nobody:
                self._leads = self._lock.enter_context(self._experiment.store.lead(self._experiment.name))
            is_leading = self._leads()
        if not self._is_leading:
            self._published = None  # another process may have published since
        self._is_leading = is_leading  # only now: `health` may be asked meanwhile
        return is_leading

    def _run(self) -> None:
        while not self._closed.wait(self._seconds) and not self.bandit._is_closed:
            try:
                self._round()
                self._reason = ""
            except Exception as error:  # told by `health`; the next round tries again, on a new connection
                self._reason = str(error)
                self._step_down()

    def _step_down(self) -> None:
        self._leads, self._is_leading = _nobody, False
        self._lock.close()


def _nobody() -> bool:
    return False
