"""Families of elements in the unit interval and of simplexes: Beta and Dirichlet."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from ppl_bandit.engines.inner.layout import SIMPLEX, UNIT, Family, Layout, SiteBlock, misfit, round_to_halves
from ppl_bandit.numerics import marginal_laws, sampling
from ppl_bandit.numerics.sampling import betaln, gammaln
from ppl_bandit.types import Key

_POINT = float(np.log(0.4 / 0.6))  # not 0: stabilised formulas have a kink at logit(1/2)


def _accepts(support: Any) -> bool:
    return isinstance(support, constraints.interval) and not isinstance(support, type(constraints.circular))


def _statistics(logits: Float[Array, "*P E"]) -> Float[Array, "*P E 2"]:
    return jax.nn.log_sigmoid(jnp.stack([logits, -logits], axis=-1))


def _rounding_sizes(logits: Float[Array, "P E"], layout: Layout) -> Float[Array, "P E 2"]:
    low, high = layout.bounds(UNIT)
    offset = np.asarray(low / np.where(high == low, 1.0, high - low), logits.dtype)
    w = jax.nn.sigmoid(jnp.stack([logits, -logits], axis=-1))
    share = abs(w[..., :1] + offset[:, None])
    # 1 - z is rounded at the size of 1.
    return (share + np.arange(2, dtype=logits.dtype)) / w


def _natural(logits: Array, gradient: Array, curvature: Array, gradient_at: Any) -> Float[Array, "E 2"]:
    del gradient_at
    w = jax.nn.sigmoid(logits)
    total = -curvature / (w * (1.0 - w))
    success = gradient + w * total
    return round_to_halves(jnp.stack([success, total - success], axis=-1))


def _latent(w: Array, low: Any, high: Any, power: Any) -> Array:
    del power
    return low + (high - low) * w


def _sample(key: Key, parameters: Array, sample_shape: tuple[int, ...]) -> Array:
    return sampling.beta(key, parameters[..., 0], parameters[..., 1], sample_shape)


def _marginal_law(
    parameters: Float[Array, "A 2"], low: Any, high: Any, power: Any, offset: Any, slope: Any, exponent: int
) -> marginal_laws.MarginalLaw | None:
    del power
    if exponent != 1:
        return None
    return marginal_laws.beta_law(parameters[:, 0], parameters[:, 1], offset + slope * low, slope * (high - low))


def _screen(values: np.ndarray, logits: np.ndarray) -> str:
    # With many elements the fit is always perfect, and only the certificates decide.
    basis = [-np.log1p(np.exp(-logits)), -np.log1p(np.exp(logits)), np.ones((len(logits), 1))]
    return "not Beta" if misfit(np.concatenate(basis, axis=1), values) else ""


def _name(layout: Layout, site: SiteBlock) -> str:
    is_standard = np.all(np.asarray(site.low) == 0) and np.all(np.asarray(site.high) == 1)
    return "Beta" if is_standard else "Beta, on its interval"


BETA = Family(
    kind=UNIT,
    accepts=_accepts,
    num_event_dims=0,
    value=jax.nn.sigmoid,
    latent=_latent,
    reading_point=lambda parameters: jnp.full(parameters.shape[:-1], _POINT, parameters.dtype),
    middle=lambda parameters: jnp.log(parameters[..., 0] / parameters[..., 1]),
    variance=lambda parameters: (1.0 / parameters).sum(axis=-1),
    max_sd=2.0,
    far_range=(3.0, 9.0),  # no further: 1 - z keeps 11 digits at logit 9
    statistics=_statistics,
    rounding_sizes=_rounding_sizes,
    natural=_natural,
    base=lambda layout: 1.0,
    sign=1.0,
    counts=slice(None),
    log_normalizer=lambda parameters: betaln(parameters[:, 0], parameters[:, 1]),
    log_volume=lambda site, layout: float(np.sum(np.log(np.broadcast_to(site.high - site.low, site.shape)))),
    sample=_sample,
    tails=lambda parameters: ((-1.0, parameters[..., 0]), (1.0, parameters[..., 1])),
    widen=lambda parameters, scale, power: parameters * scale**-2.0,
    marginal_law=_marginal_law,
    screen=_screen,
    parameter_names=("concentration1", "concentration0"),
    name=_name,
    describe_prior=lambda text, u: f"Beta({text['concentration1']}, {text['concentration0']})",
    describe_update=lambda layout, site: (
        f"alpha += a, beta += b, where log likelihood = a log({site.name}) + b log(1 - {site.name}) + constant"
    ),
    statistics_text="log z and log(1 - z)",
    prior_remedy="a latent in (0, 1) has a Beta prior",
)


def _reading_point(parameters: Float[Array, "E K"]) -> Float[Array, "E K"]:
    # Unequal: at equal logits, formulas that compare elements have kinks.
    return jnp.broadcast_to(jnp.linspace(-0.3, 0.4, parameters.shape[-1], dtype=parameters.dtype), parameters.shape)


def _middle(parameters: Float[Array, "E K"]) -> Float[Array, "E K"]:
    logs = jnp.log(parameters)
    return logs - logs.mean(axis=-1, keepdims=True)


def _dirichlet_natural(logits: Array, gradient: Array, curvature: Array, gradient_at: Any) -> Float[Array, "E K"]:
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
    natural=_dirichlet_natural,
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
