"""Adapter to the private fields and class hierarchy of NumPyro distributions.

The rest of the package uses NumPyro's documented API, and this module for everything else, so that a change in NumPyro has to
be answered in one place. `tests/runtime/test_adapters.py` checks everything that is promised here.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.transforms import AffineTransform, Transform
from numpyro.primitives import Messenger

# Older NumPyro releases lack some of these classes.
_CENSORED = [getattr(dist, f"{side}CensoredDistribution", None) for side in ("Left", "Right", "Interval")]
_RECORDS: Any = (dist.MaskedDistribution, *filter(None, _CENSORED))
_WRAPPERS = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)


def mask_of(fn: Distribution) -> Any:
    """Return the mask of a masked distribution, an array or a bool; None for any other distribution."""
    return fn._mask if isinstance(fn, dist.MaskedDistribution) else None


class mask_sites(Messenger):  # noqa: N801  # a handler, named as NumPyro names its own
    """Mask the log density of some sample sites, {site: mask}; `handlers.mask` masks all of them."""

    def __init__(self, masks: Mapping[str, Array]):
        super().__init__()
        self.masks = masks

    def process_message(self, msg: dict[str, Any]) -> None:
        """Mask the distribution of a site."""
        if msg["type"] == "sample" and msg["name"] in self.masks:
            msg["fn"] = msg["fn"].mask(self.masks[msg["name"]])


def without_censoring(fn: Distribution) -> Distribution:
    """Return a distribution without masks and censoring: the law of the outcome itself, not of its record."""
    while isinstance(fn, _RECORDS):
        fn = fn.base_dist
    return fn


def base_distribution(fn: Distribution) -> Distribution:
    """Return a distribution without the wrappers of `expand`, `to_event` and `mask`."""
    while type(fn) in _WRAPPERS:
        fn = fn.base_dist
    return fn


def before_affine_map(fn: Distribution) -> tuple[Distribution, Any, Any]:
    """Return a law, a shift and a scale such that `shift + scale * value` has the given law of one number."""
    shift, scale = jnp.zeros(()), jnp.ones(())
    while isinstance(fn, dist.TransformedDistribution) and type(fn.transforms[-1]) is AffineTransform:
        *others, last = fn.transforms
        shift, scale = shift + scale * last.loc, scale * last.scale
        fn = dist.TransformedDistribution(fn.base_dist, others) if others else fn.base_dist
    return fn, shift, scale


def inner_distribution(fn: Distribution) -> Distribution | None:
    """Return the distribution that another one wraps, or the mixing distribution of a mixture; None if there is none."""
    for field in ("base_dist", "_base_dist", "mixing_distribution", "_mixing_distribution"):
        if isinstance(getattr(fn, field, None), Distribution):
            return getattr(fn, field)
    return None


def components(fn: Any) -> Iterator[Any]:
    """Yield a distribution, its support, and the distributions and transforms inside it with theirs."""
    yield fn
    if isinstance(fn, Distribution):
        yield fn.support
    for value in vars(fn).values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Distribution | Transform):
                yield from components(part)


def is_improper(fn: Distribution) -> bool:
    """Return whether a distribution is NumPyro's improper uniform, which cannot be sampled."""
    return isinstance(base_distribution(fn), dist.ImproperUniform)


def has_circular_part(fn: Distribution) -> bool:
    """Return whether a distribution, or one inside it, is a law of angles: its `.mean` is a direction, not an average."""
    return any(part is constraints.circular for part in components(fn))


def element_support(support: Any) -> Any:
    """Return the constraint of one element of a support."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def support_bounds(fn: Distribution) -> tuple[Any, Any]:
    """Return the ends of the support of a continuous law of one number, infinite where there is none.

    Raises:
        NotImplementedError: for a support that is not an interval of real numbers.
    """
    support = fn.support
    low, high = (getattr(support, field, None) for field in ("lower_bound", "upper_bound"))
    is_interval = low is not None or high is not None or support is constraints.real
    if support.is_discrete or support.event_dim or not is_interval:
        raise NotImplementedError
    return -jnp.inf if low is None else low, jnp.inf if high is None else high


def locations_of(fn: Distribution) -> list[Array]:
    """Return the centre of a law, or of every component of a mixture, each of the law's batch shape; [] if it has none."""
    fn = without_censoring(base_distribution(fn))
    if isinstance(fn, dist.MixtureSameFamily):
        return [
            found[..., part] for found in locations_of(fn.component_distribution) for part in range(found.shape[-1])
        ]
    if isinstance(fn, dist.MixtureGeneral):
        return [location for part in fn.component_distributions for location in locations_of(part)]
    if isinstance(fn, dist.TransformedDistribution):
        found = locations_of(fn.base_dist)
        for transform in fn.transforms:
            found = [transform(location) for location in found]
        return found
    if (
        isinstance(fn, dist.FoldedDistribution)
        or "Truncated" in type(fn).__name__
        or "ZeroInflated" in type(fn).__name__
    ):
        inner = inner_distribution(fn)
        return [] if inner is None else locations_of(inner)
    try:
        location = getattr(fn, "loc", None)
        return [jnp.broadcast_to(fn.mean if location is None else location, fn.batch_shape)]
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return []


def parameters_of(fn: Distribution) -> dict[str, Any]:
    """Return the array-valued fields of a distribution, by name; a field that was not set is None."""
    return {field: getattr(fn, field, None) for field in type(fn).gather_pytree_data_fields()}


def patched_methods(fn: Any) -> dict[str, Callable]:
    """Return the methods that were replaced on this instance of a distribution, by name."""
    return {name: value for name, value in vars(fn).items() if inspect.isfunction(getattr(type(fn), name, None))}


def distribution_name(fn: Distribution) -> str:
    """Return the name of a distribution as programs write it: "Bernoulli" for a `BernoulliProbs`."""
    return type(base_distribution(fn)).__name__.removesuffix("Probs").removesuffix("Logits")


def class_name(constraint: Any) -> str:
    """Return the name of the class of a constraint, for messages."""
    return type(constraint).__name__.strip("_")
