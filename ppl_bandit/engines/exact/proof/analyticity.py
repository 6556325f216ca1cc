"""Proof that the log densities of a program are real-analytic functions of its latents, on the program's jaxpr.

`analyticity` proves it for given rows, over intervals. `not_conjugate` proves more, for all data: that the densities are
polynomials of low degree, apart from powers and logarithms that families have.

Most distributions are proved through their `log_prob`. The formulas of the classes in `_GUARDED` protect the boundary of their
domain (a clip of probabilities, a stabilised logarithm), which interval arithmetic cannot tell from a kink. Inside the domain
they are textbook analytic functions, so for these classes the proof is that their parameters are analytic and stay inside.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_bandit.engines.exact.families.layout import POSITIVE, REAL, SIMPLEX, Layout, SiteBlock
from ppl_bandit.engines.exact.refusals import KEEP
from ppl_bandit.program.jaxpr.analytic import Obstacle, analytic_intervals, location_of
from ppl_bandit.program.jaxpr.forms import Form, Forms, Refused
from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.jaxpr.intervals import Interval, is_inside, simplex_box, support_box
from ppl_bandit.program.jaxpr.polynomial_degree import MAX_DEGREE
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import Site, is_prior_term, program_lock
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr
from ppl_bandit.runtime.numpyro_adapter import distribution_name, mask_of, parameters_of, patched_methods
from ppl_bandit.types import Key

__all__ = ["Gap", "analyticity", "not_conjugate"]

_POLYNOMIAL = (
    "let real latents reach the outcome through sums and products alone, without a ratio, a function or its inverse; or "
    + KEEP
)
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


class _Claim(NamedTuple):
    """A value that must be analytic in the latents.

    Attributes:
        name: of the value, for messages.
        domain: an interval that it must stay inside; None if there is none.
        is_fixed: whether it must not depend on latents at all.
        quadratic_degree: the degree up to which it leaves the log density a polynomial of degree 2 of the real latents.
        is_density: whether it is a log density, and not a parameter of a distribution that is known.
        is_location: whether it is the location of a Gaussian.
    """

    value: Any
    name: str
    domain: tuple[float, float] | None = None
    is_fixed: bool = False
    quadratic_degree: int = 0
    is_density: bool = False
    is_location: bool = False


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
    arm: Array,
    context: Any,
    outcomes: Mapping[str, Array],
    *,
    is_prior: bool,
) -> Gap | None:
    """Return where a program is not proved a generalised polynomial of its latents; None if it is.

    Decided for all data, by the rules of `forms`, and before anything is compiled. A density of low degree that agrees with a
    conjugate form at the points of a certificate agrees with it everywhere.

    Args:
        arm, context, outcomes: one row, of which the shapes matter.
        is_prior: whether to prove the terms of the prior or those of the likelihood.
    """
    program, claims = _claims_of(model, is_prior=is_prior)
    latents = {site.name: jnp.zeros(site.shape) for site in layout.sites}
    inputs = (jr.key(0), latents, arm, context, outcomes)
    closed = jax.make_jaxpr(program)(*inputs)
    # Every sample site is fixed, so that no value may depend on the key.
    drawn = dependencies(closed, [frozenset(["key"]), *[frozenset()] * (len(closed.jaxpr.invars) - 1)])
    hidden = next((claim.name for claim, sources in zip(claims, drawn, strict=True) if sources), None)
    if hidden is not None:
        return Gap(f"a random draw hidden from NumPyro reaches {hidden}", "draw it by numpyro.sample", True)
    found = _first_gap(closed, claims, layout, inputs, None)
    # What data choose may be decided by the arm alone.
    for number in range(0 if is_prior or found is None else model.num_arms):
        found = _first_gap(closed, claims, layout, inputs, np.full(1, number))
        if found is not None:
            return found
    return found


def _first_gap(
    closed: ClosedJaxpr, claims: Sequence["_Claim"], layout: Layout, inputs: tuple[Any, ...], arm: np.ndarray | None
) -> Gap | None:
    forms = Forms()
    key, latents, _, context, outcomes = inputs
    given = {site.name: _form_of(forms, layout, site) for site in layout.sites}

    def as_data(name: str, tree: Any) -> list[Any]:
        return [forms.data((name, number)) for number in range(len(jax.tree.leaves(tree)))]

    own_arm = forms.data("arm") if arm is None else arm
    args: list[Any] = [forms.data("key"), *[given[name] for name in sorted(latents)]]
    args += [own_arm, *as_data("context", context), *as_data("outcomes", outcomes)]
    found = zip(claims, forms.evaluate(closed, args), strict=True)
    return next((gap for claim, out in found for gap in [_gap_of(claim, out)] if gap is not None), None)


def _gap_of(claim: "_Claim", out: Any) -> Gap | None:
    """Return why a value is not a form that its claim allows; None if it is one, or if no latent reaches it."""
    if isinstance(out, Refused):
        where = f"{out.reason}{location_of(out.line, out.reason)}, which reaches {claim.name}"
        reason = where if out.line.text else f"in {claim.name}, {out.reason}"  # inside the formula of the distribution
        return Gap(reason, out.remedy, out.line.is_users)
    if not isinstance(out, Form):
        return None
    if claim.is_fixed:
        return Gap(f"{claim.name} depends on a latent", KEEP, False)
    is_low = out.degree <= MAX_DEGREE and out.power <= MAX_DEGREE
    if claim.is_location:
        is_low = out.degree <= MAX_DEGREE // 2 and out.power <= MAX_DEGREE // 2
    elif not claim.is_density:
        is_low = out.degree == 0 and (out.exponents is not None or out.power <= 1)
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


def _form_of(forms: Forms, layout: Layout, site: SiteBlock) -> Form:
    if site.kind == REAL:
        return forms.real(site.name, site.shape)
    if site.kind == SIMPLEX:
        return forms.simplex(site.name, site.shape)
    low, high = (_one_number(bound) for bound in (site.low, site.high))
    if site.kind == POSITIVE:
        power = _one_number(layout.power[site.span])
        return forms.positive(site.name, site.shape, low, 1.0 if power is None else power)
    return forms.unit(site.name, site.shape, low, high)


def _one_number(values: Any) -> float | None:
    numbers = np.unique(np.asarray(values, float))
    return float(numbers[0]) if numbers.size == 1 else None


def _claims_of(model: RewardModel, *, is_prior: bool) -> tuple[Callable, list["_Claim"]]:
    """Return a function of key, latents, arm, context and outcomes that returns values to prove, and a list that it fills."""
    claims: list[_Claim] = []

    def program(
        key: Key, latents: Mapping[str, Array], arm: Array, context: Any, outcomes: Mapping[str, Array]
    ) -> list[Any]:
        trace = model.trace(latents, arm, context, outcomes, key)
        claims.clear()
        with program_lock(), numpyro.validation_enabled(False):  # validation compares values with their support
            for name, site in trace.items():
                if is_prior_term(name, site, model.outcomes) if is_prior else name in model.outcomes:
                    claims.extend(_claims(name, site))
        return [claim.value for claim in claims]

    return program, claims


def analyticity(
    model: RewardModel,
    layout: Layout,
    arm: Array,
    context: Any,
    outcomes: Mapping[str, Array],
    *,
    is_prior: bool,
    outer: frozenset[str] = frozenset(),
) -> list[Obstacle]:
    """Return every obstacle to a proof, with a flag that says whether it is present.

    Runs under `jit`: the flags may be tracers. The proof holds for the given rows, on which the program may branch, and for
    all latents in their supports.

    Args:
        is_prior: whether to prove the terms of the prior or those of the likelihood.
        outer: sites given which the program is to be conjugate: densities need not be polynomials of these.
    """
    program, claims = _claims_of(model, is_prior=is_prior)
    latents = {site.name: jnp.zeros(site.shape) for site in layout.sites}
    key = jr.key(0)
    closed = jax.make_jaxpr(program)(key, latents, arm, context, outcomes)
    boxes = {
        site.name: _support(number, site)._replace(
            degree=int(site.kind == REAL and site.name not in outer),
            power=-int(site.kind == REAL or site.name in outer),
        )
        for number, site in enumerate(layout.sites)
    }
    args = jax.tree.leaves((key, boxes, arm, context, outcomes), is_leaf=lambda leaf: isinstance(leaf, Interval))
    # A density that is a polynomial of degree 2 of the inner sites is Gaussian whatever its coefficients are, so these may be
    # functions of outer sites that floating point flattens. Then all inner sites must be real: other families need the
    # certificate, which cannot see a flattened term.
    are_inner_real = bool(outer) and all(site.kind == REAL for site in layout.sites if site.name not in outer)
    outs, obstacles = analytic_intervals(closed, args, may_flatten_outer=are_inner_real)
    # Every sample site is fixed, so that no value may depend on the key.
    drawn = dependencies(closed, [frozenset(["key"]), *[frozenset()] * (len(args) - 1)])
    verdicts: list[Obstacle] = []
    for claim, out, sources in zip(claims, outs, drawn, strict=True):
        if sources:
            reason = f"a random draw hidden from NumPyro reaches {claim.name}"
            verdicts.append(Obstacle(reason, jnp.array(True), remedy="draw it by numpyro.sample"))
        if not isinstance(out, Interval):
            continue
        if claim.is_fixed:
            verdicts.append(Obstacle(f"{claim.name} depends on a latent", jnp.array(True), remedy=KEEP))
            continue
        lost = ~jnp.all(out.is_analytic)
        # The first operation that lost analyticity is reported; the claim itself only if there is none.
        verdicts.extend(
            obstacle._replace(
                reason=f"{obstacle.reason}, which reaches {claim.name}", is_present=obstacle.is_present & lost
            )
            for obstacle in obstacles
        )
        verdicts.append(Obstacle(f"{claim.name} is not proved analytic in the latents", lost, in_program=False))
        if not isinstance(out.degree, int) or out.degree > MAX_DEGREE:
            reason = (
                f"{claim.name} is not proved to be a polynomial of degree {MAX_DEGREE} or less of the real latents, so that it "
                "could deviate from the form of a Gaussian between any points that are tried"
            )
            verdicts.append(
                Obstacle(reason, jnp.asarray(out.degree) > MAX_DEGREE, in_program=False, remedy=_POLYNOMIAL)
            )
        if out.power > MAX_DEGREE:
            reason = (
                f"{claim.name} depends on a power above {MAX_DEGREE} of a sum of latents, so that it could deviate from the "
                "form of a conjugate family between any points that are tried"
            )
            verdicts.append(Obstacle(reason, jnp.array(True), in_program=False, remedy=KEEP))
        if out.may_flatten is not False:
            reason = (
                f"{claim.name} depends on an exponential of outer sites, which floating point flattens far out, and is not "
                "proved to be that of a Gaussian with a mean that is linear in the inner sites"
            )
            is_other = jnp.asarray(out.degree) > claim.quadratic_degree
            verdicts.append(Obstacle(reason, out.may_flatten & is_other, in_program=False))
        if claim.domain is not None:
            low, high = claim.domain
            outside = ~jnp.all(is_inside(out, low, high))
            verdicts.append(Obstacle(f"{claim.name} is not proved to stay inside ({low:g}, {high:g})", outside))
    return verdicts


def _support(number: int, site: SiteBlock) -> Interval:
    """Return the box of a latent's support.

    Args:
        number: identifies the site: sums over elements of different simplexes are kept apart by it.
    """
    if site.kind == SIMPLEX:
        return simplex_box(number, site.shape)
    return support_box(site.low, site.high, site.shape)


def _claims(name: str, site: Site) -> list[_Claim]:
    fn = site["fn"]
    found: list[_Claim] = []
    if site["scale"] is not None:
        found.append(_Claim(jnp.asarray(site["scale"]), f"the scale of '{name}'"))
    while type(fn) in (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution):
        if mask_of(fn) is not None and not isinstance(mask_of(fn), bool):
            found.append(_Claim(mask_of(fn), f"the mask of '{name}'", is_fixed=True))
        fn = fn.base_dist
    for bound in jax.tree.leaves(fn.support):
        found.append(_Claim(jnp.asarray(bound), f"the support of '{name}'", is_fixed=True))
    domains = None if "log_prob" in patched_methods(fn) else _GUARDED.get(type(fn))
    if domains is None:
        label = f"the log density of '{name}' ({distribution_name(fn)})"
        found.append(_Claim(fn.log_prob(site["value"]), label, quadratic_degree=2, is_density=True))
        return found
    if site["is_observed"]:
        found.append(_Claim(jnp.asarray(site["value"]), f"the observed value of '{name}'", is_fixed=True))
    for field, parameter in parameters_of(fn).items():
        for leaf in jax.tree.leaves(parameter):
            label, value = f"the {field} of '{name}' ({distribution_name(fn)})", jnp.asarray(leaf)
            is_fixed = not jnp.issubdtype(value.dtype, jnp.floating)
            is_mean = field == "loc" and isinstance(fn, dist.MultivariateNormal)
            domain = domains.get(field)
            found.append(_Claim(value, label, domain, is_fixed, quadratic_degree=int(is_mean), is_location=is_mean))
    return found
