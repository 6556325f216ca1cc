"""Small numerical helpers that the families share."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

__all__ = ["misfit", "round_to_halves"]

_SCREENING_TOLERANCE = 1e-6  # of the range of a log density: screening must not reject what rounding explains


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
