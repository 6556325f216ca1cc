"""Distances between draws and a reference, on arrays.

Latents are flattened: one column for every element of every site, `K` in all. Errors are in units of the reference's
standard deviation.

Also here: results of comparisons of engines and of programs.

Also here: closed-form marginals of the exact posterior.

The exact engine's state has the parameters of all families in a few arrays; `Capabilities.parameters` arranges them by site.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.distributions import constraints

from ppl_bandit.comparison.engine_runs import EngineRun
from ppl_bandit.live.overview import Overview
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import element_support
from ppl_bandit.types import Engine, Explanation, Interaction

QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)


class Estimate(NamedTuple):
    """A mean over independent runs, and its Monte Carlo standard error (nan for a single run)."""

    value: np.ndarray
    error: np.ndarray


class ReferenceLatents(NamedTuple):
    """Moments, quantiles and samples of the latents under the reference.

    Attributes:
        mean: (K,).
        sd: (K,).
        unit: (K,), divisor of the errors: the sd, or half of the central 68% if the sd is infinite.
        quantiles: (Q, K), at QUANTILES.
        samples: (S, M, K), independent samples of the reference, of the engines' size.
    """

    mean: np.ndarray
    sd: np.ndarray
    unit: np.ndarray
    quantiles: np.ndarray
    samples: np.ndarray


class LatentErrors(NamedTuple):
    """Errors of every latent element, over the runs of an engine.

    Attributes:
        mean: (mean - reference) / unit.
        sd: sd / reference - 1; nan if the reference has no sd.
        quantiles: (Q, K), (quantile - reference) / unit.
        wasserstein: Wasserstein-1 distance to reference samples of the same size, in units.
        kolmogorov: two-sample Kolmogorov-Smirnov distance to them.
    """

    mean: Estimate
    sd: Estimate
    quantiles: Estimate
    wasserstein: Estimate
    kolmogorov: Estimate


def latent_errors(runs: np.ndarray, target: ReferenceLatents) -> LatentErrors:
    """Compare the draws of independent runs (R, M, K) with a target."""
    means, sds = runs.mean(axis=1), runs.std(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (means - target.mean) / target.unit
        sd = np.where(np.isfinite(target.sd), sds / target.sd - 1.0, np.nan)
    quantiles = (np.quantile(runs, QUANTILES, axis=1).swapaxes(0, 1) - target.quantiles) / target.unit
    partners = [target.samples[number % len(target.samples)] for number in range(len(runs))]
    return LatentErrors(
        estimate(mean),
        estimate(sd),
        estimate(quantiles),
        estimate(
            np.stack([wasserstein(run, partner) for run, partner in zip(runs, partners, strict=True)]) / target.unit
        ),
        estimate(np.stack([kolmogorov(run, partner) for run, partner in zip(runs, partners, strict=True)])),
    )


def latent_floor(target: ReferenceLatents) -> tuple[Estimate, Estimate]:
    """Return the Wasserstein-1 and Kolmogorov-Smirnov distances between two independent reference samples, per column.

    The second number is the standard deviation of one pair.
    """
    pairs = list(zip(target.samples[::2], target.samples[1::2], strict=False))
    return (
        mean_with_sd(np.stack([wasserstein(*pair) for pair in pairs]) / target.unit),
        mean_with_sd(np.stack([kolmogorov(*pair) for pair in pairs])),
    )


def estimate(values: np.ndarray) -> Estimate:
    """Return the mean over the leading axis of independent runs, and its standard error."""
    mean, sd = mean_with_sd(values)
    return Estimate(mean, sd / np.sqrt(len(values)))


def mean_with_sd(values: np.ndarray) -> Estimate:
    """Return the mean over the leading axis, and the standard deviation of a single value."""
    number = len(values)
    sd = values.std(axis=0, ddof=1) if number > 1 else np.full(values.shape[1:], np.nan)
    return Estimate(values.mean(axis=0), sd)


def wasserstein(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the Wasserstein-1 distance of two samples (M, K) of the same size, per column."""
    return np.abs(np.sort(first, axis=0) - np.sort(second, axis=0)).mean(axis=0)


