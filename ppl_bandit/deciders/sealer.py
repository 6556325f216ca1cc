"""The sealer: what the process that learns does for deciders."""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ppl_bandit.deciders.snapshots import channel_of, publish
from ppl_bandit.inputs.numbers import as_seconds
from ppl_bandit.journal.projection import Projection
from ppl_bandit.journal.stores.calls import call_within
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.live.bandit import Bandit

_SHORTEST = 0.001  # seconds between two rounds
_SAYING = 0.25  # seconds after which deciders are told that nothing has changed


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
        self._bandit, self._experiment, self._seconds = bandit, bandit._experiment, seconds
        self._experiment.store.prepare_staging()
        self._reason, self._closed, self._said_at = "", threading.Event(), -math.inf
        self._published: Projection | None = None
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
        """Seal what is staged, and end; the bandit stays open."""
        self._closed.set()
        self._thread.join()
        try:
            if self._is_leading and not self._bandit._is_closed:
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
        experiment.store.seal(experiment.name)
        self._published = publish(experiment, before)
        if self._published is not before:
            self._said_at = now
        elif now > self._said_at + _SAYING:
            experiment.store.say_newest(experiment.name, channel_of(experiment.name))
            self._said_at = now

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
        while not self._closed.wait(self._seconds) and not self._bandit._is_closed:
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
