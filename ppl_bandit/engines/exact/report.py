"""The exact engine in words and numbers: what was proved, what is updated how, why a program was refused."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.exact.certificate.certificate import Evidence, Residual, resolution
from ppl_bandit.engines.exact.families.families import Layout, Natural, Posterior, SiteBlock
from ppl_bandit.engines.exact.remedies import ANALYTIC_REMEDY, PRIORS, outcome_remedy
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Explanation, NotConjugate

__all__ = [
    "ANALYTIC_REMEDY",
    "accepted",
    "blurred_refusal",
    "density_refusal",
    "bent_refusal",
    "family",
    "nats_words",
    "parameters",
    "refusal",
    "untested_refusal",
]

_NUM_EXAMPLES = 3


def parameters(layout: Layout, posterior: Posterior) -> dict[str, dict[str, np.ndarray]]:
    """Return each site's posterior parameters, shaped as the site.

    Beta: `concentration1`, `concentration0`. Dirichlet: `concentration`. Gamma of a power u of the site: `concentration`,
    `rate`, `power`. Reals: `mean` and `covariance` over the site's elements; for reals that a latent precision u scales
    it is `covariance_times_precision`, their covariance times u, and `scaled_by` is the number of the positive element that
    scales each, counted over all positive sites in order, -1 where none does.
    """
    posterior = jax.device_get(posterior)
    found: dict[str, dict[str, Any]] = {}
    for site in layout.sites:
        span = slice(site.start, site.start + site.size)
        if site.kind == "unit":
            pair = posterior.beta[span]
            found[site.name] = {
                "concentration1": pair[:, 0].reshape(site.shape),
                "concentration0": pair[:, 1].reshape(site.shape),
            }
        elif site.kind == "simplex":
            found[site.name] = {"concentration": posterior.dirichlet[site.start].reshape(site.shape)}
        elif site.kind == "positive":
            found[site.name] = {
                "concentration": posterior.shape[span].reshape(site.shape),
                "rate": posterior.rate[span].reshape(site.shape),
                "power": layout.power[span].reshape(site.shape),
            }
        else:
            found[site.name] = _real_parameters(layout, posterior, site)
    return found


def _real_parameters(layout: Layout, posterior: Posterior, site: SiteBlock) -> dict[str, np.ndarray]:
    num_real, span = layout.count("real"), slice(site.start, site.start + site.size)
    mean, spread = np.zeros(num_real), np.zeros((num_real, num_real))
    for row, (own, inside) in enumerate(zip(layout.members, layout.is_member, strict=True)):
        own = own[inside]
        mean[own] = posterior.mean[row, inside]
        spread[np.ix_(own, own)] = np.linalg.inv(posterior.precision[row])[np.ix_(inside, inside)]
    found, owner = {"mean": mean[span].reshape(site.shape)}, layout.owner_of_real[span].reshape(site.shape)
    if np.all(owner < 0):
        return {**found, "covariance": spread[span, span]}
    return {**found, "covariance_times_precision": spread[span, span], "scaled_by": owner}


def family(layout: Layout, site: SiteBlock) -> str:
    """Name a site's posterior family."""
    elements = range(site.start, site.start + site.size)
    if site.kind == "unit":
        standard = np.all(np.asarray(site.low) == 0) and np.all(np.asarray(site.high) == 1)
        return "Beta" if standard else "Beta, on its interval"
    if site.kind == "simplex":
        return "Dirichlet"
    if site.kind == "positive":
        owners = [i for i in elements if layout.num_scaled[i]]
        return " and ".join(dict.fromkeys(_scale_words(layout.power[i], i in owners, site.name) for i in elements))
    scales = set(layout.owner_of_real[elements.start : elements.stop].tolist())
    words = ["Gaussian"] if -1 in scales else []
    for site_of in layout.of("positive"):
        if any(site_of.start <= i < site_of.start + site_of.size for i in scales):
            words.append(f"{_scale_words(layout.power[site_of.start], True, site_of.name)}, scaled by {site_of.name}")
    return " and ".join(words)


def _scale_words(power: float, has_members: bool, name: str) -> str:
    if power == 1.0:
        return "Normal-Gamma" if has_members else "Gamma"
    if power == -1.0:
        return "Normal-InverseGamma" if has_members else "InverseGamma"
    if has_members:
        kind = {-2.0: "a standard deviation", 2.0: "a root precision"}.get(power, f"its precision is {name}^{power:g}")
        return f"Normal-InverseGamma ({kind})" if power < 0 else f"Normal-Gamma ({kind})"
    return f"Gamma in {name}^{power:g}"