def kolmogorov(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the largest difference of two samples' distribution functions (M, K), per column; nan if one contains nan."""
    both = np.concatenate([first, second])
    order = np.argsort(both, axis=0, kind="stable")
    step = np.where(order < len(first), 1.0 / len(first), -1.0 / len(second))
    gaps = np.abs(np.cumsum(step, axis=0))
    # Of equal values only the last one counts.
    values = np.take_along_axis(both, order, axis=0)
    is_last = np.concatenate([values[1:] != values[:-1], np.ones((1, values.shape[1]), bool)])
    return np.where(np.isnan(both).any(axis=0), np.nan, np.where(is_last, gaps, 0.0).max(axis=0))


def largest_error(values: np.ndarray) -> float:
    """Return the largest absolute value, ignoring nan; nan if all are."""
    sizes = np.abs(values)
    return float(np.nanmax(sizes)) if np.isfinite(sizes).any() else float("nan")


def total_variation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return half the sum of absolute differences of probabilities over the last axis."""
    return 0.5 * np.abs(first - second).sum(axis=-1)


def r_hat(runs: np.ndarray) -> np.ndarray:
    """Return R-hat of independent runs (R, M, K), per column: 1 where they agree; nan for a single run."""
    number, size, _ = runs.shape
    if number < 2:
        return np.full(runs.shape[2], np.nan)
    within = runs.var(axis=1, ddof=1).mean(axis=0)
    between = runs.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((size - 1) / size + between / within)


class ClosedFormMarginal(NamedTuple):
    """The marginal law of every element of a site, in closed form.

    Attributes:
        law: a frozen SciPy distribution whose parameters have the site's shape.
        mean: infinite or nan if the law has no mean.
        sd: infinite if the law has no variance.
    """

    law: Any
    mean: np.ndarray
    sd: np.ndarray


def exact_marginals(model: RewardModel, engine: Engine, state: Any) -> dict[str, ClosedFormMarginal]:
    """Return the marginal law of every latent of an exact engine, {site: ClosedFormMarginal}.

    Beta on its interval; Beta for each share of a Dirichlet; a power of a Gamma; Gaussian, or Student-t where a latent
    precision u ~ Gamma(a, b) scales the reals: 2 a degrees of freedom, and the squared scale is their covariance times
    precision, times b / a.
    """
    find, bounds = engine.capabilities.parameters, support_bounds(model)
    assert find is not None  # the engine is exact
    known = find(state)
    return {name: _law(known[name], jax.device_get(state), bounds[name]) for name in model.latent_shapes}


def _law(values: Mapping[str, Any], state: Any, bounds: tuple[Any, Any]) -> ClosedFormMarginal:
    from scipy import stats

    (low, high), names = bounds, values.keys()  # the names of the parameters tell the family
    if "concentration1" in names:
        law = stats.beta(values["concentration1"], values["concentration0"], loc=low, scale=high - low)
        return ClosedFormMarginal(law, law.mean(), law.std())
    if "concentration" in names and "rate" not in names:
        share = values["concentration"]
        law = stats.beta(share, share.sum(axis=-1, keepdims=True) - share)
        return ClosedFormMarginal(law, law.mean(), law.std())
    if "rate" in names:
        a, power = values["concentration"], values["power"]
        law = stats.gengamma(a, power, loc=low, scale=values["rate"] ** (-1.0 / power))
        with np.errstate(all="ignore"):  # a power of a Gamma has the moments n for which a + n / power is positive
            mean = np.where(a + 1.0 / power > 0, law.mean(), np.inf)
            return ClosedFormMarginal(law, mean, np.where(a + 2.0 / power > 0, law.std(), np.inf))
    mean = values["mean"]
    owner = np.asarray(values.get("scaled_by", np.full(mean.shape, -1)))
    is_scaled = owner >= 0
    spread = np.asarray(values.get("covariance", values.get("covariance_times_precision")))
    variance, degrees = np.diagonal(spread).reshape(mean.shape), np.full(mean.shape, np.inf)
    if is_scaled.any():
        shape, rate = np.moveaxis(state.elements["positive"][owner], -1, 0)
        degrees = np.where(is_scaled, 2.0 * shape, np.inf)
        variance = variance * np.where(is_scaled, rate / shape, 1.0)
    law = stats.t(degrees, loc=mean, scale=np.sqrt(variance))
    with np.errstate(all="ignore"):
        ratio = np.where(np.isinf(degrees), 1.0, np.where(degrees > 2, degrees / (degrees - 2.0), np.inf))
    return ClosedFormMarginal(law, np.where(degrees > 1, mean, np.nan), np.sqrt(variance * ratio))


def support_bounds(model: RewardModel) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the bounds of each latent site's support, infinite if it is unbounded."""

    def read() -> dict[str, tuple[Any, Any]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 3)
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        return {name: _bounds_of(trace[name]["fn"].support, shape) for name, shape in model.latent_shapes.items()}

    return run_once(read)


def _bounds_of(support: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    support = element_support(support)
    is_simplex = isinstance(support, type(constraints.simplex))
    low = getattr(support, "lower_bound", 0.0 if is_simplex else -jnp.inf)
    high = getattr(support, "upper_bound", 1.0 if is_simplex else jnp.inf)
    return jnp.broadcast_to(jnp.asarray(low, float), shape), jnp.broadcast_to(jnp.asarray(high, float), shape)


INTERRUPTED = "interrupted"  # reason why an engine has no result


class SamplingNoise(NamedTuple):
    """Distances between independent samples of the reference, each with the standard deviation of one distance.

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
    """The posterior that engines are compared with.

    Attributes:
        name: "exact", or the name of the engine that replaces it.
        is_exact: whether it is the exact posterior, in closed form.
        is_trusted: whether its engine trusts the run.
        description: a sentence.
        explanation: of its engine.
        target: moments, quantiles and samples of the latents.
        floor: distances that sampling noise alone causes.
        laws: {site: ClosedFormMarginal}, the marginals in closed form; None if it is not exact.
        best_arm_probs: (C, A), p-hat over all of its samples.
        num_candidates: (C,), N, averaged over its samples.
        propensities: (C, A), averaged over its samples.
    """

    name: str
    is_exact: bool
    is_trusted: bool
    description: str
    explanation: Explanation
    target: ReferenceLatents
    floor: SamplingNoise
    laws: dict[str, ClosedFormMarginal] | None
    best_arm_probs: np.ndarray
    num_candidates: np.ndarray
    propensities: np.ndarray


class DecisionErrors(NamedTuple):
    """Decisions based on an engine's draws, in each of C contexts (one for a program without).

    Attributes:
        best_arm_probs: p-hat (C, A).
        num_candidates: N (C,).
        propensities: (C, A).
        best_arm_probs_distance: total variation of p-hat from the reference's, averaged over contexts.
        other_arm_prob: probability of playing another arm than the reference under the best coupling of their random
            numbers: the total variation of the propensities, averaged over contexts.
    """

    best_arm_probs: Estimate
    num_candidates: Estimate
    propensities: Estimate
    best_arm_probs_distance: Estimate
    other_arm_prob: Estimate


class EngineResult(NamedTuple):
    """Results of one engine.

    Attributes:
        explanation: of the engine.
        runs: independent runs on all rows.
        latents: errors of its draws.
        decisions: errors of its decisions.
        ess: (K,), effective sample size of a run's M draws.
        r_hat: (K,), of the runs taken as chains.
        info: diagnostics of the last run; of divergences the largest share of a run.
        seconds_cold: from the program to draws: construction, compilation and one run.
        seconds_warm: one compiled run, averaged over the later runs.
    """

    explanation: Explanation
    runs: list[EngineRun]
    latents: LatentErrors
    decisions: DecisionErrors
    ess: np.ndarray
    r_hat: np.ndarray
    info: dict[str, float]
    seconds_cold: float
    seconds_warm: Estimate


class StreamPoint(NamedTuple):
    """The comparison after some of the rows: one run of each engine, which learnt them part by part."""

    num_rows: int
    reference: Reference
    engines: dict[str, tuple[LatentErrors, DecisionErrors]]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Engines on the same program and rows; `print` it for the tables.

    Attributes:
        name: name of the program.
        model: the program.
        arms: names of the arms.
        data: the rows.
        contexts: contexts of the compared decisions (C, ...); None for a program without.
        labels: K names, one for each element of each latent.
        reference: the posterior that engines are compared with.
        engines: {label: result}.
        refused: {label: reason why that engine was not run}.
        stream: errors after 1/8, 1/4, 1/2 and all of the rows, or after `checkpoints`.
        num_samples: posterior draws M of each run.
        seed: random seed.
        selector: name of the selector.
        is_cached: whether compiled functions came from a disk cache, which shortens `seconds_cold`.
        overviews: statistics of the arms, by the "reference" and by each engine whose draws are finite.
        text: the printed tables.
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
    overviews: dict[str, Overview]
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
        if engine not in self.engines:
            raise ValueError(f"engine={engine!r} was not run; the engines of this comparison are {list(self.engines)}")
        runs = self.engines[engine].runs
        posterior = {name: np.concatenate([run.draws[name] for run in runs]) for name in self.model.latent_shapes}
        return arviz_object(self.model, self.arms, posterior, self.data, len(runs), self.seed, self.num_samples)


class ModelScore(NamedTuple):
    """Predictive scores of one program on the rows.

    Attributes:
        name: name of the program.
        log_evidence: log p(rows), natural logarithm.
        log_evidence_error: its Monte Carlo standard error; 0 if it is exact.
        evidence_way: "exact", or the name of the engine whose runs estimate it, such as "reweight".
        probability: posterior probability of the program under equal prior probabilities.
        elpd: expected log predictive density by leave-one-out (PSIS-LOO); nan if it is not computed.
        elpd_error: its standard error over rows.
        elpd_difference: difference to the program with the highest elpd.
        elpd_difference_error: the standard error of the difference, paired by row.
        num_bad_rows: rows with a Pareto k-hat above 0.7, for which LOO is unreliable.
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
    """Programs in order of log evidence, the highest first; `print` it for the table.

    Attributes:
        text: the printed table.
        why_no_loo: why LOO is not computed; empty if it is.
    """

    scores: list[ModelScore]
    num_rows: int
    seed: int
    text: str = ""
    why_no_loo: str = ""

    def __str__(self) -> str:
        return self.text


def arviz_object(
    model: RewardModel,
    arms: list[Any],
    draws: Mapping[str, np.ndarray],
    data: Interaction,
    num_chains: int,
    seed: int,
    num_prior_draws: int,
) -> Any:
    """Return posterior draws, in chains, prior draws and rows as an ArviZ object."""
    from ppl_bandit.live import exports as arviz_export

    with jax.enable_x64(True):
        prior = run_once(lambda: model.sample_prior(jr.key(seed), num_prior_draws))
    reward = data.reward if isinstance(data.reward, Mapping) else {model.outcomes[0]: data.reward}
    rows: Any = data.arm, dict(reward), data.context
    return arviz_export.export(model, arms, draws, prior, rows, num_chains)


def element_labels(model: RewardModel, arms: Sequence[Any]) -> list[str]:
    """Label every element of every latent; arms' names are used if the first axis has one entry per arm: `rate[high]`."""
    labels = []
    for name, shape in model.latent_shapes.items():
        for index in np.ndindex(shape):
            parts = [str(arms[i]) if axis == 0 and shape[0] == len(arms) else str(i) for axis, i in enumerate(index)]
            labels.append(f"{name}[{', '.join(parts)}]" if parts else name)
    return labels
