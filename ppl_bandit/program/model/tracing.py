"""Run a NumPyro program with some of its sites fixed, and compute log densities of its sites.

Laws whose density and mean hold where those of NumPyro overflow: truncated normal and Laplace laws far in a tail.

NumPyro divides by a difference of distribution functions. Eight standard deviations out that difference rounds to 0, so the
density is infinite and the mean is nan. Here the log of the difference is computed from the log of the distribution function.
Mean and variance come from quadrature of the density relative to its largest value. The density of a Kumaraswamy law at 0 and 1
is its own.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
from jax.scipy.special import log_ndtr, xlogy
from jaxtyping import Array, Bool, Float, Int
from numpyro import handlers
from numpyro.distributions import Distribution, Independent, Kumaraswamy, Laplace, Normal, constraints
from numpyro.distributions.truncated import (
    LeftTruncatedDistribution,
    RightTruncatedDistribution,
    TwoSidedTruncatedDistribution,
)

from ppl_bandit.runtime.numpyro_adapter import element_support, mask_of
from ppl_bandit.types import Key

_NUM_NODES = 64
_LOG_SMALL = 37.0  # exp(-37) is the resolution of float64


def stable(fn: Any) -> Any:
    """Return a distribution with a stable density and mean in place of a truncated one; others are returned as given."""
    inner = getattr(fn, "base_dist", None)
    own = _CLASSES.get((type(fn), type(inner)))
    if own is not None:
        fn = copy.copy(fn)
        fn.__class__ = own
        return fn
    if isinstance(inner, Distribution):
        better = stable(inner)
        if better is not inner:
            fn = copy.copy(fn)
            fn.base_dist = better
    return fn


class _KumaraswamyAtEnds:
    """The density at 0 and 1, where that of NumPyro is finite although it is 0 or infinite."""

    concentration1: Any
    concentration0: Any

    def log_prob(self, value: Any) -> Array:
        a, b = self.concentration1, self.concentration0
        is_end = (value <= 0.0) | (value >= 1.0)
        at_end = xlogy(a - 1.0, value) + xlogy(b - 1.0, 1.0 - value) + jnp.log(a) + jnp.log(b)
        inside = super().log_prob(  # type: ignore[misc]
            jnp.where(is_end, 0.5, value)
        )
        return jnp.where(is_end, jax.lax.stop_gradient(at_end), inside)


class _Truncated:
    """The formulas shared by the three kinds of truncation; in standard units the law is symmetric about 0, on (a, b)."""

    base_dist: Any
    batch_shape: tuple[int, ...]
    low: Any = -np.inf
    high: Any = np.inf

    def log_prob(self, value: Any) -> Array:
        return self.base_dist.log_prob(value) - _log_mass(*self._standard_bounds(), self._log_cdf)

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
        """Return mean and variance, by quadrature of the parts on both sides of the location.

        In each the density is relative to its largest value, at the end that is closer to the location. Where both parts have
        mass, that is the location itself.
        """
        a, b = self._standard_bounds()
        nodes, weights = (
            jnp.asarray(numbers, a.dtype).reshape(-1, *[1] * a.ndim)
            for numbers in np.polynomial.legendre.leggauss(_NUM_NODES)
        )
        steps, variances, masses = [], [], []
        for near, far in ((-jnp.minimum(b, 0.0), -jnp.minimum(a, 0.0)), (jnp.maximum(a, 0.0), jnp.maximum(b, 0.0))):
            end = jnp.minimum(far - near, self._reach(near))
            step = end * 0.5 * (nodes + 1.0)
            mass = jnp.exp(-self._fall(near, step)) * weights
            total = jnp.sum(mass, axis=0)
            steps.append(jnp.sum(mass * step, axis=0) / total)
            variances.append(jnp.sum(mass * (step - steps[-1]) ** 2, axis=0) / total)
            masses.append(end * total)
        right = masses[1] / jnp.maximum(masses[0] + masses[1], jnp.finfo(a.dtype).tiny)
        left = 1.0 - right
        variance = left * variances[0] + right * variances[1] + left * right * (steps[0] + steps[1]) ** 2
        loc, scale = self.base_dist.loc, self.base_dist.scale
        # The nearer end of the interval keeps the digits that the location would lose.
        anchor = jnp.where(a > 0, self.low, jnp.where(b < 0, self.high, loc))
        return anchor + scale * (right * steps[1] - left * steps[0]), scale**2 * variance

    def _log_cdf(self, z: Array) -> Array:
        raise NotImplementedError

    def _fall(self, near: Array, step: Array) -> Array:
        """Return how far the log density falls over a step outwards from a point on the positive side."""
        raise NotImplementedError

    def _reach(self, near: Array) -> Array:
        """Return the step over which it falls so far that there is no mass beyond."""
        raise NotImplementedError


class _TruncatedNormal(_Truncated):
    def _log_cdf(self, z: Array) -> Array:
        return log_ndtr(z)

    def _fall(self, near: Array, step: Array) -> Array:
        return 0.5 * step * (2.0 * near + step)

    def _reach(self, near: Array) -> Array:
        return 2.0 * _LOG_SMALL / (jnp.sqrt(near**2 + 2.0 * _LOG_SMALL) + near)


class _TruncatedLaplace(_Truncated):
    def _log_cdf(self, z: Array) -> Array:
        return jnp.where(z < 0, jnp.log(0.5) + z, jnp.log1p(-0.5 * jnp.exp(-jnp.abs(z))))

    def _fall(self, near: Array, step: Array) -> Array:
        return step

    def _reach(self, near: Array) -> Array:
        return jnp.full_like(near, _LOG_SMALL)


def _log_mass(a: Array, b: Array, log_cdf: Callable[[Array], Array]) -> Array:
    """Return the logarithm of the mass of a law that is symmetric about 0 between a and b."""
    is_flipped = a + b > 0  # differences are taken in the lower tail
    lower, upper = jnp.where(is_flipped, -b, a), jnp.where(is_flipped, -a, b)
    top = log_cdf(upper)
    is_bounded = jnp.isfinite(lower)
    drop = log_cdf(jnp.where(is_bounded, lower, upper - 1.0)) - top
    return top + jnp.where(is_bounded, jnp.log(-jnp.expm1(drop)), 0.0)


def _class(law: type, base: type) -> type:
    return type(base.__name__, (law, base), {"__module__": __name__})


_CLASSES = {
    (base, inner): _class(law, base)
    for base in (LeftTruncatedDistribution, RightTruncatedDistribution, TwoSidedTruncatedDistribution)
    for inner, law in ((Normal, _TruncatedNormal), (Laplace, _TruncatedLaplace))
}
_CLASSES[Kumaraswamy, type(None)] = _class(_KumaraswamyAtEnds, Kumaraswamy)

Site = dict[str, Any]
Trace = dict[str, Site]

_LOCK = threading.RLock()
_THREAD = threading.local()


@contextlib.contextmanager
def program_lock() -> Iterator[None]:
    """Hold the lock without which no program may run: NumPyro's handler stack and validation flag are global to the process.

    Only tracing runs programs; compiled functions do not need the lock.

    Raises:
        RuntimeError: inside `forbid_programs`.
    """
    if getattr(_THREAD, "is_forbidden", False):
        raise RuntimeError("a background thread tried to run a program, which only the threads of the user may do")
    with _LOCK:
        yield


@contextlib.contextmanager
def forbid_programs() -> Iterator[None]:
    """Forbid this thread to run programs: it would see the NumPyro handlers of the user's threads."""
    _THREAD.is_forbidden = True
    try:
        yield
    finally:
        _THREAD.is_forbidden = False


