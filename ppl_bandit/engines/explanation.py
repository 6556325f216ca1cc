"""The exact engine in words and numbers: families, priors, updates and certificates of a program, and posterior parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.inner.density import Posterior
from ppl_bandit.engines.inner.gamma import scale_family_name
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, Layout, SiteBlock
from ppl_bandit.engines.inner.registry import FAMILIES
from ppl_bandit.engines.proof.certificate import Evidence
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import DETAILS, Explanation

_ORDER = (
    "expected reward",
    "time",
    "approximated",
    "checked",
    "not seen",
    "stored of the data",
    "discount",
)
_DETAILS = ("proved", "certified", "checks", "rounding")  # shown on request
_PROVED = "the closed form is proved from the program, and every reward is tested before it is learnt"
_TESTED = (
    "the draws are tested after every update; if they fail, `explain()` and `report()` say NOT TRUSTED, and what to do"
)


def explain(
    model: RewardModel,
    engine: str,
    verdict: str,
    reason: str,
    sites: Mapping[str, str],
    facts: Mapping[str, str],
    *,
    is_exact: bool = False,
    site_lines: Sequence[str] | None = None,
    discount: float = 1.0,
) -> Explanation:
    """Return the explanation of an engine.

    Args:
        verdict: the conclusion, which follows the name of the program.
        reason: one sentence: why this engine.
        sites: the representation of the posterior of each site.
        facts: what the conclusion rests on, by the names in `_ORDER` and `_DETAILS`.
        site_lines: lines about the sites in place of `sites`.
        discount: weight of a row's log likelihood relative to the next row's.
    """
    checked = [text for name, text in {"certified": _PROVED, "checks": _TESTED}.items() if name in facts]
    known = {"expected reward": model.expected_reward_method, "checked": "; ".join(checked), **facts}
    if discount < 1.0:
        exact = "; the posterior is exact for the likelihood so weighted" if is_exact else ""
        known["discount"] = f"the log likelihood of each row has {discount:g} times the weight of the next row's{exact}"
    lines = [f"{program_name(model)}: {verdict}", ""]
    lines += [f"  {site}: {text}" for site, text in sites.items()] if site_lines is None else site_lines
    lines += ["", *(f"  {name}: {known[name]}" for name in _ORDER if known.get(name))]
    lines += [f"{DETAILS}{name}: {facts[name]}" for name in _DETAILS if name in facts]
    return Explanation(engine, is_exact, reason, sites, "\n".join(lines))


def explain_approximate(
    model: RewardModel, engine: str, reason: str, posterior: str, discount: float, facts: Mapping[str, str]
) -> Explanation:
    """Return the explanation of an engine that approximates the whole posterior.

    Args:
        reason: one sentence: what the draws are.
        posterior: the representation of the posterior of each site.
    """
    sites = {site: f"{posterior}{f', shape {shape}' if shape else ''}" for site, shape in model.latent_shapes.items()}
    verdict = f"APPROXIMATE ({engine}). {reason[0].upper()}{reason[1:]}."
    return explain(model, engine, verdict, reason, sites, facts, discount=discount)


def program_name(model: RewardModel) -> str:
    """Return the name of a model's program."""
    return getattr(model.program, "__name__", "the program")


def site_parameters(layout: Layout, posterior: Posterior) -> dict[str, dict[str, np.ndarray]]:
    """Return each site's posterior parameters, shaped as the site.

    Beta: `concentration1`, `concentration0`. Dirichlet: `concentration`. Gamma of a power u of the site: `concentration`,
    `rate`, `power`. Reals: `mean` and `covariance` over the site's elements. For reals that a latent precision u scales,
    `covariance_times_precision` is their covariance times u, and `scaled_by` is the index of the positive element that scales
    each, counted over all positive sites in order, -1 for none.
    """
    posterior = jax.device_get(posterior)
    found: dict[str, dict[str, Any]] = {}
    for site in layout.sites:
        if site.kind == REAL:
            found[site.name] = _real_parameters(layout, posterior, site)
            continue
        family, own = FAMILIES[site.kind], posterior.elements[site.group][site.span]
        columns = [own] if family.num_event_dims else [own[:, column] for column in range(own.shape[1])]
        pairs = zip(family.parameter_names, columns, strict=True)
        found[site.name] = {name: column.reshape(site.shape) for name, column in pairs}
        if site.kind == POSITIVE:
            found[site.name]["power"] = layout.power[site.span].reshape(site.shape)
    return found


def _real_parameters(layout: Layout, posterior: Posterior, site: SiteBlock) -> dict[str, np.ndarray]:
    num_real = layout.count(REAL)
    mean, covariance = np.zeros(num_real), np.zeros((num_real, num_real))
    for row, (own, inside) in enumerate(zip(layout.members, layout.is_member, strict=True)):
        own = own[inside]
        mean[own] = posterior.mean[row, inside]
        covariance[np.ix_(own, own)] = np.linalg.inv(posterior.precision[row])[np.ix_(inside, inside)]
    found, owner = {"mean": mean[site.span].reshape(site.shape)}, layout.owner_of_real[site.span].reshape(site.shape)
    if np.all(owner < 0):
        return {**found, "covariance": covariance[site.span, site.span]}
    return {**found, "covariance_times_precision": covariance[site.span, site.span], "scaled_by": owner}


