"""The checks of all engines, with one wording each, and the measures that an update returns.

An update is compiled, so it returns the values of its checks by name; words and bounds are constants in `CHECKS`. The caller
turns the values that break their bounds into words outside of `jit`.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.proof.certificate import Residual, is_affine
from ppl_bandit.program.model.reward_model import RewardModel


class Check(NamedTuple):
    """A measure and its bound.

    Attributes:
        measure: what is measured, in words.
        bound: the largest value that passes, or the smallest.
        is_minimum: whether the bound is the smallest value that passes.
        failure: for a check that is true (1) or false (0), the words for false; its bound is a minimum of 1.
    """

    measure: str
    bound: float = 1.0
    is_minimum: bool = False
    failure: str = ""


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "capacity": Check("capacity", failure="the rows did not fit into the buffer and were not learnt"),
        "certificate": Check("the residual of a row, a step or the prior, relative to its tolerance,"),
        "proof": Check("proof", failure="a sampled site has left the region for which the closed form is proved"),
        "density": Check(
            "finite log densities",
            failure="a log density is not finite: of one row at all draws, of all rows, or of a draw after a Markov step",
        ),
        # 0.02 nats change a weight by 2%; the share is that of the effective sample size below. 1 for a closed form.
        "precision": Check(
            "the share of the posterior whose log density is not finite, or that rounding changes by 0.02 nats or more,",
            0.1,
        ),
        # 100 of 1,000 particles give P(best) to within 0.05, one standard error.
        "ess": Check("the effective sample size, as a share of the particles,", 0.1, is_minimum=True),
        "weight_ess": Check(
            "the effective sample size of the weights, as a share of the particles,", 0.5, is_minimum=True
        ),
        # Above it the error of importance sampling does not fall with the number of draws (Vehtari et al. 2024).
        "k_hat": Check("Pareto k-hat of the weights", 0.7),
        "autocorrelation": Check("the autocorrelation of the particles with their starting positions", 0.5),
        "path_autocorrelation": Check(
            "the autocorrelation of the particles with their starting positions, beyond chance,", 0.1
        ),
        "drift": Check("the drift of a mean, in units of six standard errors,"),
        "divergences": Check("the share of divergent transitions", 0.01),
        "acceptance": Check("the mean acceptance probability", 0.5, is_minimum=True),
        "unmoved": Check("the share of particles that no Markov step changed", 0.02),
        # Their region may hold posterior mass; proposals with heavy tails reach far beyond the posterior.
        "undefined": Check("the share of proposals, or of particles, whose log density is nan or infinite,", 0.02),
        "unseen_mass": Check("the posterior mass of modes with too few draws", 0.02),
        "budget": Check(
            "budget", failure="the Markov steps of one update ended at their budget, and continue with a later one"
        ),
        "disagreement": Check("the difference of the means of two independent filters, in standard deviations,", 0.5),
        # Of particles with a Kalman filter each, whose means spread less.
        "law_disagreement": Check("the difference of the means of two sets of filters, in standard deviations,", 0.7),
        # Unweighted draws of a fit, whose true errors should stay below 0.2 posterior standard deviations and 20%. Importance
        # weights show a third to a half of the error of a fit that is too narrow, and three quarters of a skewed one's.
        "mean_shift": Check("the largest error of a mean, in posterior standard deviations,", 0.15),
        "sd_shift": Check("the largest relative error of a standard deviation", 0.1),
        "mode": Check("convergence", failure="Newton's method found no mode of the posterior"),
    }
)


class Info(NamedTuple):
    """Measures of an update.

    Attributes:
        is_trusted: whether all checks passed.
        may_recover: whether the next rows may make all checks pass.
        is_full: the rows did not fit into the buffer and were not learnt; reserve capacity and update again.
        is_unfinished: the budget of an update of one row ended the moves; they continue with a later update.
        checks: the values of the checks, by their names in `CHECKS`; the worst over all blocks of latents.
        num_refreshes: refreshes of the particles so far.
        ess: number of independent draws with the same Monte Carlo error as the particles.
        log_evidence, log_evidence_error: log p(data) so far, and its standard error, where the state holds them.
        residual: of the certificate of each row, (N,), for an engine that needs a conjugate likelihood.
        prior_residual: of the prior's certificate, where the posterior is now; for a Kalman filter, of the steps.
    """

    is_trusted: Bool[Array, ""]
    may_recover: Bool[Array, ""]
    is_full: Bool[Array, ""]
    is_unfinished: Bool[Array, ""]
    checks: dict[str, Float[Array, ""]]
    num_refreshes: Int[Array, ""]
    ess: Float[Array, ""] | None = None
    log_evidence: Float[Array, ""] | None = None
    log_evidence_error: Float[Array, ""] | None = None
    residual: Residual | None = None
    prior_residual: Residual | None = None

    @property
    def is_certified(self) -> Bool[Array, " N"]:
        """Whether each row's likelihood is certified; if one is not, no row is learnt."""
        if self.residual is None:
            raise ValueError("this engine needs no conjugate likelihood, so it certifies no row")
        return is_affine(self.residual)

    def failed_checks(self) -> list[str]:
        """Name each failed check with its value and its bound."""
        return describe_failures(self.checks)


