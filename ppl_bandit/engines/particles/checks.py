"""Named checks of draws: a measured value and the bound that it must keep.

An engine's update is compiled, so it returns the values of its checks as one array; the names and bounds are constants. The
caller turns the values that break their bounds into words outside of `jit`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

__all__ = ["Check", "bounds_of", "describe_failures", "passed_checks", "worst_values"]


class Check(NamedTuple):
    """A measure and its bound.

    Attributes:
        measure: what is measured, in words.
        bound: the largest value that passes, or the smallest.
        is_minimum: whether the bound is the smallest value that passes.
        failure: for a check that is true (1) or false (0), the words for false; its bound is a minimum of 1.
    """

    measure: str
    bound: float = 1.0
    is_minimum: bool = False
    failure: str = ""


def bounds_of(checks: Sequence[Check]) -> np.ndarray:
    """Return the bounds as an array: values that just pass."""
    return np.array([check.bound for check in checks])


def passed_checks(checks: Sequence[Check], values: Float[Array, "*B checks"]) -> Bool[Array, "*B checks"]:
    """Tell which values keep their bounds; nan never does."""
    bounds = jnp.asarray(bounds_of(checks), values.dtype)
    return jnp.where(_is_minimum(checks), values >= bounds, values <= bounds)


def worst_values(checks: Sequence[Check], values: Float[Array, "B checks"]) -> Float[Array, " checks"]:
    """Return the worst value of every check over a leading axis."""
    return jnp.where(_is_minimum(checks), jnp.min(values, axis=0), jnp.max(values, axis=0))


def describe_failures(checks: Sequence[Check], values: Float[Array, " checks"]) -> list[str]:
    """Name each failed check with its value and its bound; runs outside of `jit`."""
    host_values = np.asarray(values)
    bounds = bounds_of(checks).astype(host_values.dtype)  # as in `passed_checks`
    is_passed = np.where(_is_minimum(checks), host_values >= bounds, host_values <= bounds)
    return [_describe(*failed) for *failed, passed in zip(checks, host_values, is_passed, strict=True) if not passed]


def _describe(check: Check, value: float) -> str:
    if check.failure:
        return check.failure
    limit = "at least" if check.is_minimum else "at most"
    return f"{check.measure} is {value:.3g} and must be {limit} {check.bound:g}"


def _is_minimum(checks: Sequence[Check]) -> np.ndarray:
    return np.array([check.is_minimum or bool(check.failure) for check in checks])
