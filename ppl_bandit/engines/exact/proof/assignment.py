"""Assign each latent of a program to a family by its support, and find the scales of the Gaussian blocks in the prior."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpyro.distributions import constraints

from ppl_bandit.engines.exact.families.layout import POSITIVE, REAL, SIMPLEX, Layout, SiteBlock
from ppl_bandit.engines.exact.families.posterior import generic_point, latents_at
from ppl_bandit.engines.exact.families.registry import FAMILIES
from ppl_bandit.engines.exact.proof.gaussian_blocks import in_blocks
from ppl_bandit.engines.exact.refusals import outcome_remedy, refusal
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit, run_once
from ppl_bandit.runtime.numpyro_adapter import class_name, element_support

# Of log z: units of z from 1e-15 to 1e15.
_SHIFTS = (0.0, 7.0, -7.0, 14.0, -14.0, 21.0, -21.0, 28.0, -28.0, 35.0, -35.0)


def supports_of(model: RewardModel) -> dict[str, Any]:
    """Return the support of every latent site, with its bounds; None for a support that depends on another latent."""
    found: dict[str, Any] = {}

    def bounds(seed: Array) -> dict[str, list[Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, seed)
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        found.update({name: trace[name]["fn"].support for name in model.latent_shapes})
        return {name: [jnp.asarray(leaf) for leaf in jax.tree.leaves(found[name])] for name in found}

    shapes = jax.eval_shape(bounds, 0)
    if not any(shapes.values()):
        return dict(found)
    trees = {name: jax.tree.structure(support) for name, support in found.items()}
    here, there = (jax.device_get(quick_jit(bounds)(seed)) for seed in (3, 4))
    return {
        name: jax.tree.unflatten(tree, here[name])
        if all(np.array_equal(a, b) for a, b in zip(here[name], there[name], strict=True))
        else None
        for name, tree in trees.items()
    }


def kind_of_support(support: Any) -> str | None:
    """Return the kind of latents with a support: `REAL`, that of a family, or None if no family has this support."""
    support = element_support(support)
    if isinstance(support, type(constraints.real)):
        return REAL
    return next((kind for kind, family in FAMILIES.items() if family.accepts(support)), None)


def read_supports(model: RewardModel) -> Layout:
    """Return a layout with the kind of each latent site, in which nothing is scaled and all reals are one block.

    Raises:
        NotConjugate: if a support depends on another latent or belongs to no family.
    """
    num_elements: dict[str, int] = {}
    sites = []
    for name, support in supports_of(model).items():
        if support is None:
            raise refusal(
                model,
                f"is not conjugate: the support of '{name}' depends on another latent",
                "give it a support that is fixed",
            )
        kind, support = kind_of_support(support), element_support(support)
        if kind is None:
            raise refusal(
                model,
                f"is not conjugate: '{name}' has support {class_name(support)}, which belongs to no conjugate family",
                "conjugate families live on (0, 1), on positive numbers, on the simplex and on the reals",
            )
        ends = (0.0, 1.0) if kind == SIMPLEX else (-np.inf, np.inf)
        low, high = getattr(support, "lower_bound", ends[0]), getattr(support, "upper_bound", ends[1])
        num_event_dims = 0 if kind == REAL else FAMILIES[kind].num_event_dims
        site = SiteBlock(name, kind, model.latent_shapes[name], 0, np.asarray(low), np.asarray(high), num_event_dims)
        site = site._replace(start=num_elements.get(site.group, 0))
        num_elements[site.group] = site.span.stop
        sites.append(site)
    layout = Layout(tuple(sites), np.ones(num_elements.get(POSITIVE, 0)), *(np.zeros(0),) * 3)
    num_real = layout.count(REAL)
    return in_blocks(layout, np.full(num_real, -1), np.zeros(num_real, int))


def find_scales(model: RewardModel, layout: Layout) -> Layout:
    """Find the power of each positive element that is Gamma under the prior, and the reals whose precision it scales.

    With s = log z, the log prior of a Gamma power is c s + d exp(power s) for any real elements that it scales, so the ratio
    of its third to its second derivative is the power. It is taken where d exp(power s) is near 1, whatever the unit of z:
    where that is 1e-12, the rounding of c s bends the ratio. Scaling all u by different factors then multiplies the prior
    precision of each real element by the factor of the u that scales it, if one does.

    Raises:
        NotConjugate: if a positive latent is not Gamma in any power, or a precision is not proportional to one u.
    """
    num_positive, num_real = layout.count(POSITIVE), layout.count(REAL)
    if num_positive == 0:
        return layout
    rng = np.random.default_rng(7)
    factors = np.exp(rng.permutation(np.linspace(0.3, 1.1, num_positive)))  # all different

    def measure() -> tuple[Array, Array]:
        start = generic_point(layout)
        log_z = start.elements[POSITIVE]

        def log_prior(s: Array, real: Array) -> Array:
            return model.log_prior(
                latents_at(layout, start._replace(elements={**start.elements, POSITIVE: s}, real=real))
            )

        ones = jnp.ones(num_positive)

        def second_derivative(s: Array) -> Array:
            return jax.jvp(jax.grad(log_prior), (s, start.real), (ones, jnp.zeros(num_real)))[1]

        shifts = jnp.asarray(_SHIFTS)[:, None] * ones
        second, third = jax.vmap(lambda s: jax.jvp(second_derivative, (s,), (ones,)))(log_z + shifts)
        distance = jnp.abs(jnp.log(jnp.abs(second)))
        best = jnp.argmin(jnp.where(jnp.isfinite(distance), distance, jnp.inf), axis=0)[None]
        second, third, shift = (jnp.take_along_axis(leaf, best, axis=0)[0] for leaf in (second, third, shifts))
        log_z = log_z + shift
        power = _round_to_twelfths(third / second)

        def curvature(s: Array) -> Array:
            slope = jax.grad(log_prior, argnums=1)
            rows = jax.vmap(lambda v: jax.jvp(lambda x: slope(s, x), (start.real,), (v,))[1])(jnp.eye(num_real))
            return jnp.diagonal(rows)

        shifted = log_z + jnp.log(jnp.asarray(factors)) / power
        return power, curvature(shifted) / curvature(log_z)

    power, ratios = run_once(measure)
    for site in layout.of(POSITIVE):
        if not np.all(np.isfinite(power[site.span])):
            raise refusal(
                model,
                f"is not conjugate: the prior of '{site.name}' is not Gamma in any power of it",
                outcome_remedy(model),
            )
    owner = np.full(num_real, -1)
    for index, ratio in enumerate(ratios):
        matches = np.flatnonzero(np.isclose(factors, ratio, rtol=1e-7))
        if matches.size == 1:
            owner[index] = matches[0]
        elif not np.isclose(ratio, 1.0, rtol=1e-7):
            site = next(s for s in layout.of(REAL) if s.start <= index < s.span.stop)
            positives = [s.name for s in layout.of(POSITIVE)]
            raise refusal(
                model,
                f"is not conjugate: the prior precision of '{site.name}' is neither fixed nor proportional to a power of one "
                f"of {positives} that is Gamma",
                f"write '{site.name}' ~ Normal(m, s * sd) with sd the noise's standard deviation, or with a fixed scale",
            )
    return in_blocks(layout._replace(power=power), owner, np.zeros(num_real, int))


def _round_to_twelfths(power: Array) -> Array:
    """Round a power to a multiple of 1/12 from which it differs by rounding alone; nan for a power of 0."""
    near = jnp.round(power * 12.0) / 12.0
    return jnp.where(
        (jnp.abs(power - near) < 1e-6) & (near != 0), near, jnp.where(jnp.abs(power) < 1e-6, jnp.nan, power)
    )
