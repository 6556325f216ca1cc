"""The domain of affine functions: which entries of the latents an affine result reads.

Built on element-level dependence (`entry_reads`), restricted to operations that keep a quantity affine in the latents, or make
it a multiple of the reciprocal of one latent. Decided for all data at once; anything else is reported as not affine.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.program.jaxpr.entry_reads import DATA, Reads, fold_in_numpy, reads_of_results
from ppl_bandit.program.jaxpr.interpreter import Domain, interpret
from ppl_bandit.program.jaxpr.primitives import Kind, describe_primitive, index_operands
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr

__all__ = ["Affine", "affine_reads"]

_NOT_AFFINE = object()  # a value that depends on latents in another way
_LINEAR = (Kind.LINEAR, Kind.IDENTITY, Kind.MOVE, Kind.CHOICE, Kind.SUM)


class Affine(NamedTuple):
    """An array whose entries are affine in the latents, or multiples of the reciprocal of one latent.

    Attributes:
        reads: (..., E), which of the E latent elements each entry depends on.
        is_term: whether each entry is a multiple of elements, without a constant added.
        power: 1, or -1 for a multiple of a reciprocal.
    """

    reads: np.ndarray
    is_term: bool = True
    power: int = 1


def affine_reads(closed: ClosedJaxpr, latents: Sequence[np.ndarray]) -> Affine | None:
    """Return the one output of a jaxpr as an affine function of its first inputs; None if it is not proved to be one.

    Args:
        latents: for each input that is a latent, (..., E): which of the E elements each entry is. The other inputs are data.
    """
    args = [*map(Affine, latents), *[DATA] * (len(closed.jaxpr.invars) - len(latents))]
    with jax.ensure_compile_time_eval():
        (out,) = interpret(Domain(_apply, _is_constant, fold_in_numpy), closed.jaxpr, closed.consts, args)
    return out if isinstance(out, Affine) else None


def _is_constant(value: Any) -> bool:
    return value is not DATA and value is not _NOT_AFFINE and not isinstance(value, Affine)


def _apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> Sequence[Any]:
    affine = [value for value in values if isinstance(value, Affine)]
    if not affine and not any(value is _NOT_AFFINE for value in values):
        return [DATA] * len(eqn.outvars)
    is_known = not any(value is _NOT_AFFINE for value in values) and len({value.power for value in affine}) == 1
    found = _linear(eqn, values, affine) if is_known else None
    return [_NOT_AFFINE] * len(eqn.outvars) if found is None else found


def _linear(eqn: Any, values: list[Any], affine: list[Affine]) -> list[Affine] | None:
    name, kind = eqn.primitive.name, describe_primitive(eqn).kind
    fixed = index_operands(eqn)
    power = affine[0].power
    is_term = all(value.is_term for value in affine)
    if name in ("mul", "div", "dot_general"):  # one factor is affine, the others are data or constants
        if len(affine) != 1:
            return None
        if name == "div" and not isinstance(values[0], Affine):
            power = -power
    elif name == "integer_pow" and eqn.params["y"] in (1, -1):
        power *= eqn.params["y"]
    elif name == "convert_element_type" and np.dtype(eqn.params["new_dtype"]).kind == "f":
        pass
    elif kind in _LINEAR and all(_is_constant(values[i]) for i in fixed):
        is_term &= len(affine) == len(values) - len(fixed)  # any other operand is a constant that is added
    else:
        return None
    found = reads_of_results(eqn, [Reads(v.reads) if isinstance(v, Affine) else v for v in values])
    if found is None:
        return None
    is_single = all(np.sum(reads, axis=-1).max(initial=0) <= 1 for reads in found)
    if -1 in (power, affine[0].power) and not (
        is_term and is_single
    ):  # the reciprocal of a sum, or a sum of reciprocals
        return None
    return [Affine(reads, is_term, power) for reads in found]
