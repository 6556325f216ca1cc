"""How a traced program uses its arms: by their values, and not only by their name in an expression such as `0 * arm`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import DATA, Domain, fold_in_numpy, interpret, is_known
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr

_PRODUCTS = ("mul", "dot_general")


def tells_rows_apart(closed: ClosedJaxpr, args: Sequence[Any], number: int) -> bool:
    """Return whether a jaxpr computes anything else if the rows of an argument are moved by one.

    Args:
        args: arrays, and `DATA` for those that are not known.
        number: the argument, an array with a different number in each row.
    """

    def operands(argument: np.ndarray) -> list[Any]:
        """Return the known operands of what cannot be computed, and the known results."""
        found: list[Any] = []

        def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
            found.extend(filter(is_known, values))
            return [DATA] * len(eqn.outvars)

        def fold(eqn: Any, values: list[Any]) -> Sequence[Any]:
            results = fold_in_numpy(eqn, values)
            return results if all(map(is_known, results)) else apply(eqn, values, ())

        given = [*args[:number], argument, *args[number + 1 :]]
        with jax.ensure_compile_time_eval():
            results = interpret(Domain(apply, is_known, fold), closed.jaxpr, closed.consts, given)
        return found + [value for value in results if is_known(value)]

    own = np.asarray(args[number])
    pairs = zip(operands(own), operands(np.roll(own, 1)), strict=True)
    return not all(first is second or _is_equal(first, second) for first, second in pairs)


def reads_of_latents(closed: ClosedJaxpr, args: Sequence[Any]) -> list[bool]:
    """Return, for each output of a jaxpr, whether it depends on the latents; a product with known zeros does not.

    Args:
        args: an array for a known input, True for latents, and False for other inputs that are not known.
    """

    def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
        if eqn.primitive.name in _PRODUCTS and any(is_array(value) and not np.any(value) for value in values):
            return [np.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        return [any(value is True for value in values)] * len(eqn.outvars)

    def is_array(value: Any) -> bool:
        return not isinstance(value, bool)

    def fold(eqn: Any, values: list[Any]) -> list[Any]:
        return [value if is_known(value) else False for value in fold_in_numpy(eqn, values)]

    with jax.ensure_compile_time_eval():
        domain = Domain(apply, is_array, fold, np.asarray)
        return [value is True for value in interpret(domain, closed.jaxpr, closed.consts, args)]


def _is_equal(first: Any, second: Any) -> bool:
    is_key = jnp.issubdtype(getattr(first, "dtype", float), jax.dtypes.extended)  # random keys hold no arms
    return is_key or np.array_equal(np.asarray(first), np.asarray(second), equal_nan=True)
