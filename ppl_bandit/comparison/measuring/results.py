"""What a comparison found, of engines or of programs: data that does not know how it is printed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np

from ppl_bandit.comparison.measuring.closed_form import Law
from ppl_bandit.comparison.measuring.errors import Estimate, LatentErrors, Target
from ppl_bandit.comparison.measuring.running import Run
from ppl_bandit.live.show.overview import Overview
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Explanation, Interaction

__all__ = [
    "INTERRUPTED",
    "Comparison",
    "DecisionErrors",
    "EngineResult",
    "Floor",
    "Ranking",
    "Reference",
    "Score",
    "StreamPoint",
    "element_labels",
]

INTERRUPTED = "interrupted"  # why an engine was not run


class Floor(NamedTuple):
    """Distances between independent samples of the reference itself, each with the standard deviation of one of them.

    Attributes:
        wasserstein: (K,), between two samples, in the units of the errors.
        kolmogorov: (K,), between two samples.
        best_arm_probs: total variation of one sample's p-hat from that of all others.
        other_arm_prob: total variation of one sample's propensities from those of all others on average.
    """

    wasserstein: Estimate
    kolmogorov: Estimate
    best_arm_probs: Estimate
    other_arm_prob: Estimate


class Reference(NamedTuple):
    """What engines are measured against.

    Attributes:
        name: "exact", or the name of the engine that stands in for it.
        is_exact: whether it is the exact posterior, in closed form.
        is_trusted: whether the evidence of its own run speaks for it.
        words: what it is, in a sentence.
        explanation: of its engine.
        target: moments, quantiles and samples of the latents.
        floor: what sampling alone does to every distance.
        laws: {site: Law}, the marginals in closed form; None if it is not exact.
        best_arm_probs: (C, A), p-hat over all of its samples.
        num_candidates: (C,), N, averaged over its samples.
        propensities: (C, A), averaged over its samples.
    """

    name: str
    is_exact: bool
    is_trusted: bool
    words: str
    explanation: Explanation
    target: Target
    floor: Floor
    laws: dict[str, Law] | None
    best_arm_probs: np.ndarray
    num_candidates: np.ndarray
    propensities: np.ndarray


class DecisionErrors(NamedTuple):
    """How an engine would have decided, in each of C contexts (one for a program without).

    Attributes:
        best_arm_probs: p-hat (C, A).
        num_candidates: N (C,).
        propensities: (C, A).
        best_arm_probs_distance: total variation of p-hat from the reference's, averaged over contexts.
        other_arm_prob: probability of playing another arm than the reference would, were both to use chance as alike as
            can be: the total variation of the propensities, averaged over contexts.
    """

    best_arm_probs: Estimate
    num_candidates: Estimate
    propensities: Estimate
    best_arm_probs_distance: Estimate
    other_arm_prob: Estimate


class EngineResult(NamedTuple):
    """What one engine did.

    Attributes:
        explanation: its own account.
        runs: independent runs on all rows.
        latents: errors of its draws.
        decisions: errors of its decisions.
        ess: (K,), effective sample size of a run's M draws.
        r_hat: (K,), of the runs taken as chains.
        info: evidence of the last run; divergences are summed over the runs.
        seconds_cold: from the program to draws: building the engine, compiling, running.
        seconds_warm: the same once compiled, averaged over the later runs.
    """

    explanation: Explanation
    runs: list[Run]
    latents: LatentErrors
    decisions: DecisionErrors
    ess: np.ndarray
    r_hat: np.ndarray
    info: dict[str, float]
    seconds_cold: float
    seconds_warm: Estimate


class StreamPoint(NamedTuple):
    """The comparison after the first rows: one run of each engine, which learnt them part by part."""

    num_rows: int
    reference: Reference
    engines: dict[str, tuple[LatentErrors, DecisionErrors]]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Engines on the same program and rows; `print` it for the tables.

    Attributes:
        name: of the program.
        model: the program.
        arms: names of the arms.
        data: the rows.
        contexts: those in which decisions were compared (C, ...); None for a program without.
        labels: K names, one for each element of each latent.
        reference: what all are measured against.
        engines: label -> result.
        refused: label -> why that engine could not be run.
        stream: the same after 1/8, 1/4, 1/2 and all of the rows, or where `checkpoints` asked.
        num_samples: posterior draws M of each run.
        seed: of all random numbers.
        selector: name of the selector that decided.
        is_cached: whether jax kept compiled programs on disk, so that a first run may have been faster than it looks.
        standings: where the arms stand according to the "reference" and to each engine whose draws are finite.
        text: the tables, ready to print; whoever makes a comparison writes them.
    """

    name: str
    model: RewardModel
    arms: list[Any]
    data: Interaction
    contexts: Any
    labels: list[str]
    reference: Reference
    engines: dict[str, EngineResult]
    refused: dict[str, str]
    stream: list[StreamPoint]
    num_samples: int
    seed: int
    selector: str
    is_cached: bool
    standings: dict[str, Overview]
    text: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether no engine is missing because of an interruption."""
        return INTERRUPTED not in self.refused.values()

    def __repr__(self) -> str:
        return f"Comparison({self.name}, {list(self.engines)} against {self.reference.name}, {len(self.data.arm)} rows)"

    def __str__(self) -> str:
        return self.text

    def to_arviz(self, engine: str) -> Any:
        """Return the draws of an engine, with its runs as chains, as an ArviZ object; see `Bandit.to_arviz`."""
        from ppl_bandit.live.show import arviz_export

        if engine not in self.engines:
            raise ValueError(f"engine={engine!r} was not run; the engines of this comparison are {list(self.engines)}")
        runs = self.engines[engine].runs
        posterior = {name: np.concatenate([run.draws[name] for run in runs]) for name in self.model.latent_shapes}
        with jax.enable_x64(True):
            draw = quick_jit(lambda: self.model.sample_prior(jr.key(self.seed), self.num_samples))
            prior = jax.device_get(draw())
        rewards = self.data.reward if isinstance(self.data.reward, Mapping) else None
        given = dict(rewards) if rewards is not None else {self.model.outcomes[0]: self.data.reward}
        rows: Any = self.data.arm, given, self.data.context
        return arviz_export.export(self.model, self.arms, posterior, prior, rows, num_chains=len(runs))


class Score(NamedTuple):
    """How well one program predicts the rows.

    Attributes:
        name: of the program.
        log_evidence: log p(rows), natural logarithm.
        log_evidence_error: its Monte Carlo standard error; 0 where it is exact.
        evidence_way: "exact", or "reweight" where runs of that engine estimate it.
        probability: posterior probability of the program, if those ranked were equally probable before.
        elpd: expected log predictive density of a row that was left out, summed over rows (PSIS-LOO); nan without ArviZ.
        elpd_error: its standard error over rows.
        elpd_difference: behind the best program by elpd; 0 for that one.
        elpd_difference_error: the standard error of the difference, paired by row.
        num_bad_rows: rows whose Pareto k-hat exceeds 0.7: too influential for this LOO.
        explanation: of the engine that drew from its posterior.
    """

    name: str
    log_evidence: float
    log_evidence_error: float
    evidence_way: str
    probability: float
    elpd: float
    elpd_error: float
    elpd_difference: float
    elpd_difference_error: float
    num_bad_rows: int
    explanation: str


class Ranking(NamedTuple):
    """Programs, the highest log evidence first; `print` it for the table.

    Attributes:
        text: the table, ready to print; whoever makes a ranking writes it, because a result does not know how it is printed.
    """

    scores: list[Score]
    num_rows: int
    seed: int
    text: str = ""

    def __str__(self) -> str:
        return self.text


def element_labels(model: RewardModel, arms: Sequence[Any]) -> list[str]:
    """Name every element of every latent: `rate[high]` where the first axis has as many entries as there are arms."""
    labels = []
    for name, shape in model.latent_shapes.items():
        for index in np.ndindex(shape):
            parts = [str(arms[i]) if axis == 0 and shape[0] == len(arms) else str(i) for axis, i in enumerate(index)]
            labels.append(f"{name}[{', '.join(parts)}]" if parts else name)
    return labels
