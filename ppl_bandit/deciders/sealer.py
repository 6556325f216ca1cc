"""The sealer: what the process that learns does for deciders."""

import math
import threading
import time
from typing import Any, NamedTuple

from ppl_bandit.deciders.snapshots import channel_of, publish
from ppl_bandit.inputs.numbers import as_seconds
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.live.bandit import Bandit

__all__ = ["Sealer", "SealerHealth"]

_SHORTEST = 0.001  # seconds between two rounds
_SAYING = 0.25  # seconds after which deciders are told that nothing has changed


class SealerHealth(NamedTuple):
    """State of a sealer.

    Attributes:
        is_working: whether its last round succeeded.
        reason: why not; empty if it did.
        version: position of the last event that the published snapshot has learnt.
        num_unsealed: decisions that are recorded and not in the stream yet; None if the journal cannot be read.
    """

    is_working: bool
    reason: str
    version: int
    num_unsealed: int | None


class Sealer:
    """Publish the posterior of a bandit to deciders, and move their decisions into the stream, in a thread until `close`.

    Use it in the process that learns: `with Sealer(bandit): ...`. A reward for a decision that is not sealed yet seals it, so
    rewards never wait.

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
        self._published = publish(self._experiment)
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
        return SealerHealth(not reason, reason, self._published.position, num_unsealed)

    def close(self) -> None:
        """Seal what is staged, and end; the bandit stays open."""
        self._closed.set()
        self._thread.join()
        if not self._bandit._is_closed:
            self._round()

    def __enter__(self) -> "Sealer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _round(self) -> None:
        self._experiment.store.seal(self._experiment.name)
        before, now = self._published, time.monotonic()
        self._published = publish(self._experiment, before)
        if self._published is not before:
            self._said_at = now
        elif now > self._said_at + _SAYING:
            self._experiment.store.say_newest(self._experiment.name, channel_of(self._experiment.name))
            self._said_at = now

    def _run(self) -> None:
        while not self._closed.wait(self._seconds) and not self._bandit._is_closed:
            try:
                self._round()
                self._reason = ""
            except Exception as error:  # told by `health`; the next round tries again
                self._reason = str(error)
