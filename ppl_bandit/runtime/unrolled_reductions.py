"""Sums, the largest and the like of a few numbers, such as one per arm, written out.

Whatever combines two numbers in a loop of XLA's own gets memory of its own each time that a program runs on a CPU, a third of
a microsecond for every operation: to find the largest of three arms by `argmax` took longer than a thousand additions. And
such a loop stands between operations that would otherwise become one. Of a batch (`vmap`) it is the other way round: parts of
an array that are read one by one are computed again for each.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.runtime.jax_adapter import vmap_rule

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
    """Return the sum along an axis, which counts from the first, written out of a batch as well."""
    if not 0 < terms.shape[axis] <= FEW:
        return jnp.sum(terms, axis=axis)
    return functools.reduce(operator.add, cut(terms, axis))


def cut(terms: Array, axis: int) -> list[Array]:
    """Return the parts of an array along an axis, which counts from the first."""
    at = (slice(None),) * axis
    return [terms[(*at, i)] for i in range(terms.shape[axis])]


def _unless_batched(whole: Callable) -> Callable[[Callable], Callable[[Array], Array]]:
    """Write a function of all numbers of an array out, given a row of them, unless there are many, or many such arrays.

    Args:
        whole: the same by jax, which takes an axis.
    """

    def decorate(written_out: Callable) -> Callable:
        @functools.wraps(written_out)
        def function(numbers: Array) -> Array:
            row = numbers.ravel()
            return either(row) if 0 < row.size <= FEW else whole(row, axis=-1)

        def of_many(size: int, is_batched: Any, rows: Array) -> tuple[Array, bool]:
            del size, is_batched
            return whole(rows, axis=-1), True

        either = vmap_rule(of_many)(written_out)

        return function

    return decorate


@_unless_batched(jnp.sum)
def sum_of(row: Array) -> Array:
    """Return the sum of numbers, or how many are true."""
    return functools.reduce(operator.add, cut(row.astype(int) if row.dtype == bool else row, 0))


@_unless_batched(jnp.max)
def max_of(row: Array) -> Array:
    """Return the largest; nan where one is."""
    return functools.reduce(jnp.maximum, cut(row, 0))


@_unless_batched(jnp.any)
def is_any(row: Bool[Array, " n"]) -> Bool[Array, ""]:
    """Tell whether any is true."""
    return functools.reduce(operator.or_, cut(row, 0))


@_unless_batched(jnp.all)
def is_all(row: Bool[Array, " n"]) -> Bool[Array, ""]:
    """Tell whether all are true."""
    return functools.reduce(operator.and_, cut(row, 0))


@_unless_batched(jnp.argmax)
def argmax_of(row: Array) -> Int[Array, ""]:
    """Return the index of the largest, the first of several; of the first nan where there is one."""
    largest, *rest = cut(row, 0)
    index = jnp.zeros((), int)
    for i, value in enumerate(rest, 1):
        is_larger = ~largest & value if row.dtype == bool else ~(largest >= value) & (largest == largest)
        largest, index = jnp.where(is_larger, value, largest), jnp.where(is_larger, i, index)
    return index


@_unless_batched(jnp.cumsum)
def running_sums(row: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return the sums of the first 1, 2, ... numbers."""
    sums = [row[0]]
    for value in cut(row, 0)[1:]:
        sums.append(sums[-1] + value)
    return jnp.stack(sums)


@_unless_batched(logsumexp)
def log_sum_exp(row: Float[Array, " n"]) -> Float[Array, ""]:
    """Return the log of the sum of exponentials; -inf where all are."""
    largest = functools.reduce(jnp.maximum, cut(row, 0))
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return jnp.log(functools.reduce(operator.add, cut(jnp.exp(row - shift), 0))) + shift