def make_info(
    checks: Mapping[str, Any],
    *,
    permanent: Iterable[str] = (),
    is_sound: Any = True,
    is_full: Any = False,
    is_unfinished: Any = False,
    num_refreshes: Any = 0,
    **measures: Any,
) -> Info:
    """Return the measures of an update, which is trusted if all checks pass.

    Args:
        checks: {name: value}; true or false for a check without a bound.
        permanent: checks that further rows cannot restore.
        is_sound: whether nothing else forbids to trust the draws.
        measures: further fields of `Info`.
    """
    values = {name: jnp.asarray(value, jnp.result_type(float)) for name, value in checks.items()}
    lasting = {name: values[name] for name in permanent}
    flags = jnp.asarray(is_full), jnp.asarray(is_unfinished)
    is_trusted = all_passed(values) & is_sound
    return Info(is_trusted, all_passed(lasting), *flags, values, jnp.asarray(num_refreshes), **measures)


def all_passed(values: Mapping[str, Float[Array, "*B"]]) -> Bool[Array, "*B"]:
    """Tell whether all values keep their bounds; nan never does."""
    passed = jnp.array(True)
    for name, value in values.items():
        passed &= _is_passed(CHECKS[name], value)
    return passed


def passing_value(name: str, value: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Return the value of a check if it keeps its bound, and the bound otherwise."""
    return jnp.where(_is_passed(CHECKS[name], value), value, CHECKS[name].bound)


def worst_values(values: Mapping[str, Float[Array, " B"]]) -> dict[str, Float[Array, ""]]:
    """Return the worst value of every check over a leading axis."""
    return {name: jnp.min(own) if _is_minimum(CHECKS[name]) else jnp.max(own) for name, own in values.items()}


def describe_failures(values: Mapping[str, Any]) -> list[str]:
    """Name each failed check with its value and its bound; runs outside of `jit`."""
    host = {name: np.asarray(values[name]) for name in CHECKS if name in values}
    return [_describe(CHECKS[name], own) for name, own in host.items() if not _is_passed(CHECKS[name], own)]


def checks_text(names: Iterable[str]) -> str:
    """Return the measures and bounds of checks, for an explanation."""
    return "; ".join(_limit_text(CHECKS[name]) for name in names)


def _is_passed(check: Check, value: Any) -> Any:
    bound = np.asarray(check.bound, value.dtype)  # in the precision of the value, so that the bound itself passes
    return value >= bound if _is_minimum(check) else value <= bound


def _describe(check: Check, value: Any) -> str:
    if check.failure:
        return check.failure
    limit = "at least" if check.is_minimum else "at most"
    return f"{check.measure} is {value:.3g} and must be {limit} {check.bound:g}"


def _limit_text(check: Check) -> str:
    if check.failure:
        return check.measure
    return f"{check.measure.rstrip(',')}, at {'least' if check.is_minimum else 'most'} {check.bound:g}"


def _is_minimum(check: Check) -> bool:
    return check.is_minimum or bool(check.failure)


def check_settings(discount: float, **counts: int) -> None:
    """Check the settings of an engine: counts are positive integers, the discount lies in (0, 1].

    Raises:
        ValueError: with what was given, what was expected and what to do instead.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if not 0.0 < discount <= 1.0:
        raise ValueError(
            f"discount must lie in (0, 1], got {discount}; 1 forgets nothing, 0.99 halves a row in 69 rows"
        )


def refuse_moving(model: RewardModel, what: str) -> None:
    """Refuse a program whose latents move.

    Args:
        what: name of the engine that refuses it.

    Raises:
        ValueError: if a latent moves.
    """
    if model.moving_sites:
        raise ValueError(
            f"{what} is for latents that do not move, and this program samples {', '.join(model.moving_sites)} from "
            "`previous`: use engines.choose, engines.kalman or engines.particle_filter"
        )
