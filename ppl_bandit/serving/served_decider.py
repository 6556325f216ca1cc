"""What is behind an address when one process learns and others decide."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ppl_bandit.deciders.decider import Decider
from ppl_bandit.deciders.sealer import Sealer
from ppl_bandit.serving.batches import Limits
from ppl_bandit.serving.experiments import ServedExperiment

logger = logging.getLogger("ppl_bandit.serving")


class ServedLearner(ServedExperiment):
    """A bandit that learns for deciders, behind an address."""

    def __init__(self, name: str, sealer: Sealer, *, values: Mapping[Any, Any] | None = None, limits: Limits):
        super().__init__(name, sealer.bandit, values=values, limits=limits)
        self._sealer, self._sealing = sealer, sealer.health()

    def not_ready(self) -> str:
        """Return why the experiment is not ready; empty if it is."""
        return super().not_ready() or ("" if self._sealing.is_working else "decisions of deciders are not sealed")

    def check_journal(self) -> None:
        """Try whether the journal can be written now, and look whether deciders are served."""
        super().check_journal()
        before, self._sealing = self._sealing, self._sealer.health()
        if before.is_working and not self._sealing.is_working:
            logger.error("%s: decisions of deciders are not sealed: %s", self.name, self._sealing.reason)
        if before.is_leading != self._sealing.is_leading:
            does = "seals for" if self._sealing.is_leading else "waits beside"
            logger.info("%s: this process %s deciders", self.name, does)

    def gauges(self) -> dict[str, float]:
        """Return the numbers of the metrics."""
        known = self._sealing.num_unsealed
        unsealed = float("nan") if known is None else float(known)
        return super().gauges() | {"is_leading": float(self._sealing.is_leading), "unsealed": unsealed}

    def close(self) -> None:
        """Seal what is staged, and close the bandit."""
        try:
            self._sealer.close()
        finally:
            super().close()


class ServedDecider(ServedExperiment):
    """A decider behind an address: reports and administration are the learner's."""

    def __init__(self, name: str, decider: Decider, *, values: Mapping[Any, Any] | None = None, limits: Limits):
        super().__init__(name, decider._bandit, values=values, limits=limits)
        self._decider = decider

    def check_journal(self) -> None:
        """Look whether decisions can be recorded, and how old their posterior may be; decisions go on from an old one."""
        health = self._decider.health()
        if health.reason and not self._journal_failure:
            logger.warning("%s: not ready: %s", self.name, health.reason)
        self._journal_failure = health.reason
        self._counts["alarms"] = int(bool(health.reason))
        if health.is_working:
            self._written = time.monotonic()

    def take_look(self) -> bool:
        """Take none: looks are the learner's, which has the rewards."""
        return False

    def count(self, checks_alarms: bool = True) -> None:
        """Count nothing: what is pending, and the alarms of the experiment, are the learner's."""

    def gauges(self) -> dict[str, float]:
        """Return the numbers of the metrics; the age is that of the snapshot."""
        return super().gauges() | {"posterior_age": self._decider._experiment.staleness}

    def close(self) -> None:
        """Close the decider."""
        self._decider.close()

    def _learnt_together(self, rows: Sequence[Any]) -> Sequence[Sequence[Any]]:
        return [rows] if rows else []  # the learner divides them
