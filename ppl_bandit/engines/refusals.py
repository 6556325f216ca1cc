"""Why a program is not conjugate, and what to write instead: the exceptions of the exact engine.

The tests build a program from every remedy.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.explanation import program_name
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, Layout
from ppl_bandit.engines.inner.registry import FAMILIES
from ppl_bandit.engines.proof.certificate import Residual, resolution
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.numpyro_adapter import distribution_name
from ppl_bandit.types import DETAILS, Explanation, NotConjugate

KEEP = "keep the program: Bandit and engines.choose draw by an engine that needs no conjugacy"

_SMOOTH = (
    "let latents reach the outcome through arithmetic and smooth functions alone; branches, indices, clips and rounding may "
    "depend on arm and context"
)
ANALYTIC_REMEDY = f"{_SMOOTH}; or {KEEP}"

_GAUSSIAN = (
    "Normal priors on latents in which {} is linear, its standard deviation known, or its variance under an InverseGamma prior "
    "and the Normal priors scaled by it"
)
CONJUGATE: Mapping[str, str] = {  # outcome -> the prior that it is conjugate to
    "Bernoulli": "a Beta prior on its probability itself",
    "Binomial": "a Beta prior on its probability itself",
    "Geometric": "a Beta prior on its probability itself",
    "Categorical": "a Dirichlet prior on its probabilities themselves",
    "Poisson": "a Gamma prior on its rate, or on the rate per unit of a known exposure",
    "Exponential": "a Gamma prior on its rate, or an InverseGamma prior on its mean",
    "Gamma": "a Gamma prior on its rate, its concentration known",
    "Weibull": "a Gamma prior on its scale ** -concentration, its concentration known",
    "Normal": _GAUSSIAN.format("its mean"),
    "LogNormal": _GAUSSIAN.format("the mean of its logarithm"),
}

_REAL_STATISTICS = "z and z z'"
_REAL_REMEDY = "real latents have a Normal prior, each with a mean that is linear in the others"


def refusal(model: RewardModel, reason: str, remedy: str, details: str = "") -> NotConjugate:
    """Return the exception for a program that is not conjugate, with what would make it so.

    Args:
        details: measures and what was tried, which `Bandit.explain` leaves out unless it is asked for them.
    """
    sentence = f"{program_name(model)} {reason}"
    text = f"{program_name(model)}: NOT EXACT.\n  reason: it {reason}\n  remedy: {remedy}"
    more = f"\n{DETAILS}{details}" if details else ""
    message = f"{sentence}; {remedy}" + (f" (details: {details})" if details else "")
    return NotConjugate(message, Explanation("conjugate", False, sentence, {}, text + more))


def density_refusal(model: RewardModel, layout: Layout, alone: list[str], residual: Residual, row: Any) -> NotConjugate:
    """Return the exception for a program whose prior or likelihood is not affine in the sufficient statistics.

    Args:
        alone: sites that break the affine form while the others are fixed; empty if only several together do.
        row: the row of data whose likelihood failed; None for the prior.
    """
    what = _density_text(model, row)
    blamed = alone or [site.name for site in layout.sites]
    sites = [site for site in layout.sites if site.name in blamed]
    statistics = {REAL: _REAL_STATISTICS, **{kind: family.statistics_text for kind, family in FAMILIES.items()}}
    priors = {REAL: _REAL_REMEDY, **{kind: family.prior_remedy for kind, family in FAMILIES.items()}}
    names = ", ".join(f"'{name}'" for name in blamed)
    if alone:
        form = "; ".join(f"'{site.name}': {statistics[site.kind]}" for site in sites)
        reason = f"has no closed-form posterior: the {what} is not conjugate in {names}"
        details = f"the log {what} is not affine in the sufficient statistics ({form})"
    else:
        reason = f"has no closed-form posterior: the {what} couples {names} in a way that no conjugate family has"
        details = f"the log {what} is not affine in the sufficient statistics of all of them"
    nats, tolerance = float(residual.nats), float(residual.tolerance)
    details += f"; residual {nats:.1e} nats, tolerance {tolerance:.1e} nats"
    kinds = {site.kind for site in layout.sites}
    if row is None:
        given = "; ".join(dict.fromkeys(priors[site.kind] for site in sites))
        remedy = f"in a conjugate program {given}, and no factor bends it"
    elif not alone and {REAL, POSITIVE} <= kinds and np.any(layout.owner < 0):
        real = next(site.name for site in layout.of(REAL))
        scale = layout.of(POSITIVE)[0].name
        remedy = (
            f"'{real}' and '{scale}' are conjugate only jointly: scale the prior of '{real}' by the noise, "
            f"as in Normal(m, s * sd) with sd made from '{scale}'"
        )
    else:
        remedy = outcome_remedy(model)
    if nats < 1e-6:
        remedy += "; a deviation as small as here can come from a cast to float32 inside the program"
    return refusal(model, reason, remedy, details)


def proof_refusal(model: RewardModel, reason: str, remedy: str, *, in_program: bool, is_prior: bool) -> NotConjugate:
    """Return the exception for a program that is not proved for all data.

    Args:
        remedy: what the user can write instead; "" for what is conjugate to the outcomes.
        in_program: whether the user wrote the operation at which the proof stops.
        is_prior: whether it stops in the prior.
    """
    if not remedy:
        remedy = KEEP if is_prior else outcome_remedy(model)
        remedy = f"{_SMOOTH}; {'or ' * is_prior}{remedy}" if in_program else remedy
    return refusal(model, f"cannot be proved conjugate: {reason}", remedy)


def rounding_refusal(model: RewardModel, layout: Layout, residual: Residual, where: str = "") -> NotConjugate:
    """Return the exception for a prior whose terms are so large that rounding could hide a deviation near its middle.

    Args:
        where: for which values of other latents, for the message.
    """
    hidden = (
        f"rounding alone could hide {float(residual.rounding):.1e} nats of a deviation, and no more than "
        f"{resolution(jnp.float64):g} are certified"
    )
    if not residual.nats < jnp.inf:
        hidden = "rounding leaves no precision matrix that could be inverted"
    if layout.members.shape[1] > 1:
        return refusal(
            model,
            f"cannot be certified in float64: its prior ties reals to each other too tightly{where}",
            "write a tight child as its parent plus a small step, as in `child = parent + 1e-7 * numpyro.sample(..., "
            "dist.Normal(0, 1))`; add a larger multiple of the identity to a covariance matrix, 1e-6 of its diagonal, and "
            "compute it from float64 numbers (NumPy arrays, or made in the program): differences of float32 numbers are off "
            "by 1e-7; or measure the latents in other units",
            hidden,
        )
    return refusal(
        model,
        f"cannot be certified in float64: the terms of its log prior are too large{where}",
        "use a prior that counts fewer observations, or other units",
        hidden,
    )


def untested_refusal(model: RewardModel, arm: int, is_rounded: bool) -> NotConjugate:
    """Return the exception for a program for which no trial reward on an arm could be certified."""
    if is_rounded:
        return refusal(
            model,
            f"cannot be certified in float64: for every reward that was tried on arm {arm} the terms of the log likelihood are "
            "too large",
            "measure rewards and latents in units in which the noise is not so small",
            f"rounding alone could hide more than {resolution(jnp.float64):.0e} nats",
        )
    return refusal(
        model,
        f"cannot be certified: no reward that was tried has a finite likelihood on arm {arm}",
        "check the outcome's distribution on that arm",
    )


def outcome_remedy(model: RewardModel) -> str:
    """Return which priors are conjugate to the outcomes of a program, and that other engines accept it as it is."""
    known, unknown = [], []
    for name in dict.fromkeys(_outcome_names(model)):
        article = "an" if name[0] in "AEIOU" else "a"
        if name in CONJUGATE:
            known.append(f"{article} {name} outcome is conjugate to {CONJUGATE[name]}")
        else:
            unknown.append(f"no prior is known that is conjugate to {article} {name} outcome")
    return "; ".join([*known, *unknown, f"or {KEEP}" if not unknown else KEEP])


def _outcome_names(model: RewardModel) -> list[str]:
    names: list[str] = []

    def trace_program() -> None:
        trace = model.trace({}, jnp.zeros(1, int), model.context_rows(1))
        names.extend(distribution_name(trace[name]["fn"]) for name in model.outcomes)

    jax.eval_shape(trace_program)
    return names


def _density_text(model: RewardModel, row: Any) -> str:
    if row is None:
        return "prior"
    values: Mapping[str, Array] = model.outcome_values(row.reward)
    given = ", ".join(f"{name} {float(value[0]):g}" for name, value in values.items())
    return f"likelihood of {given} on arm {int(row.arm[0])}"