def run_program(
    program: Callable,
    arm: Int[Array, " N"],
    context: Any,
    values: Mapping[str, Array],
    key: Key | None = None,
    choose: Callable[[Site], Array | None] | None = None,
    previous: Mapping[str, Array] | None = None,
    elapsed: Array | float | None = None,
) -> Trace:
    """Run a program with some of its sites fixed and return its trace; sites that are not fixed are sampled.

    NumPyro's argument checks are disabled, because their comparisons would end up in the jaxpr. An invalid argument leads to
    a log density that is not finite.

    Args:
        values: {site: value} of the fixed sites.
        choose: returns the value of a site that is not in `values`, or None to sample it.
        previous: the latents one step before, for a program that takes them; None at the first step.
        elapsed: the time since then, for a program that takes it; None is the program's default.
    """
    fixed = handlers.substitute(program, data=dict(values))
    if choose is not None:
        fixed = handlers.substitute(fixed, substitute_fn=choose)
    # The seed handler is outermost, so that a site with a value uses no key.
    seeded = handlers.seed(fixed, jr.key(0) if key is None else key)
    # JAX arrays, not NumPy ones: a program may use `context.at[...]` or index in a loop.
    given = jax.tree.map(jnp.asarray, (arm,) if context is None else (arm, context))
    keywords: dict[str, Any] = {} if previous is None else {"previous": dict(previous)}
    if elapsed is not None:
        keywords["elapsed"] = elapsed
    with program_lock(), numpyro.validation_enabled(False):
        trace = handlers.trace(seeded).get_trace(*given, **keywords)
    for site in trace.values():
        if site["type"] == "sample":
            site["fn"] = stable(site["fn"])
    return trace


