"""Metrics for Prometheus: what is counted as it happens, and what is read from the experiments when it is asked for."""

from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """The metrics of one service.

    Args:
        experiments: {name: `ServedExperiment`}, which are read at every scrape.
    """

    def __init__(self, experiments: Mapping[str, Any]):
        self._experiments, self._registry = experiments, CollectorRegistry()
        self._not_logged: Counts[tuple[str, str]] = Counts()
        ProcessCollector(registry=self._registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ppl_bandit_{name}", text, ("experiment", *labels), registry=self._registry)

        self._decisions = counter("decisions", "New decisions of this process, by arm.", "arm")
        self._rewards = counter("rewards", "Answered rewards; is_new is false for one that was known.", "is_new")
        self._refusals = counter("refusals", "Requests that were refused, by reason.", "reason")
        self._seconds = Histogram(
            "ppl_bandit_request_seconds",
            "Seconds from the end of a request to its answer.",
            ("experiment", "kind"),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._registry.register(self)

    def count_decisions(self, experiment: str, arms: Iterable[Any]) -> None:
        """Count the new decisions of a batch."""
        for arm, number in Counts(arms).items():
            self._decisions.labels(experiment, str(arm)).inc(number)

    def count_rewards(self, experiment: str, num_new: int, num_known: int) -> None:
        """Count the answered rewards of a batch."""
        for is_new, number in (("true", num_new), ("false", num_known)):
            if number:
                self._rewards.labels(experiment, is_new).inc(number)

    def count_refusal(self, experiment: str, reason: str) -> None:
        """Count refused requests; an experiment that does not exist has no label, since callers could make up any number."""
        name = experiment if experiment in self._experiments else ""
        self._refusals.labels(name, reason).inc()
        self._not_logged[name, reason] += 1

    def new_refusals(self) -> list[str]:
        """Return a line for the log about each reason of the refusals since the last call: a flood of them is few lines."""
        found, self._not_logged = self._not_logged, Counts()
        return [
            f"{name or 'the service'}: refused {number} times: {why}" for (name, why), number in list(found.items())
        ]

    def observe(self, experiment: str, kind: str, seconds: float) -> None:
        """Record how long an answer took."""
        self._seconds.labels(experiment, kind).observe(seconds)

    def describe(self) -> list[Any]:
        """Return no names: they would be read from the experiments before these are open."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield what is read from the experiments."""

        def gauge(name: str, text: str, label: str | None = None) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"ppl_bandit_{name}", text, labels=["experiment", *filter(None, [label])])

        depth = gauge("queue_rows", "Rows that wait to be recorded.", "queue")
        share = gauge("arm_share_ratio", "Share of each arm in all decisions of the experiment.", "arm")
        single = {
            "ready": gauge("ready", "1 if the experiment is compiled, its journal works and its queues have room."),
            "pending": gauge("pending_decisions", "Decisions whose reward has not come."),
            "overdue": gauge("overdue_decisions", "Pending decisions that are older than the reward window."),
            "alarms": gauge("alarms", "Alarms that are raised now."),
            "unsealed": gauge("unsealed_decisions", "Decisions of deciders that are recorded beside the stream."),
            "is_leading": gauge("is_leading", "1 if this process seals and publishes for deciders, 0 if it waits."),
            "posterior_age": gauge(
                "posterior_age_seconds",
                "Seconds since the newest reward was reported, to any process; of a decider, the age of its snapshot.",
            ),
        }
        for name, experiment in self._experiments.items():
            for queue in experiment.queues:
                depth.add_metric([name, queue.name], queue.depth)
            for arm, value in experiment.arm_shares().items():
                share.add_metric([name, str(arm)], value)
            for key, value in experiment.gauges().items():
                single[key].add_metric([name], value)
        yield from (depth, share, *single.values())

    def text(self) -> bytes:
        """Return everything in the text format."""
        return generate_latest(self._registry)