def accepted(
    model: RewardModel,
    layout: Layout,
    prior: Posterior,
    evidence: Evidence,
    discount: float = 1.0,
    infinite: str = "",
) -> Explanation:
    """Explain an accepted program; `infinite` says what is so of its expected rewards."""
    sites = {site.name: family(layout, site) for site in layout.sites}
    lines = [f"{_name(model)}: EXACT. Every posterior is in closed form; draws are exact and independent.", ""]
    for site in layout.sites:
        count = f", {site.size} elements" if site.size > 1 else ""
        lines.append(f"  {site.name}: {sites[site.name]}{count}")
        lines.append(f"    prior    {_prior_words(layout, prior, site)}")
        lines.append(f"    update   {_update_words(layout, site)}")
        example = _example_words(layout, site, evidence.examples)
        if example:
            lines.append(f"    such as  {example}")
    lines += [
        "",
        f"  expected reward: {model.expected_reward_method}" + (f"; {infinite}" if infinite else ""),
        "  proved: latents reach the outcome through real-analytic operations alone, none of them a branch, an index, a",
        "    comparison or a rounding of a latent",
        f"  certified: the prior and {evidence.num_rows} rows of data on all {model.num_arms} arms are affine in the "
        f"sufficient statistics at {evidence.num_points} random points each;",
        f"    largest residual {nats_words(evidence)}; every new datum is certified likewise, before and after it is absorbed",
    ]
    if discount < 1.0:
        lines.append(
            f"  forgetting: each row's log likelihood counts {discount:g} times what the next row's does; the posterior is "
            "exact for the likelihood so weighted"
        )
    families = ", ".join(f"{name} {words}" for name, words in sites.items())
    reason = f"proved conjugate: {families}" + (f"; of its expected reward, {infinite}" if infinite else "")
    return Explanation("conjugate", True, reason, sites, "\n".join(lines))


def nats_words(evidence: Evidence) -> str:
    """Say how far prior and likelihood are from affine, at worst, and what rounding explains."""
    worst = max(evidence.prior, evidence.likelihood, key=lambda residual: float(residual.nats / residual.tolerance))
    return f"{float(worst.nats):.1e} nats, tolerance {float(worst.tolerance):.1e} nats"


def _name(model: RewardModel) -> str:
    return getattr(model.program, "__name__", "the program")


def _numbers(array: Any) -> str:
    values = np.asarray(array, float)
    if values.size and np.all(values == values.flat[0]):
        return f"{values.flat[0]:.6g}"
    return np.array2string(values, precision=4, threshold=6, separator=", ").replace("\n", "")


def _prior_words(layout: Layout, prior: Posterior, site: SiteBlock) -> str:
    known = parameters(layout, prior)[site.name]
    if site.kind == "unit":
        return f"Beta({_numbers(known['concentration1'])}, {_numbers(known['concentration0'])})"
    if site.kind == "simplex":
        return f"Dirichlet({_numbers(known['concentration'])})"
    if site.kind == "positive":
        u = _power_of(layout, site)
        return f"{u} ~ Gamma(shape {_numbers(known['concentration'])}, rate {_numbers(known['rate'])})"
    spread = known.get("covariance", known.get("covariance_times_precision"))
    scaled = "" if "covariance" in known else " / precision"
    return f"mean {_numbers(known['mean'])}, variance {_numbers(np.diagonal(np.asarray(spread)))}{scaled}"


def _power_of(layout: Layout, site: SiteBlock) -> str:
    power = layout.power[site.start]
    return site.name if power == 1.0 else f"{site.name}^{power:g}"


def _update_words(layout: Layout, site: SiteBlock) -> str:
    z = site.name
    if site.kind == "unit":
        return f"alpha += a, beta += b, where log likelihood = a log({z}) + b log(1 - {z}) + constant"
    if site.kind == "simplex":
        return f"alpha_k += a_k, where log likelihood = sum_k a_k log({z}_k) + constant"
    u = _power_of(layout, site) if site.kind == "positive" else "u"
    if site.kind == "positive" and layout.num_scaled[site.start]:
        return f"with u = {u}: shape += 1/2 per Normal row, rate += (squared residual after the mean has moved) / 2"
    if site.kind == "positive":
        return f"shape += a, rate += b, where log likelihood = a log({u}) - b {u} + constant"
    return (
        "precision += H, mean += inverse(precision) g, with g and -H the gradient and the second derivatives of the log "
        "likelihood at the mean"
    )


def _example_words(layout: Layout, site: SiteBlock, examples: tuple[tuple[dict[str, float], Natural], ...]) -> str:
    """Say what a few rewards on arm 0 add to the site's parameters, each change once."""
    span = slice(site.start, site.start + site.size)
    words: dict[tuple[float, ...], str] = {}
    for rewards, natural in examples:
        if site.kind == "unit":
            rows: Any = natural.unit[span]
        elif site.kind == "simplex":
            rows = natural.simplex[site.start]
        elif site.kind == "positive" and not layout.num_scaled[span].any():
            rows = np.stack([natural.log_scale[span], -natural.scale[span]], axis=-1)
        else:
            return ""
        change = tuple((np.round(rows[np.argmax(np.abs(rows).sum(axis=-1))], 10) + 0.0).tolist())
        given = ", ".join(f"{name} {value:g}" for name, value in rewards.items())
        if any(change) and len(words) < _NUM_EXAMPLES:
            words.setdefault(change, f"{given} adds ({', '.join(f'{c:+.4g}' for c in change)})")
    return f"on arm 0, {'; '.join(words.values())}" if words else ""


