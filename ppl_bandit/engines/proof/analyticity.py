"""Proof, for all data, that the log densities of a program are generalised polynomials of its latents, on the program's jaxpr.

Most distributions are proved through their `log_prob`. The formulas of the classes in `_GUARDED` protect the boundary of their
domain (a clip of probabilities, a stabilised logarithm), which is a kink. Inside the domain they are textbook analytic
functions, so for these classes the proof is that their parameters are forms, and that what outer latents alone decide stays
inside.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_bandit.engines.inner.layout import POSITIVE, REAL, SIMPLEX, Layout, SiteBlock
from ppl_bandit.engines.refusals import KEEP
from ppl_bandit.program.jaxpr.entrywise import Entries
from ppl_bandit.program.jaxpr.forms import Data, Form, Forms, Refused
from ppl_bandit.program.jaxpr.interpreter import location_of
from ppl_bandit.program.jaxpr.ranges import values_range
from ppl_bandit.program.model.probing import DTYPE_OF_KIND
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import Site, is_prior_term, program_lock
from ppl_bandit.runtime.numpyro_adapter import distribution_name, mask_of, parameters_of, patched_methods

MAX_DEGREE = 4  # (y - m^2)^2 has 4; the certificates have many more points

_POLYNOMIAL = (
    "let real latents reach the outcome through sums and products alone, without a ratio, a function or its inverse; or "
    + KEEP
)
_NUM_CONTEXTS = 8  # variations of the example that bound the numbers of a context
_UNIT, _POSITIVE = (0.0, 1.0), (0.0, np.inf)
_GUARDED: dict[type, dict[str, tuple[float, float]]] = {
    dist.BernoulliProbs: {"probs": _UNIT},
    dist.BernoulliLogits: {},
    dist.BinomialProbs: {"probs": _UNIT},
    dist.BinomialLogits: {},
    dist.CategoricalProbs: {"probs": _POSITIVE},
    dist.CategoricalLogits: {},
    dist.GeometricProbs: {"probs": _UNIT},
    dist.GeometricLogits: {},
    dist.Beta: {"concentration1": _POSITIVE, "concentration0": _POSITIVE},
    dist.Dirichlet: {"concentration": _POSITIVE},
    dist.Gamma: {"concentration": _POSITIVE, "rate": _POSITIVE},
    dist.InverseGamma: {"concentration": _POSITIVE, "rate": _POSITIVE},
    dist.MultivariateNormal: {},
    dist.NegativeBinomialLogits: {},
    dist.Poisson: {"rate": _POSITIVE},
}
# In these the log densities are sums of logarithms, less something that a high power of latents can only enlarge. So a high
# power takes probability away from a place too small to be met, and never puts it there.
_ANY_POWER = ("probs", "logits", "rate", "covariance_matrix", "precision_matrix", "scale_tril")


class _Claim(NamedTuple):
    """A value that must be a form of the latents.

    Attributes:
        name: of the value, for messages.
        domain: an interval that it must stay inside; None if there is none.
        is_fixed: whether it must not depend on latents, or, with a domain, on outer latents alone.
        is_density: whether it is a log density, and not a parameter of a distribution that is known.
        is_location: whether it is the location of a Gaussian.
        may_be_high: whether it may be any power.
    """

    value: Any
    name: str
    domain: tuple[float, float] | None = None
    is_fixed: bool = False
    is_density: bool = False
    is_location: bool = False
    may_be_high: bool = False


class Gap(NamedTuple):
    """Where the proof for all data stops.

    Attributes:
        reason: why, and in which line.
        remedy: what the user can write instead; "" if unknown.
        in_program: whether the user wrote the operation, and not a distribution.
    """

    reason: str
    remedy: str
    in_program: bool


def not_conjugate(
    model: RewardModel,
    layout: Layout,
    *,
    is_prior: bool,
    outer: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Gap | None:
    """Return where a program is not proved a generalised polynomial of its latents; None if it is.

    Decided for all data, by the rules of `forms`, and before anything is compiled. A density of low degree that agrees with a
    conjugate form at the points of a certificate agrees with it everywhere.

    Args:
        is_prior: whether to prove the terms of the prior or those of the likelihood.
        outer: latents given which the program is to be conjugate, with the bounds between which they range. Forms may have
            any coefficients that are real-analytic functions of these, in contexts near the example.
    """
    program, claims = _claims_of(model, is_prior=is_prior)
    # NumPy arrays: JAX would compile every operation outside of a trace.
    latents = {name: np.zeros(model.latent_shapes[name]) for name in (*[site.name for site in layout.sites], *outer)}
    context = jax.tree.map(lambda leaf: np.asarray(leaf)[None], model.context)
    kinds = {name: kind for name, kind in model.outcome_kinds.items() if name in model.outcomes}
    outcomes: dict[str, Any] = {name: np.zeros(1, DTYPE_OF_KIND[kind]) for name, kind in kinds.items()}
    closed = jax.make_jaxpr(program)(latents, np.zeros(1, int), context, outcomes)
    rows = model.varied_context_rows(np.random.default_rng(29), np.arange(_NUM_CONTEXTS) == 0) if outer else context

    def first_gap(arm: np.ndarray | None) -> Gap | None:
        # A density of degree 2 is Gaussian whatever its coefficients are, so these may be functions of outer latents that
        # floating point flattens. Other families need the certificate, which cannot see a flattened term.
        forms = Forms(may_flatten=all(site.kind == REAL for site in layout.sites))
        given: dict[str, Any] = {site.name: _form_of(forms, layout, site) for site in layout.sites}
        given |= {name: forms.outer(model.latent_shapes[name], *bounds) for name, bounds in outer.items()}
        args = [*(given[name] for name in sorted(latents)), Data() if arm is None else arm]
        args += [Data(values_range(leaf)) for leaf in jax.tree.leaves(rows)]
        args += [Data()] * len(jax.tree.leaves(outcomes))
        found = [
            (claim, out)
            for claim, out in zip(claims, forms.evaluate(closed, args), strict=True)
            if isinstance(out, Entries)
        ]
        gaps = (_gap_of(claim, part, forms.flattens) for claim, out in found for part in forms.values(out))
        return next((gap for gap in gaps if gap is not None), None)

    found = first_gap(None)
    # What data choose may be decided by the arm alone.
    for number in range(0 if is_prior or found is None else model.num_arms):
        found = first_gap(np.full(1, number))
        if found is not None:
            return found
    return found


def _gap_of(claim: "_Claim", out: Any, flattens: bool) -> Gap | None:
    """Return why a number is not a form that its claim allows; None if it is one, or if no latent reaches it.

    Args:
        flattens: whether floating point may flatten coefficients.
    """
    if isinstance(out, Refused):
        where = f"{out.reason}{location_of(out.line, out.reason)}, which reaches {claim.name}"
        reason = where if out.line.text else f"in {claim.name}, {out.reason}"  # inside the formula of the distribution
        return Gap(reason, out.remedy, out.line.is_users)
    if not isinstance(out, Form) and not (isinstance(out, Data) and out.is_outer):
        return None
    if claim.is_fixed and (isinstance(out, Form) or claim.domain is None):
        return Gap(f"{claim.name} depends on a latent", KEEP, False)
    if isinstance(out, Data):
        low, high = claim.domain or (-np.inf, np.inf)
        is_inside = claim.domain is None or (out.range.low > low and out.range.high <= high)
        return None if is_inside else Gap(f"{claim.name} is not proved to stay inside ({low:g}, {high:g})", KEEP, False)
    if flattens and out.degree > (2 if claim.is_density else int(claim.is_location)):
        reason = (
            f"{claim.name} depends on an exponential of outer sites, which floating point flattens far out, and is not proved "
            "to be that of a Gaussian with a mean that is linear in the inner sites"
        )
        return Gap(reason, "", False)
    is_low = out.degree <= MAX_DEGREE and out.power <= MAX_DEGREE
    if claim.is_location:
        is_low = out.degree <= MAX_DEGREE // 2 and out.power <= MAX_DEGREE // 2
    elif not claim.is_density:
        is_low = out.degree == 0 and (out.power <= 1 or (out.monomial is not None and (is_low or claim.may_be_high)))
    if is_low:
        return None
    if out.degree and not claim.is_density and not claim.is_location:
        reason = f"real latents reach {claim.name}: they may reach the mean of a Normal, and no other parameter"
        return Gap(reason, "", False)
    what = "polynomial of the real latents" if out.degree else "sum of powers of its latents"
    reason = (
        f"{claim.name} is not proved to be a {what} of low degree, so that it could deviate from the form of a conjugate "
        "family between any points that are tried"
    )
    return Gap(reason, _POLYNOMIAL if out.degree else KEEP, False)


def _form_of(forms: Forms, layout: Layout, site: SiteBlock) -> Any:
    if site.kind == REAL:
        return Form(degree=1)
    if site.kind == SIMPLEX:
        return forms.simplex(site.shape)
    low, high = (_one_number(bound) for bound in (site.low, site.high))
    if site.kind == POSITIVE:
        power = _one_number(layout.power[site.span])
        return forms.positive(site.shape, low, 1.0 if power is None else power)
    return forms.unit(site.shape, low, high)


def _one_number(values: Any) -> float | None:
    numbers = np.unique(np.asarray(values, float))
    return float(numbers[0]) if numbers.size == 1 else None


def _claims_of(model: RewardModel, *, is_prior: bool) -> tuple[Callable, list["_Claim"]]:
    """Return a function of latents, arm, context and outcomes that returns values to prove, and a list that it fills."""
    claims: list[_Claim] = []

    def program(latents: Mapping[str, Array], arm: Array, context: Any, outcomes: Mapping[str, Array]) -> list[Any]:
        trace = model.trace(latents, arm, context, outcomes)
        claims.clear()
        with program_lock(), numpyro.validation_enabled(False):  # validation compares values with their support
            for name, site in trace.items():
                if is_prior_term(name, site, model.outcomes) if is_prior else name in model.outcomes:
                    claims.extend(_claims(name, site))
        return [claim.value for claim in claims]

    return program, claims


def _claims(name: str, site: Site) -> list[_Claim]:
    fn = site["fn"]
    found: list[_Claim] = []
    if site["scale"] is not None:
        found.append(_Claim(jnp.asarray(site["scale"]), f"the scale of '{name}'", _POSITIVE, is_fixed=True))
    while type(fn) in (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution):
        if mask_of(fn) is not None and not isinstance(mask_of(fn), bool):
            found.append(_Claim(mask_of(fn), f"the mask of '{name}'", is_fixed=True))
        fn = fn.base_dist
    for bound in jax.tree.leaves(fn.support):
        found.append(_Claim(jnp.asarray(bound), f"the support of '{name}'", is_fixed=True))
    domains = None if "log_prob" in patched_methods(fn) else _GUARDED.get(type(fn))
    if domains is None:
        label = f"the log density of '{name}' ({distribution_name(fn)})"
        found.append(_Claim(fn.log_prob(site["value"]), label, is_density=True))
        return found
    if site["is_observed"]:
        found.append(_Claim(jnp.asarray(site["value"]), f"the observed value of '{name}'", is_fixed=True))
    for field, parameter in parameters_of(fn).items():
        for leaf in jax.tree.leaves(parameter):
            label, value = f"the {field} of '{name}' ({distribution_name(fn)})", jnp.asarray(leaf)
            is_fixed = not jnp.issubdtype(value.dtype, jnp.floating)
            is_mean = field == "loc" and isinstance(fn, dist.MultivariateNormal)
            domain = domains.get(field)
            is_any = field in _ANY_POWER
            found.append(_Claim(value, label, domain, is_fixed, is_location=is_mean, may_be_high=is_any))
    return found
