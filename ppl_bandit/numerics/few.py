"""Sums, the largest and the like of a few numbers, such as one per arm, written out.

XLA's own loops over a last axis are not vectorised, and stand between operations that would otherwise become one. And whatever
combines two numbers there gets memory of its own each time that a program runs on a CPU, a third of a microsecond for every
operation: the largest of three arms, by XLA's `argmax`, took longer than a thousand additions.
"""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

__all__ = [
    "FEW",
    "argmax_of",
    "cut",
    "is_all",
    "is_any",
    "log_sum_exp",
    "max_of",
    "running_sums",
    "sum_along",
    "sum_of",
]

FEW = 16


def sum_along(terms: Array, axis: int) -> Array:
    """Return the sum along an axis, which counts from the first."""
    if not 0 < terms.shape[axis] <= FEW:
        return jnp.sum(terms, axis=axis)
    return functools.reduce(operator.add, cut(terms, axis))


def sum_of(values: Array) -> Array:
    """Return the sum of numbers, or how many are true, along the last axis."""
    return sum_along(values.astype(int) if values.dtype == bool else values, values.ndim - 1)


def max_of(values: Array) -> Array:
    """Return the largest along the last axis; nan where one is."""
    return _folded(jnp.maximum, jnp.max, values)


def is_any(values: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Tell whether any of all is true."""
    return _folded(operator.or_, jnp.any, values.ravel())


def is_all(values: Bool[Array, "..."]) -> Bool[Array, ""]:
    """Tell whether all are true."""
    return _folded(operator.and_, jnp.all, values.ravel())


def argmax_of(values: Array) -> Int[Array, "..."]:
    """Return the index of the largest along the last axis, the first of several; of the first nan where there is one."""
    if not 0 < values.shape[-1] <= FEW:
        return jnp.argmax(values, axis=-1)
    first, *rest = cut(values, values.ndim - 1)
    index = jnp.zeros(first.shape, int)
    for i, value in enumerate(rest, 1):
        is_larger = ~first & value if values.dtype == bool else ~(first >= value) & (first == first)
        first, index = jnp.where(is_larger, value, first), jnp.where(is_larger, i, index)
    return index


def running_sums(values: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return the sums of the first 1, 2, ... numbers."""
    if not 0 < values.size <= FEW:
        return jnp.cumsum(values)
    sums = [values[0]]
    for i in range(1, values.size):
        sums.append(sums[-1] + values[i])
    return jnp.stack(sums)


def log_sum_exp(values: Float[Array, " n"]) -> Float[Array, ""]:
    """Return the log of the sum of exponentials; -inf where all are."""
    if not 0 < values.size <= FEW:
        return logsumexp(values)
    largest = max_of(values)
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return jnp.log(sum_of(jnp.exp(values - shift))) + shift


def cut(terms: Array, axis: int) -> list[Array]:
    """Return the parts of an array along an axis, which counts from the first."""
    at = (slice(None),) * axis
    return [terms[(*at, i)] for i in range(terms.shape[axis])]


def _folded(fold: Callable, whole: Callable, values: Array) -> Array:
    if not 0 < values.shape[-1] <= FEW:
        return whole(values, axis=-1)
    return functools.reduce(fold, cut(values, values.ndim - 1))