def refusal(model: RewardModel, reason: str, remedy: str) -> NotConjugate:
    """Return the refusal of a program, with what would make it conjugate."""
    sentence = f"{_name(model)} {reason}"
    text = f"{_name(model)}: NOT EXACT.\n  reason: it {reason}\n  remedy: {remedy}"
    return NotConjugate(f"{sentence}; {remedy}", Explanation("conjugate", False, sentence, {}, text))


def density_refusal(
    model: RewardModel, layout: Layout, alone: list[str], residual: Residual, row: Any, is_prior: bool
) -> NotConjugate:
    """Return the refusal of a program whose prior or likelihood is not affine in the sufficient statistics.

    Args:
        alone: sites that break the form by themselves, the others held fixed; empty if only their interplay does.
        row: the row of data whose likelihood failed.
    """
    what = "prior" if is_prior else f"likelihood of {_row_words(model, row)}"
    blamed = alone or [site.name for site in layout.sites]
    sites = [site for site in layout.sites if site.name in blamed]
    statistics = {
        "unit": "log z and log(1 - z)",
        "positive": "log z and a power of z",
        "simplex": "log z_k",
        "real": "z and z z'",
    }
    if alone:
        form = "; ".join(f"'{site.name}': {statistics[site.kind]}" for site in sites)
        reason = f"is not conjugate: the log {what} is not affine in the sufficient statistics ({form})"
    else:
        names = ", ".join(f"'{name}'" for name in blamed)
        reason = f"is not conjugate: the log {what} couples {names} in a way that no conjugate family has"
    nats, tolerance = float(residual.nats), float(residual.tolerance)
    reason += f" - residual {nats:.1e} nats, tolerance {tolerance:.1e} nats"
    kinds = {site.kind for site in layout.sites}
    if is_prior:
        given = "; ".join(dict.fromkeys(PRIORS[site.kind] for site in sites))
        remedy = f"in a conjugate program {given}, and no factor bends it"
    elif not alone and {"real", "positive"} <= kinds and np.any(layout.owner < 0):
        real = next(site.name for site in layout.of("real"))
        scale = layout.of("positive")[0].name
        remedy = (
            f"'{real}' and '{scale}' are conjugate only jointly: scale the prior of '{real}' by the noise, "
            f"as in Normal(m, s * sd) with sd made from '{scale}'"
        )
    else:
        remedy = outcome_remedy(model)
    if nats < 1e-6:
        remedy += "; a residual this small can come from a cast to float32 inside the program"
    return refusal(model, reason, remedy)


def bent_refusal(model: RewardModel, obstacle: str, residual: Residual, row: Any) -> NotConjugate:
    """Return the refusal of a program that has an obstacle to a proof, and is found not to be conjugate besides.

    Args:
        row: the row of data whose likelihood deviates; None for the prior.
    """
    what = "prior" if row is None else f"likelihood of {_row_words(model, row)}"
    reason = (
        f"is not conjugate: {obstacle}; the log {what} is off the conjugate form by {float(residual.nats):.2g} nats"
    )
    return refusal(model, reason, outcome_remedy(model))


def blurred_refusal(model: RewardModel, layout: Layout, residual: Residual) -> NotConjugate:
    """Return the refusal of a prior whose terms are so large, near its own middle, that rounding could hide a deviation."""
    hidden = (
        f"rounding alone could hide {float(residual.rounding):.1e} nats of a deviation, and no more than "
        f"{resolution(jnp.float64):g} are certified"
    )
    if not residual.nats < jnp.inf:
        hidden = "rounding leaves no precision matrix that could be inverted"
    if layout.members.shape[1] > 1:
        return refusal(
            model,
            f"cannot be certified in float64: its prior ties reals to each other so tightly that {hidden}",
            "write a tight child as its parent plus a small step, as in `child = parent + 1e-7 * numpyro.sample(..., "
            "dist.Normal(0, 1))`, or measure the latents in other units",
        )
    return refusal(
        model,
        f"cannot be certified in float64: the terms of its log prior are so large that {hidden}",
        "use a prior that counts fewer observations, or other units",
    )


def untested_refusal(model: RewardModel, arm: int, is_blurred: bool) -> NotConjugate:
    """Return the refusal of a program of which no trial reward told anything on an arm."""
    if is_blurred:
        return refusal(
            model,
            f"cannot be certified in float64: for every reward that was tried on arm {arm} the terms of the log likelihood are "
            f"so large that rounding alone could hide more than {resolution(jnp.float64):.0e} nats",
            "measure rewards and latents in units in which the noise is not so small",
        )
    return refusal(
        model,
        f"cannot be certified: no reward that was tried has a finite likelihood on arm {arm}",
        "check the outcome's distribution on that arm",
    )


def _row_words(model: RewardModel, row: Any) -> str:
    values: Mapping[str, Array] = model.outcome_values(row.reward)
    given = ", ".join(f"{name} {float(value[0]):g}" for name, value in values.items())
    return f"{given} on arm {int(row.arm[0])}"
