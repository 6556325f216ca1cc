"""Truncated normal laws whose density and mean hold far in a tail, where those of NumPyro overflow.

NumPyro divides by a difference of distribution functions. Eight standard deviations out that difference rounds to 0, so the
density is infinite and the mean is nan. Here the log of the difference is computed from `log_ndtr`, and mean and variance by
quadrature of the density relative to its largest value.
"""

import copy
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr
from jaxtyping import Array
from numpyro.distributions import Distribution, Normal
from numpyro.distributions.truncated import (
    LeftTruncatedDistribution,
    RightTruncatedDistribution,
    TwoSidedTruncatedDistribution,
)

__all__ = ["stable"]

_NUM_NODES = 64
_LOG_SMALL = 37.0  # exp(-37) is the resolution of float64


def stable(fn: Any) -> Any:
    """Return a distribution with a stable density and mean in place of a truncated normal one; others are returned as given."""
    own = _CLASSES.get(type(fn))
    if own is not None and isinstance(fn.base_dist, Normal):
        fn = copy.copy(fn)
        fn.__class__ = own
        return fn
    inner = getattr(fn, "base_dist", None)
    if isinstance(inner, Distribution):
        better = stable(inner)
        if better is not inner:
            fn = copy.copy(fn)
            fn.base_dist = better
    return fn


class _TruncatedNormal:
    """The formulas shared by the three kinds of truncation; in standard units the law is Normal(0, 1) on (a, b)."""

    base_dist: Normal
    batch_shape: tuple[int, ...]
    low: Any = -np.inf
    high: Any = np.inf

    def log_prob(self, value: Any) -> Array:
        return self.base_dist.log_prob(value) - _log_mass(*self._standard_bounds())

    @property
    def mean(self) -> Array:
        return self._moments()[0]

    @property
    def variance(self) -> Array:
        return self._moments()[1]

    def _standard_bounds(self) -> tuple[Array, Array]:
        loc, scale = self.base_dist.loc, self.base_dist.scale
        a, b = (
            jnp.broadcast_to(jnp.asarray((end - loc) / scale, float), self.batch_shape) for end in (self.low, self.high)
        )
        return a, b

    def _moments(self) -> tuple[Array, Array]:
        """Return mean and variance, by quadrature from the end of the interval that is closer to the location.

        Where that end is beyond the location, the density at a step t from it is proportional to exp(-t (2 end + t) / 2).
        """
        a, b = self._standard_bounds()
        is_flipped = a + b < 0  # then the mirror image is used, whose mass is at its lower end
        lower, upper = jnp.where(is_flipped, -b, a), jnp.where(is_flipped, -a, b)
        far = float(np.sqrt(2.0 * _LOG_SMALL))
        lower = jnp.maximum(lower, -far)  # there is no mass below
        beyond = jnp.maximum(lower, 0.0)
        reach = 2.0 * _LOG_SMALL / (jnp.sqrt(beyond**2 + 2.0 * _LOG_SMALL) + beyond) - jnp.minimum(lower, 0.0)
        end = jnp.minimum(upper - lower, reach)
        nodes, weights = np.polynomial.legendre.leggauss(_NUM_NODES)
        shape = (-1, *[1] * lower.ndim)
        step = end * jnp.asarray(0.5 * (nodes + 1.0), lower.dtype).reshape(shape)
        exponent = jnp.where(lower > 0, -step * (2.0 * beyond + step), -((lower + step) ** 2)) / 2.0
        mass = jnp.exp(exponent) * jnp.asarray(weights, lower.dtype).reshape(shape)
        mean_step = jnp.sum(mass * step, axis=0) / jnp.sum(mass, axis=0)
        variance = jnp.sum(mass * (step - mean_step) ** 2, axis=0) / jnp.sum(mass, axis=0)
        sign, (loc, scale) = jnp.where(is_flipped, -1.0, 1.0), (self.base_dist.loc, self.base_dist.scale)
        bound = jnp.where(is_flipped, self.high, self.low)
        # Far out, the bound keeps the digits that location + scale * lower would lose.
        anchor = jnp.where(lower > 0, bound, loc + sign * scale * lower)
        return anchor + sign * scale * mean_step, scale**2 * variance


def _log_mass(a: Array, b: Array) -> Array:
    """Return the logarithm of the mass of Normal(0, 1) between a and b."""
    is_flipped = a + b > 0  # differences are taken in the lower tail
    lower, upper = jnp.where(is_flipped, -b, a), jnp.where(is_flipped, -a, b)
    top = log_ndtr(upper)
    is_bounded = jnp.isfinite(lower)
    drop = log_ndtr(jnp.where(is_bounded, lower, upper - 1.0)) - top
    return top + jnp.where(is_bounded, jnp.log(-jnp.expm1(drop)), 0.0)


def _class(base: type) -> type:
    return type(base.__name__, (_TruncatedNormal, base), {"__module__": __name__})


_CLASSES = {
    base: _class(base)
    for base in (LeftTruncatedDistribution, RightTruncatedDistribution, TwoSidedTruncatedDistribution)
}