def family_name(layout: Layout, site: SiteBlock) -> str:
    """Return the name of a site's posterior family."""
    if site.kind != REAL:
        return FAMILIES[site.kind].name(layout, site)
    owners = set(layout.owner_of_real[site.span].tolist())
    names = ["Gaussian"] if -1 in owners else []
    for scale in layout.of(POSITIVE):
        if owners & set(range(scale.span.start, scale.span.stop)):
            joint = scale_family_name(layout.power[scale.start], True, scale.name)
            names.append(f"{joint}, scaled by {scale.name}")
    return " and ".join(names)


def explain_conjugate(
    model: RewardModel,
    layout: Layout,
    prior: Posterior,
    evidence: Evidence,
    discount: float,
    infinite: str,
) -> Explanation:
    """Explain why a program is conjugate, and how it is updated.

    Args:
        infinite: which expected rewards have an infinite expectation, in words; "" for none.
    """
    sites = {site.name: family_name(layout, site) for site in layout.sites}
    summed = f"rows are tested in randomly weighted sums of {evidence.num_summed}; " if evidence.num_summed > 1 else ""
    lines = []
    for site in layout.sites:
        count = f", {site.size} elements" if site.size > 1 else ""
        lines.append(f"  {site.name}: {sites[site.name]}{count}")
        lines.append(f"    prior    {_prior_text(layout, prior, site)}")
        lines.append(f"    update   {_update_text(layout, site)}")
        example = _example_text(layout, site, evidence.examples)
        if example:
            lines.append(f"    such as  {example}")
    facts = {
        "expected reward": model.expected_reward_method + (f"; {infinite}" if infinite else ""),
        "proved": "latents reach the outcome through real-analytic operations alone, none of them a branch, an index, a\n"
        "    comparison or a rounding of a latent",
        "certified": f"the prior and {evidence.num_rows} rows of data on all {model.num_arms} arms are affine in the "
        f"sufficient statistics at {evidence.num_points} or more random points each;\n"
        f"    {summed}largest residual {residual_text(evidence)}; every new datum is certified likewise, before and after it "
        "is absorbed",
        # See `numerics.sampling`.
        "rounding": "it changes the distribution function of a draw by less than 1e-5",
    }
    verdict = "EXACT. Every posterior is in closed form; draws are independent."
    families = ", ".join(f"{name} {family}" for name, family in sites.items())
    reason = f"proved conjugate: {families}" + (f"; of its expected reward, {infinite}" if infinite else "")
    return explain(
        model, "conjugate", verdict, reason, sites, facts, is_exact=True, site_lines=lines, discount=discount
    )


def residual_text(evidence: Evidence) -> str:
    """Return the largest residual of prior and likelihood, and what rounding explains of it."""
    worst = max(evidence.prior, evidence.likelihood, key=lambda residual: float(residual.nats / residual.tolerance))
    return f"{float(worst.nats):.1e} nats, tolerance {float(worst.tolerance):.1e} nats"


def _number_text(array: Any) -> str:
    values = np.asarray(array, float)
    if values.size and np.allclose(
        values, values.flat[0], rtol=1e-9, atol=0.0
    ):  # apart from the rounding of an inverse
        return f"{values.flat[0]:.6g}"
    return np.array2string(values, precision=4, threshold=6, separator=", ").replace("\n", "")


def _prior_text(layout: Layout, prior: Posterior, site: SiteBlock) -> str:
    known = site_parameters(layout, prior)[site.name]
    if site.kind == REAL:
        covariance = known.get("covariance", known.get("covariance_times_precision"))
        scaled = "" if "covariance" in known else " / precision"
        return (
            f"mean {_number_text(known['mean'])}, variance {_number_text(np.diagonal(np.asarray(covariance)))}{scaled}"
        )
    power = float(known["power"].flat[0]) if "power" in known else 1.0
    u = site.name if power == 1.0 else f"{site.name}^{power:g}"
    return FAMILIES[site.kind].describe_prior({name: _number_text(value) for name, value in known.items()}, u)


def _update_text(layout: Layout, site: SiteBlock) -> str:
    if site.kind != REAL:
        return FAMILIES[site.kind].describe_update(layout, site)
    return (
        "precision += H, mean += inverse(precision) g, with g and -H the gradient and the second derivatives of the log "
        "likelihood at the mean"
    )


def _example_text(
    layout: Layout, site: SiteBlock, examples: tuple[tuple[dict[str, float], dict[str, Array]], ...]
) -> str:
    """Return what a few rewards on arm 0 add to the site's parameters, each change once."""
    if site.kind == REAL or (site.kind == POSITIVE and layout.num_scaled[site.span].any()):
        return ""
    texts: dict[tuple[float, ...], str] = {}
    for rewards, added in examples:
        rows = np.asarray(added[site.group])[site.span]
        change = tuple((np.round(rows[np.argmax(np.abs(rows).sum(axis=-1))], 10) + 0.0).tolist())
        given = ", ".join(f"{name} {value:g}" for name, value in rewards.items())
        if any(change) and len(texts) < 3:
            texts.setdefault(change, f"{given} adds ({', '.join(f'{c:+.4g}' for c in change)})")
    return f"on arm 0, {'; '.join(texts.values())}" if texts else ""
