"""Assign each latent of a program to a family: by its support, and by what the prior says of scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpyro.distributions import constraints

from ppl_bandit.engines.exact import report
from ppl_bandit.engines.exact.families.families import (
    Coordinates,
    Layout,
    SiteBlock,
    coordinates_at,
    latents_at,
    standard_law,
)
from ppl_bandit.engines.exact.proof.gaussian_blocks import in_blocks
from ppl_bandit.engines.exact.remedies import outcome_remedy
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit, run_once
from ppl_bandit.runtime.numpyro_adapter import class_name

__all__ = ["find_scales", "read_supports", "start_point"]


def read_supports(model: RewardModel) -> Layout:
    """Assign each latent site a kind by its support."""
    supports: dict[str, Any] = {}

    def bounds(seed: Array) -> dict[str, list[Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, seed)
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        supports.update({name: trace[name]["fn"].support for name in model.latent_shapes})
        return {name: [jnp.asarray(leaf) for leaf in jax.tree.leaves(s)] for name, s in supports.items()}

    shapes = jax.eval_shape(bounds, 0)
    values: dict[str, list[Array]] = {name: [] for name in shapes}
    if any(shapes.values()):
        here, there = (quick_jit(bounds)(seed) for seed in (3, 4))
        for name in shapes:
            if any(bool(jnp.any(a != b)) for a, b in zip(here[name], there[name], strict=True)):
                raise report.refusal(
                    model,
                    f"is not conjugate: the support of '{name}' depends on another latent",
                    "give it a support that is fixed",
                )
        values = jax.device_get(here)
    starts = {"unit": 0, "positive": 0, "simplex": 0, "real": 0}
    sites = []
    for name, shape in model.latent_shapes.items():
        kind, low, high = _kind(model, name, supports[name], values[name])
        block = SiteBlock(name, kind, shape, starts[kind], low, high)
        starts[kind] += 1 if kind == "simplex" else block.size
        sites.append(block)
    layout = Layout(tuple(sites), np.ones(starts["positive"]), *(np.zeros(0),) * 3)
    return in_blocks(layout, np.full(starts["real"], -1), np.zeros(starts["real"], int))


def _kind(model: RewardModel, name: str, support: Any, bounds: list[Array]) -> tuple[str, Any, Any]:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if isinstance(support, type(constraints.real)):
        return "real", 0.0, 0.0
    if isinstance(support, type(constraints.simplex)):
        return "simplex", 0.0, 1.0
    if isinstance(support, constraints.greater_than):
        return "positive", _bound(support.lower_bound, bounds, 0), 0.0
    if isinstance(support, constraints.interval) and not isinstance(support, type(constraints.circular)):
        return "unit", _bound(support.lower_bound, bounds, 0), _bound(support.upper_bound, bounds, -1)
    raise report.refusal(
        model,
        f"is not conjugate: '{name}' has support {class_name(support)}, which belongs to no conjugate family",
        "conjugate families live on (0, 1), on positive numbers, on the simplex and on the reals",
    )


def _bound(value: Any, bounds: list[Array], position: int) -> Any:
    return np.asarray(bounds[position]) if bounds else float(value)


def find_scales(model: RewardModel, layout: Layout) -> Layout:
    """Find the power of each positive element that is Gamma under the prior, and the reals that each one scales.

    With s = log z the prior of a Gamma power is c s + d exp(power s), whatever real elements it scales: the ratio of its
    third to its second derivative is the power. Scaling all u by different factors then multiplies the prior precision of
    each real element by the factor of its own u, or leaves it.
    """
    num_positive, num_real = layout.count("positive"), layout.count("real")
    if num_positive == 0:
        return layout
    rng = np.random.default_rng(7)
    factors = np.exp(rng.permutation(np.linspace(0.3, 1.1, num_positive)))  # evenly spaced: no two are alike

    def measure() -> tuple[Array, Array]:
        start = start_point(layout)

        def along(s: Array, real: Array) -> Array:
            return model.log_prior(latents_at(layout, start._replace(positive=s, real=real)))

        ones = jnp.ones(num_positive)

        def bend(s: Array) -> Array:
            return jax.jvp(jax.grad(along), (s, start.real), (ones, jnp.zeros(num_real)))[1]

        second, third = jax.jvp(bend, (start.positive,), (ones,))
        power = _snap(third / second)

        def curvature(s: Array) -> Array:
            slope = jax.grad(along, argnums=1)
            rows = jax.vmap(lambda v: jax.jvp(lambda x: slope(s, x), (start.real,), (v,))[1])(jnp.eye(num_real))
            return jnp.diagonal(rows)

        shifted = start.positive + jnp.log(jnp.asarray(factors)) / power
        return power, curvature(shifted) / curvature(start.positive)

    power, ratios = run_once(measure)
    for site in layout.of("positive"):
        if not np.all(np.isfinite(power[site.start : site.start + site.size])):
            raise report.refusal(
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
            site = next(s for s in layout.of("real") if s.start <= index < s.start + s.size)
            positives = [s.name for s in layout.of("positive")]
            raise report.refusal(
                model,
                f"is not conjugate: the prior precision of '{site.name}' is neither fixed nor proportional to a power of one "
                f"of {positives} that is Gamma",
                f"write '{site.name}' ~ Normal(m, s * sd) with sd the noise's standard deviation, or with a fixed scale",
            )
    return in_blocks(layout._replace(power=power), owner, np.zeros(num_real, int))


def _snap(power: Array) -> Array:
    near = jnp.round(power * 12.0) / 12.0
    return jnp.where(
        (jnp.abs(power - near) < 1e-6) & (near != 0), near, jnp.where(jnp.abs(power) < 1e-6, jnp.nan, power)
    )


def start_point(layout: Layout) -> Coordinates:
    """Return a point inside every support, to read a density at before anything is known of it."""
    law = standard_law(layout)
    return coordinates_at(layout, law._replace(shape=1.3 * law.shape))
