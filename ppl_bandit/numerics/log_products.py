"""Products as a CPU likes them: with one logarithm for all, computed once."""

import functools
import math
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_bandit.runtime.devices import is_on_cpu
from ppl_bandit.runtime.unrolled_reductions import FEW, cut, sum_along

__all__ = ["computed_once", "log_product"]

_FEW_COLUMNS = 8
_HIGHEST = lax.Precision.HIGHEST  # accelerators round to 10 bits


def log_product(factors: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Return the logarithm of the product along an axis; nan where a factor is not a positive, normal and finite number.

    Mantissas, in [1, 2), are multiplied and exponents added: nothing overflows, and a logarithm costs as much as ten products.
    """
    info, whole = jnp.finfo(factors.dtype), jnp.int64 if factors.dtype == jnp.float64 else jnp.int32
    num = factors.shape[axis]
    if num >= info.maxexp:
        return jnp.sum(jnp.log(jnp.where(factors >= info.tiny, factors, jnp.nan)), axis=axis)
    bits = lax.bitcast_convert_type(factors, whole)
    one = lax.bitcast_convert_type(jnp.ones((), factors.dtype), whole)
    mantissas = lax.bitcast_convert_type((bits & ((1 << info.nmant) - 1)) | one, factors.dtype)
    exponents = sum_along(bits >> info.nmant, axis) - num * (info.maxexp - 1)
    if num <= FEW:
        folds = (operator.mul, mantissas), (jnp.minimum, factors), (jnp.maximum, factors)
        product, smallest, largest = (functools.reduce(fold, cut(parts, axis)) for fold, parts in folds)
    else:
        product, smallest, largest = (
            jnp.prod(mantissas, axis=axis),
            jnp.min(factors, axis=axis),
            jnp.max(factors, axis=axis),
        )
    found = jnp.log(product) + math.log(2.0) * exponents.astype(factors.dtype)
    return jnp.where((smallest >= info.tiny) & (largest < jnp.inf), found, jnp.nan)


def computed_once(values: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """Return values as they are, computed once: for a CPU, XLA would compute them again for every slice of them.

    No barrier is left when it decides that; it does not reach through a product of matrices.

    Args:
        values: finite, the first of them at most 2.
    """
    if not is_on_cpu():
        return values
    if values.shape[1] <= _FEW_COLUMNS:
        # A matrix that is known beforehand would be the same for all of a batch, which would be made one: in another shape
        # than that of the values, which are then computed one by one.
        unit = jnp.eye(values.shape[1], dtype=values.dtype) + (values[:1, :1] > 2.0)
        return jnp.matmul(values, unit, precision=_HIGHEST)
    # By a matrix of all columns it would take longer.
    flat = jnp.pad(values.ravel(), (0, -values.size % 4)).reshape(-1, 4)
    same = jnp.matmul(flat, jnp.eye(4, dtype=values.dtype), precision=_HIGHEST)
    return same.ravel()[: values.size].reshape(values.shape)
