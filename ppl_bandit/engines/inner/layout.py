"""How the latents of a program are arranged, `Layout`, and what an exponential family is, `Family`.

A new family is one module that builds a `Family`, listed in `registry`. It has coordinates x of its elements, unconstrained
reals in which log densities are differentiated, sufficient statistics T(x), and parameters that are linear in the natural
parameters eta: parameters = base + sign * eta. All functions work on the elements of a group at once, (E,) or (E, K)
coordinates and (E, n) statistics, and accept leading axes. Real elements are not described here: their Gaussian blocks may be
scaled by a Gamma family (`gaussian`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.numerics.marginal_laws import MarginalLaw
from ppl_bandit.types import Key

UNIT, POSITIVE, SIMPLEX, REAL = "unit", "positive", "simplex", "real"


class SiteBlock(NamedTuple):
    """Where the elements of a latent site are stored.

    An element is one number, or one vector for a family of vectors (a row of a simplex site).

    Attributes:
        kind: name of the site's family; `REAL` for elements of a Gaussian block.
        start: index of the site's first element among the elements of its group.
        low, high: bounds of the support, where it has any.
        num_event_dims: 1 for a family of vectors, 0 for a family of numbers.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    low: Any = 0.0
    high: Any = 1.0
    num_event_dims: int = 0

    @property
    def size(self) -> int:
        """Number of scalars."""
        return int(np.prod(self.shape, dtype=int))

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one element."""
        return self.shape[len(self.shape) - self.num_event_dims :]

    @property
    def group(self) -> str:
        """Key of the arrays that hold the elements: sites of a kind whose elements have the same shape share them."""
        return " ".join([self.kind, *map(str, self.event_shape)])

    @property
    def span(self) -> slice:
        """The site's elements among those of its group."""
        return slice(self.start, self.start + self.size // int(np.prod(self.event_shape, dtype=int)))


class Layout(NamedTuple):
    """How the latents of a program are divided into families; known when the engine is built.

    Attributes:
        sites: one block per latent site.
        power: (G,), u = (z - low)^power for each of G positive elements.
        members: (R, S) indices of the real elements of each of R Gaussian blocks, padded with 0.
        is_member: (R, S), false for padding.
        owner: (R,), the positive element whose u scales a block's precision, -1 for a block without one.
        leaves: (L, s) if the first L s columns of a block are L groups of s elements that have nonzero precision only within
            the group and with the remaining columns, the core; (0, 0) otherwise.
    """

    sites: tuple[SiteBlock, ...]
    power: np.ndarray
    members: np.ndarray
    is_member: np.ndarray
    owner: np.ndarray
    leaves: tuple[int, int] = (0, 0)

    @property
    def is_pair(self) -> np.ndarray:
        """(R, S, S), whether both entries are members of the block."""
        return self.is_member[:, :, None] & self.is_member[:, None, :]

    @property
    def is_scaled(self) -> bool:
        """Whether a positive element scales any Gaussian block."""
        return bool(np.any(self.owner >= 0))

    @property
    def along_columns(self) -> np.ndarray:
        """(S, D), directions in the real elements, each along one column of every block."""
        steps = np.zeros((self.members.shape[1], self.count(REAL)))
        for step, members, is_member in zip(steps, self.members.T, self.is_member.T, strict=True):
            step[members[is_member]] = 1.0
        return steps

    @property
    def num_scaled(self) -> np.ndarray:
        """Number of real elements that each positive element scales, (G,)."""
        counts = self.is_member.sum(axis=1)
        return np.array([counts[self.owner == element].sum() for element in range(self.power.size)], int)

    @property
    def owner_of_real(self) -> np.ndarray:
        """The positive element that scales each real element, -1 for none, (D,)."""
        return self._by_real(self.owner)

    @property
    def block_of_real(self) -> np.ndarray:
        """The block of each real element, (D,)."""
        return self._by_real(np.arange(self.owner.size))

    def _by_real(self, values: np.ndarray) -> np.ndarray:
        found = np.full(self.count(REAL), -1)
        found[self.members[self.is_member]] = np.broadcast_to(values[:, None], self.members.shape)[self.is_member]
        return found

    def of(self, kind: str) -> list[SiteBlock]:
        """Return the sites of a kind."""
        return [site for site in self.sites if site.kind == kind]

    def count(self, kind: str) -> int:
        """Return the number of scalars of a kind."""
        return sum(site.size for site in self.of(kind))

    def bounds(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper bounds of all scalars of a kind."""
        low, high = (
            np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in self.of(kind)])
            for end in ("low", "high")
        )
        return low, high


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
