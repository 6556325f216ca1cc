"""Snapshots: the posterior that one process publishes, and that others decide from.

A snapshot is a checkpoint. Its event in the chain announces the digest of its contents, and the contents hold the position and
the digest of the last event that it has learnt, so it can be neither forged nor newer than the chain it names. A
decision records both, and replay makes the posterior again from the events up to that position.
"""

import hashlib
import math
import time
from typing import Any

import numpy as np

from ppl_bandit.journal.checkpoints import load_checkpoint, make_checkpoint
from ppl_bandit.journal.events import Event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import identity_differences
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.projection import Projection, initial_projection
from ppl_bandit.journal.stores.calls import call_within
from ppl_bandit.journal.stores.store import JournalError


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
    return burn_in > 0 and bool((np.minimum(projection.num_played, burn_in) > published.num_played).any())


def publish(experiment: Experiment, published: Projection | None = None) -> Projection:
    """Store the posterior as a snapshot and tell the deciders, unless it is the one that was published last.

    Returns:
        The projection that is published now.
    """
    # An event between would make a call that learns begin anew.
    with call_within(experiment.store.timeout), experiment.fold_lock, experiment.turn():
        projection = experiment.catch_up()
        if published is not None and not is_changed(projection, published, experiment.burn_in):
            return published
        experiment.store.write_checkpoint(experiment.name, *make_checkpoint(experiment, projection))
        experiment.checkpoint_position = projection.position
        experiment.store.say_newest(experiment.name, channel_of(experiment.name))
        return projection


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
        newest, age = self.store.newest_snapshot(self.name)
        if newest == self._newest:
            self._known_at = asked - age
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
        self._newest, self._known_at = newest, asked - age
        with self.fold_lock:
            if checkpoint is None or checkpoint[0].position <= self.projection.position:
                return False
            snapshot, next_number = checkpoint
            self.restore(snapshot, max(self.num_decisions, next_number))
        return True

    def decide(self, *arguments: Any, **options: Any) -> list[Event]:
        """Make decisions and record them; own ones count for the burn-in."""
        decisions = super().decide(*arguments, **options)
        with self.fold_lock:
            self.num_made += len(decisions)
            num_played = self.projection.num_played
            new = np.bincount([int(event.arm or 0) for event in decisions], minlength=num_played.size)
            self.projection = self.projection._replace(num_played=num_played + new)
        return decisions
