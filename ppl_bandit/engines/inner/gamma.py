"""The Gamma family of a power of a positive latent: u = (z - low)^power ~ Gamma(shape, rate), with T = (log u, u).

Power -1 makes z InverseGamma, power -2 a standard deviation. The coordinate is log u. An element may be the precision of
Gaussian blocks, which makes the joint family Normal-Gamma or Normal-InverseGamma.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import constraints

from ppl_bandit.engines.inner.layout import POSITIVE, Family, Layout, SiteBlock, round_to_halves
from ppl_bandit.numerics import marginal_laws, sampling
from ppl_bandit.numerics.sampling import gammaln
from ppl_bandit.types import Key


def _latent(log_u: Array, low: Any, high: Any, power: Any) -> Array:
    del high
    return low + jnp.exp(log_u / power)


def _middle(parameters: Float[Array, "E 2"]) -> Float[Array, " E"]:
    return jnp.log(parameters[..., 0] / parameters[..., 1])


def _statistics(log_u: Float[Array, "*P E"]) -> Float[Array, "*P E 2"]:
    return jnp.stack([log_u, jnp.exp(log_u)], axis=-1)


def _rounding_sizes(log_u: Float[Array, "P E"], layout: Layout) -> Float[Array, "P E 2"]:
    power, (low, _) = np.asarray(layout.power, log_u.dtype), layout.bounds(POSITIVE)
    log_z = log_u / power
    distance = abs(log_z) + np.asarray(abs(low), log_u.dtype) * jnp.exp(-log_z) if np.any(low) else abs(log_z)
    num_roundings = 1.0 + abs(power) * (1.0 + distance)
    return jnp.stack([num_roundings, num_roundings * jnp.exp(log_u)], axis=-1)


def _natural(
    log_u: Array, gradient: Array, curvature: Array, gradient_at: Callable[[Array], Array]
) -> Float[Array, "E 2"]:
    del gradient
    # Along log u the log density is a log u + b u. Where b u is large its slope a + b u has lost the digits of a, so a is
    # read where b u is at most 1.
    shift = jnp.log1p(jnp.abs(curvature))
    log_coefficient = gradient_at(log_u - shift) - curvature * jnp.exp(-shift)
    return jnp.stack([round_to_halves(log_coefficient), curvature / jnp.exp(log_u)], axis=-1)


def _base(layout: Layout) -> np.ndarray:
    # The density of z has (shape - 1/power + members/2) log u where the density of u has (shape - 1) log u.
    return np.stack([1.0 / layout.power - 0.5 * layout.num_scaled, np.zeros(layout.power.size)], axis=-1)


def _log_normalizer(parameters: Float[Array, "E 2 *batch"]) -> Array:
    shape, rate = parameters[:, 0], parameters[:, 1]
    # A negative shape has a finite log gamma and no integral.
    return jnp.where(shape > 0, gammaln(shape) - shape * jnp.log(rate), jnp.nan)


def _sample(key: Key, parameters: Array, sample_shape: tuple[int, ...]) -> Array:
    return sampling.log_gamma(key, parameters[..., 0], sample_shape, parameters[..., 1])


def _widen(parameters: Array, scale: Array, power: Any) -> Array:
    return jnp.stack([parameters[:, 0], parameters[:, 1] * scale**-power], axis=-1)


def _marginal_law(
    parameters: Float[Array, "A 2"], low: Any, high: Any, power: Any, offset: Any, slope: Any, exponent: int
) -> marginal_laws.MarginalLaw | None:
    del high
    if exponent != 1 and np.any(low != 0):
        return None
    return marginal_laws.gamma_law(
        parameters[:, 0], parameters[:, 1], offset + slope * low, slope, exponent / np.asarray(power)
    )


def _screen(values: np.ndarray, log_z: np.ndarray) -> str:
    """Check that second differences along log z, those of exp(power log z), form a geometric sequence with one ratio."""
    del log_z
    reach = np.ptp(values, axis=0)
    bends = np.diff(values, 2, axis=0)
    largest = np.abs(bends).max(axis=0)
    is_bent = largest > 1e-7 * (1.0 + reach)
    if not np.any(is_bent):
        return "not Gamma in any power"
    first = bends[:, np.flatnonzero(is_bent)[-1]]
    ratio = first[-1] / first[-2] if abs(first[-1]) > abs(first[0]) else first[1] / first[0]
    gaps = np.abs(bends[1:] - ratio * bends[:-1]).max(axis=0)
    return "" if np.all(gaps <= 1e-5 * largest + 1e-7 * (1.0 + reach)) else "not Gamma in one power"


def scale_family_name(power: float, is_joint: bool, name: str) -> str:
    """Name the family of a positive latent, or the joint one of the latent and the reals whose precision it gives.

    Args:
        is_joint: whether the latent scales any real element.
        name: of the latent's site.
    """
    if power == 1.0:
        return "Normal-Gamma" if is_joint else "Gamma"
    if power == -1.0:
        return "Normal-InverseGamma" if is_joint else "InverseGamma"
    if is_joint:
        kind = {-2.0: "a standard deviation", 2.0: "a root precision"}.get(power, f"its precision is {name}^{power:g}")
        return f"Normal-InverseGamma ({kind})" if power < 0 else f"Normal-Gamma ({kind})"
    return f"Gamma in {name}^{power:g}"


def _name(layout: Layout, site: SiteBlock) -> str:
    is_joint = layout.num_scaled > 0
    elements = range(site.start, site.start + site.size)
    return " and ".join(dict.fromkeys(scale_family_name(layout.power[i], is_joint[i], site.name) for i in elements))


def _describe_update(layout: Layout, site: SiteBlock) -> str:
    power = layout.power[site.start]
    u = site.name if power == 1.0 else f"{site.name}^{power:g}"
    if layout.num_scaled[site.start]:
        return f"with u = {u}: shape += 1/2 per Normal row, rate += (squared residual after the mean has moved) / 2"
    return f"shape += a, rate += b, where log likelihood = a log({u}) - b {u} + constant"


GAMMA = Family(
    kind=POSITIVE,
    accepts=lambda support: isinstance(support, constraints.greater_than),
    num_event_dims=0,
    value=lambda log_u: log_u,
    latent=_latent,
    reading_point=_middle,
    middle=_middle,
    variance=lambda parameters: 1.0 / parameters[..., 0],
    max_sd=1.2,
    far_range=(2.0, 6.0),  # no further: a change of e^6 in u dwarfs its logarithm
    statistics=_statistics,
    rounding_sizes=_rounding_sizes,
    natural=_natural,
    base=_base,
    sign=np.array([1.0, -1.0]),
    counts=slice(0, 1),
    log_normalizer=_log_normalizer,
    log_volume=lambda site, layout: -float(np.sum(np.log(np.abs(layout.power[site.span])))),
    sample=_sample,
    tails=lambda parameters: ((-1.0, parameters[..., 0]),),
    widen=_widen,
    marginal_law=_marginal_law,
    screen=_screen,
    parameter_names=("concentration", "rate"),
    name=_name,
    describe_prior=lambda text, u: f"{u} ~ Gamma(shape {text['concentration']}, rate {text['rate']})",
    describe_update=_describe_update,
    statistics_text="log z and a power of z",
    prior_remedy="a positive latent has a Gamma or InverseGamma prior",
)
