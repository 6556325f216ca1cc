"""An experiment of which this process makes decisions only: rewards, reports and administration are the learner's."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ppl_bandit.deciders.decider import Decider
from ppl_bandit.serving.batches import Limits
from ppl_bandit.serving.experiments import ServedExperiment
from ppl_bandit.serving.problems import Problem

logger = logging.getLogger("ppl_bandit.serving")

_NOT_HERE = "this process makes decisions only: send rewards to the process that was started with --role learner"


class ServedDecider(ServedExperiment):
    """A decider behind an address."""

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

    def count(self) -> None:
        """Count nothing: what is pending, and the alarms of the experiment, are the learner's."""

    def gauges(self) -> dict[str, float]:
        """Return the numbers of the metrics; the age is that of the snapshot."""
        return super().gauges() | {"posterior_age": self._decider._experiment.staleness}

    def close(self) -> None:
        """Close the decider."""
        self._decider.close()

    def _learn(self, requests: Sequence[Any]) -> list[Any]:
        return [Problem(409, "decider", _NOT_HERE)] * len(requests)
