"""The degree of a quantity as a polynomial of the real latents.

The log density of a Gaussian family is a polynomial of degree 2 in its latents. A polynomial of low degree that vanishes at the
points of a certificate vanishes everywhere. Another analytic function may differ from 0 by less than the last digit at all of
these points and have a bump in between: a ratio, an exponential, a high power. So such a function of a real latent is not
proved to belong to the family, unless no result depends on it.

Ratios and powers of the other latents are part of their families, but not high powers of sums: 1 / (1 + ((z - 3.7) / 0.01)^14)
is such a bump. For these latents the power to which a sum, or a function, is raised is counted.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.primitives import Kind, describe_primitive
from ppl_bandit.runtime.jax_adapter import is_tracer

__all__ = ["MAX_DEGREE", "highest_degree", "result_degree", "result_power"]

MAX_DEGREE = 4  # (y - m^2)^2 has 4; the certificates have many more points
_NOT_POLYNOMIAL = 1 << 20
_KEEPS_DEGREE = (Kind.IDENTITY, Kind.MOVE, Kind.LINEAR, Kind.SUM)
_DECIDED = {"and", "or", "not", "xor", "reduce_and", "reduce_or", "is_finite", "sign"}
# These are analytic only where bounds decide which operand is meant; then the result is that operand, or its negative.
_PICKS = {"abs", "max", "min", "clamp", "reduce_max", "reduce_min", "convert_element_type", "stop_gradient"}

_PRODUCTS = {"mul", "div", "neg", "sqrt", "rsqrt", "cbrt", "pow", "reduce_prod", "cumprod"}  # keep products of powers


def highest_degree(degrees: Sequence[Any]) -> Any:
    """Return the highest of degrees, which are integers or traced integers."""
    highest: Any = max((degree for degree in degrees if isinstance(degree, int)), default=0)
    for degree in degrees:
        highest = highest if isinstance(degree, int) else jnp.maximum(highest, degree)
    return highest


def result_degree(eqn: Any, values: Sequence[Any], degrees: Sequence[Any]) -> Any:
    """Return the degree of the results of an equation: an integer, or a traced one where data choose between degrees.

    Args:
        values: of the operands; arrays where no latent reaches them.
        degrees: of the operands; 0 where no real latent reaches them.
    """
    if all(isinstance(degree, int) and degree == 0 for degree in degrees):
        return 0
    name, kind = eqn.primitive.name, describe_primitive(eqn).kind
    if kind is Kind.COMPARISON or name in _DECIDED:  # decided by bounds, or refused for another reason
        return 0
    if name == "select_n":
        return _degree_of_choice(values[0], degrees[1:])
    if kind in _KEEPS_DEGREE or name in _PICKS:
        return highest_degree(degrees)
    if name in ("mul", "dot_general"):
        return _degree_of_product(values, _capped(degrees[0] + degrees[1]))
    if name == "square":
        return _capped(2 * degrees[0])
    if name == "integer_pow" and eqn.params["y"] >= 0:
        return _capped(eqn.params["y"] * degrees[0])
    if name == "pow" and _is_small_integer(values[1]):
        return _capped(int(np.max(values[1])) * degrees[0])
    divisor = {"div": 1, "triangular_solve": 0}.get(name)
    if divisor is not None:
        return _polynomial_if_zero(degrees[divisor], degrees[1 - divisor])
    return _polynomial_if_zero(highest_degree(degrees), 0)


def result_power(eqn: Any, values: Sequence[Any], powers: Sequence[int]) -> int:
    """Return the highest power of a sum, or of a function, of latents in the results of an equation.

    Args:
        values: of the operands; arrays where no latent reaches them.
        powers: of the operands; 0 for a product of powers of latents, -1 where no latent that counts reaches them.
    """
    highest = max(powers, default=-1)
    if highest < 0:
        return -1
    name, kind = eqn.primitive.name, describe_primitive(eqn).kind
    if name == "square" or (name == "mul" and eqn.invars[0] is eqn.invars[1]):
        return min(2 * highest, _NOT_POLYNOMIAL)
    if name == "integer_pow":
        return min(abs(eqn.params["y"]) * highest, _NOT_POLYNOMIAL)
    if name == "pow" and hasattr(values[1], "dtype") and not is_tracer(values[1]):
        return min(math.ceil(np.max(np.abs(values[1]), initial=0.0)) * highest, _NOT_POLYNOMIAL)
    is_product = name in _PRODUCTS or name in _PICKS or kind in (Kind.IDENTITY, Kind.MOVE, Kind.CHOICE)
    return highest if is_product else max(highest, 1)


def _degree_of_choice(which: Any, degrees: Sequence[Any]) -> Any:
    """Return the highest degree of the cases that data choose somewhere."""
    if all(isinstance(degree, int) and degree <= MAX_DEGREE for degree in degrees) or not hasattr(which, "dtype"):
        return highest_degree(degrees)
    chosen = [jnp.where(jnp.any(which == number), degree, 0) for number, degree in enumerate(degrees)]
    return highest_degree(chosen)


def _degree_of_product(values: Sequence[Any], degree: Any) -> Any:
    """Return the degree of a product: 0 where data are the factor 0, which may switch a term off."""
    factors = [value for value in values if hasattr(value, "dtype")]
    if not factors or (isinstance(degree, int) and degree <= MAX_DEGREE):
        return degree
    return jnp.where(jnp.all(factors[0] == 0), 0, degree)


def _is_small_integer(exponent: Any) -> bool:
    if is_tracer(exponent) or not hasattr(exponent, "dtype"):
        return False
    numbers = np.asarray(exponent)
    return bool(np.all((numbers >= 0) & (numbers <= MAX_DEGREE) & (numbers == np.round(numbers))))


def _polynomial_if_zero(degree: Any, otherwise: Any) -> Any:
    if isinstance(degree, int):
        return otherwise if degree == 0 else _NOT_POLYNOMIAL
    return jnp.where(degree == 0, otherwise, _NOT_POLYNOMIAL)


def _capped(degree: Any) -> Any:
    return min(degree, _NOT_POLYNOMIAL) if isinstance(degree, int) else jnp.minimum(degree, _NOT_POLYNOMIAL)
