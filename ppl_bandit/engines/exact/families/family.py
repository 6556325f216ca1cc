"""The description of an exponential family. A new family is one module that builds a `Family`, listed in `registry`.

A family has coordinates x of its elements, unconstrained reals in which log densities are differentiated, sufficient statistics
T(x), and parameters that are linear in the natural parameters eta: parameters = base + sign * eta. All functions work on the
elements of a group at once, (E,) or (E, K) coordinates and (E, n) statistics, and accept leading axes. Real elements are not
described here: their Gaussian blocks may be scaled by a Gamma family (`gaussian`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.layout import Layout, SiteBlock
from ppl_bandit.numerics.marginal_laws import MarginalLaw
from ppl_bandit.types import Key

_SCREENING_TOLERANCE = 1e-6  # of the range of a log density: screening must not reject what rounding explains


class Family(NamedTuple):
    """An exponential family on one kind of support.

    Attributes:
        kind: the name used in `SiteBlock.kind`.
        accepts: NumPyro constraint -> whether it is the support of this family.
        num_event_dims: 1 for a family of vectors, which has one statistic per coordinate; 0 for one of numbers, which has 2.
        value: coordinates -> the latent on the standard support.
        latent: (value, low, high, power) -> the latent on the site's own support; `sample` draws values.
        reading_point: parameters -> coordinates at which log densities are differentiated.
        middle: parameters -> coordinates of the middle of the distribution.
        variance: parameters -> approximate variance of the coordinates.
        max_sd: largest standard deviation of certificate points about the middle, and that of points near the reading point.
        far_range: distances of certificate points far away from the reading point.
        statistics: coordinates -> T(x).
        rounding_sizes: (coordinates, layout) -> size of the numbers from which rounding makes each statistic.
        natural: (coordinates, gradient, curvature, gradient_at) -> eta. The curvature is the Hessian times a vector that is 1
            at the first coordinate of each element; `gradient_at` evaluates the gradient at other coordinates.
        base, sign: layout -> base, (E, n) or a number, and sign, (n,) or a number.
        counts: the columns of the parameters that grow by one or so per row of data.
        log_normalizer: parameters, with batch axes at the end -> log integral of exp <eta, T> per element.
        log_volume: (site, layout) -> log of the Jacobian that the site's support adds to the log integral.
        sample: (key, parameters, leading shape) -> values.
        tails: parameters -> (direction, rate) of each tail: its density falls as exp(-rate |x|) in that direction of x.
        widen: (parameters, scale, power) -> parameters of a distribution that is `scale` times as wide.
        marginal_law: (parameters, low, high, power, offset, slope, exponent) -> the law of offset + slope z^exponent for the
            latent z of each element; None where it has no closed form. None for a family of vectors.
        screen: (log densities on a line of equal steps (steps, densities), the line's coordinates (steps, E)) -> "" or why
            they are not of this family's form. It may miss deviations.
        parameter_names: names of the columns of the parameters; one name for all columns of a vector.
        name: (layout, site) -> name of the site's posterior.
        describe_prior: (parameter texts by name, site text) -> the prior in words.
        describe_update: (layout, site) -> the update in words.
        statistics_text: the sufficient statistics of a latent z.
        prior_remedy: which priors make a latent on this support conjugate.
    """

    kind: str
    accepts: Callable[[Any], bool]
    num_event_dims: int
    value: Callable[[Array], Array]
    latent: Callable[[Array, Any, Any, Any], Array]
    reading_point: Callable[[Array], Array]
    middle: Callable[[Array], Array]
    variance: Callable[[Array], Array]
    max_sd: float
    far_range: tuple[float, float]
    statistics: Callable[[Array], Array]
    rounding_sizes: Callable[[Array, Layout], Array]
    natural: Callable[[Array, Array, Array, Callable[[Array], Array]], Array]
    base: Callable[[Layout], Any]
    sign: Any
    counts: slice
    log_normalizer: Callable[[Array], Array]
    log_volume: Callable[[SiteBlock, Layout], float]
    sample: Callable[[Key, Array, tuple[int, ...]], Array]
    tails: Callable[[Array], tuple[tuple[float, Float[Array, " E"]], ...]]
    widen: Callable[[Array, Array, Any], Array]
    marginal_law: Callable[..., MarginalLaw | None] | None
    screen: Callable[[np.ndarray, np.ndarray], str]
    parameter_names: tuple[str, ...]
    name: Callable[[Layout, SiteBlock], str]
    describe_prior: Callable[[dict[str, str], str], str]
    describe_update: Callable[[Layout, SiteBlock], str]
    statistics_text: str
    prior_remedy: str


def round_to_halves(coefficients: Array) -> Array:
    """Round to a multiple of 1/2 what differs from one by rounding alone, so that sums of counts stay exact."""
    halves = jnp.round(2.0 * coefficients) / 2.0
    tolerance = 8.0 * jnp.finfo(coefficients.dtype).eps * jnp.maximum(1.0, jnp.abs(coefficients))
    return jnp.where(jnp.abs(coefficients - halves) <= tolerance, halves, coefficients)


def misfit(basis: np.ndarray, values: np.ndarray) -> bool:
    """Return whether any column of values is not a combination of the columns of a basis, up to rounding."""
    fitted = basis @ np.linalg.lstsq(basis, values, rcond=1e-12)[0]
    deviation = np.abs(values - fitted).max(axis=0)
    return bool(np.any(deviation > _SCREENING_TOLERANCE * np.ptp(values, axis=0) + 1e-9))