def log_prob(site: Site, mask: Bool[Array, " N"] | None = None) -> Array:
    """Return a site's log density, elementwise; 0 where masked."""
    fn = site["fn"] if mask is None else site["fn"].mask(mask)
    density = fn.log_prob(site["value"])
    return density if site["scale"] is None else site["scale"] * density


def log_prob_terms(site: Site) -> Float[Array, " terms"]:
    """Return the log density of a site as one term for each independent element."""
    fn, num_summed = site["fn"], 0
    while isinstance(fn, Independent):
        num_summed += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    density = fn.log_prob(site["value"])
    if site["scale"] is not None:
        scale = jnp.asarray(site["scale"])
        density *= scale.reshape(scale.shape + (1,) * num_summed) if scale.ndim else scale
    return jnp.ravel(jnp.asarray(density, float))


def can_produce(fn: Any, value: Array) -> Bool[Array, "..."]:
    """Return where a distribution can produce a value; a masked distribution can produce any value."""
    masked, fn = masked_rows(fn, value.shape)
    inside = jnp.broadcast_to(fn.support(value), value.shape) & jnp.isfinite(value)
    if element_support(fn.support) is constraints.unit_interval:
        # The density of a Beta outcome is 0 or infinite at exactly 0 and 1: such a reward was rounded or is another event.
        is_end = (value <= 0) | (value >= 1)
        inside &= ~is_end | jnp.isfinite(fn.log_prob(jnp.where(inside, value, 0.5)))
    return masked | inside


def masked_rows(fn: Any, shape: tuple[int, ...]) -> tuple[Bool[Array, "..."], Any]:
    """Return where a distribution is masked, and the distribution without masks."""
    masked = jnp.zeros(shape, bool)
    while (mask := mask_of(fn)) is not None:
        masked |= jnp.logical_not(jnp.broadcast_to(jnp.asarray(mask), shape))
        fn = fn.base_dist
    return masked, fn


def is_prior_term(name: str, site: Site, outcomes: tuple[str, ...]) -> bool:
    """Return whether a site belongs to the prior: a latent, a constant that the program observes, or a factor."""
    return site["type"] == "sample" and name not in outcomes


def repeat_rows(context: Any, num_rows: int) -> Any:
    """Repeat one context over rows; None stays None."""
    if context is None:
        return None
    return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (num_rows, *jnp.shape(leaf))), context)
