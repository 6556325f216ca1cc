"""The Dirichlet family: vectors z on the simplex, with T = (log z_1, ..., log z_K). The coordinates are logits."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from ppl_bandit.engines.exact.families.family import Family, round_to_halves
from ppl_bandit.engines.exact.families.layout import SIMPLEX
from ppl_bandit.numerics import sampling
from ppl_bandit.numerics.log_gamma import gammaln


def _reading_point(parameters: Float[Array, "E K"]) -> Float[Array, "E K"]:
    # Unequal: at equal logits, formulas that compare elements have kinks.
    return jnp.broadcast_to(jnp.linspace(-0.3, 0.4, parameters.shape[-1], dtype=parameters.dtype), parameters.shape)


def _middle(parameters: Float[Array, "E K"]) -> Float[Array, "E K"]:
    logs = jnp.log(parameters)
    return logs - logs.mean(axis=-1, keepdims=True)


def _natural(logits: Array, gradient: Array, curvature: Array, gradient_at: Any) -> Float[Array, "E K"]:
    del gradient_at
    p = jax.nn.softmax(logits, axis=-1)
    total = -curvature[..., 0] / (p[..., 0] * (1.0 - p[..., 0]))
    return round_to_halves(gradient + total[..., None] * p)


def _log_normalizer(parameters: Float[Array, "E K *batch"]) -> Array:
    return jnp.sum(gammaln(parameters), axis=1) - gammaln(jnp.sum(parameters, axis=1))


DIRICHLET = Family(
    kind=SIMPLEX,
    accepts=lambda support: isinstance(support, type(constraints.simplex)),
    num_event_dims=1,
    value=jax.nn.softmax,
    latent=lambda value, low, high, power: value,
    reading_point=_reading_point,
    middle=_middle,
    variance=lambda parameters: 1.0 / parameters,
    max_sd=1.5,
    far_range=(2.0, 5.0),
    statistics=jax.nn.log_softmax,
    rounding_sizes=lambda logits, layout: 1.0 + jnp.abs(logits),
    natural=_natural,
    base=lambda layout: 1.0,
    sign=1.0,
    counts=slice(None),
    log_normalizer=_log_normalizer,
    log_volume=lambda site, layout: 0.0,
    sample=sampling.dirichlet,
    tails=lambda parameters: (),
    widen=lambda parameters, scale, power: parameters * scale**-2.0,
    marginal_law=None,
    screen=lambda values, logits: "",
    parameter_names=("concentration",),
    name=lambda layout, site: "Dirichlet",
    describe_prior=lambda text, u: f"Dirichlet({text['concentration']})",
    describe_update=lambda layout, site: (
        f"alpha_k += a_k, where log likelihood = sum_k a_k log({site.name}_k) + constant"
    ),
    statistics_text="log z_k",
    prior_remedy="a simplex has a Dirichlet prior",
)
