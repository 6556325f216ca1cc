"""Which latents each arm's expected reward reads, where it is plainly affine in them: followed along its jaxpr.

Decided for every context at once. What is known before the latents are, such as which entries the arms index, is computed in
one go; what is not plainly affine is given up.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ppl_bandit.engines.exact.families.families import Layout
from ppl_bandit.program.jaxpr.interpreter import evaluate
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import Jaxpr, apply_primitive, called_jaxpr

__all__ = ["NotAffine", "reads_of_rewards"]

_DATA = object()  # a value that depends on the context: known when a decision is made
_LOST = object()  # a value that depends on latents in another way
_MOVES = (
    "broadcast_in_dim concatenate copy cumsum dynamic_slice dynamic_update_slice expand_dims gather neg pad reduce_sum reshape "
    "rev scatter scatter-add select_n slice split squeeze stack tile transpose unstack"
).split()


class NotAffine(Exception):
    """The expected reward is not plainly affine in the latents."""


class _Affine(NamedTuple):
    """An array whose entries are affine in the latents, or reciprocals of one of them.

    Attributes:
        reads: (..., E), which elements each entry reads; computed, with all that is known beforehand, in one go.
        is_lost: whether it is not plainly affine after all.
        is_term: whether each entry is a multiple of elements, with nothing added.
        power: 1, or -1 for a multiple of the reciprocal of one element.
    """

    reads: Bool[Array, "... E"]
    is_lost: Bool[Array, ""]
    is_term: bool = True
    power: int = 1


def reads_of_rewards(model: RewardModel, layout: Layout) -> tuple[np.ndarray, int]:
    """Return which elements each arm's expected reward reads, (A, E), in the order of the layout's sites, and its power."""
    shapes = {site.name: jax.ShapeDtypeStruct(site.shape, jnp.result_type(float)) for site in layout.sites}

    def rewards(latents: dict[str, Array], context: Any) -> Array:
        return model.expected_rewards({name: value[None] for name, value in latents.items()}, context)[0]

    closed = jax.make_jaxpr(rewards)(shapes, model.context)
    num_elements = sum(site.size for site in layout.sites)
    start = dict(zip([s.name for s in layout.sites], np.cumsum([0] + [s.size for s in layout.sites]), strict=False))
    powers: list[int] = []

    def measure() -> tuple[Array, Array]:
        args: list[Any] = []
        for name in sorted(shapes):  # the order in which a dict is flattened
            shape = shapes[name].shape
            own = np.eye(num_elements, dtype=bool)[start[name] : start[name] + int(np.prod(shape, dtype=int))]
            args.append(_Affine(jnp.asarray(own.reshape(*shape, -1)), jnp.zeros((), bool)))
        args += [_DATA] * len(jax.tree.leaves(model.context))
        (out,) = _follow(closed.jaxpr, closed.consts, args)
        if not isinstance(out, _Affine):
            raise NotAffine
        powers.append(out.power)
        return out.reads, out.is_lost

    reads, is_lost = run_once(measure)
    if is_lost:
        raise NotAffine
    return reads, powers[0]


def _follow(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        inner = called_jaxpr(eqn)
        if inner is not None:
            return _follow(inner[0], inner[1], values)
        if any(isinstance(value, _Affine) for value in values) and not any(value is _LOST for value in values):
            with contextlib.suppress(NotAffine):
                return _step(eqn, values)
        if any(value is _LOST or isinstance(value, _Affine) for value in values):
            return [_LOST] * len(eqn.outvars)
        if any(value is _DATA for value in values) or eqn.effects:
            return [_DATA] * len(eqn.outvars)
        return apply_primitive(eqn, values)

    return evaluate(jaxpr, consts, args, step)


def _step(eqn: Any, values: list[Any]) -> list[_Affine]:
    if not eqn.outvars:
        return []
    name, affine = eqn.primitive.name, [value for value in values if isinstance(value, _Affine)]
    first = affine[0]
    if any(value.power != first.power for value in affine):
        raise NotAffine
    shape = (*eqn.outvars[0].aval.shape, first.reads.shape[-1])
    if name in ("add", "sub", "add_any"):
        reads = jnp.zeros(shape, bool)
        for value in affine:
            reads |= value.reads
        return [_checked(affine, reads, len(affine) == 2 and all(value.is_term for value in affine))]
    if name in ("mul", "div") and len(affine) == 1:
        factor = next(value for value in values if not isinstance(value, _Affine))
        is_read = True if factor is _DATA or name == "div" else (jnp.asarray(factor) != 0)[..., None]
        spread = first._replace(reads=jnp.broadcast_to(first.reads, shape) & is_read)
        return [spread if name == "mul" or isinstance(values[0], _Affine) else _inverse(spread)]
    if name == "integer_pow" and eqn.params["y"] in (1, -1):
        return [first if eqn.params["y"] == 1 else _inverse(first)]
    if name == "convert_element_type" and np.dtype(eqn.params["new_dtype"]).kind == "f":
        return [first]
    if name == "dot_general" and len(affine) == 1:
        return _apply(eqn, [v if v is _DATA or isinstance(v, _Affine) else jnp.abs(v) for v in values], fill=1.0)
    fixed = {
        "gather": (1,),
        "scatter": (1,),
        "scatter-add": (1,),
        "dynamic_slice": range(1, len(values)),
        "dynamic_update_slice": range(2, len(values)),
        "select_n": (0,),
    }.get(name, ())
    if name not in _MOVES or any(values[i] is _DATA or isinstance(values[i], _Affine) for i in fixed):
        raise NotAffine
    return _apply(eqn, values, fill=0.0, fixed=tuple(fixed))


def _apply(eqn: Any, values: list[Any], fill: float, fixed: Sequence[int] = ()) -> list[_Affine]:
    """Send the elements that are read through a linear operation; what is not a latent is filled.

    In a product what is known is taken at its size: a 0 reads nothing.
    """
    affine = [value for value in values if isinstance(value, _Affine)]

    def through(columns: Sequence[Array]) -> list[Array]:
        left = iter(columns)
        operands = []
        for i, (atom, value) in enumerate(zip(eqn.invars, values, strict=True)):
            if isinstance(value, _Affine):
                operands.append(next(left))
            else:
                is_kept = i in fixed or (fill == 1.0 and value is not _DATA)
                operands.append(value if is_kept else jnp.full(atom.aval.shape, fill))
        return apply_primitive(eqn, operands)

    columns = [value.reads.astype(float) for value in affine]
    found = jax.vmap(through, in_axes=-1, out_axes=-1)(columns)
    # A constant that takes part, in a concatenation or a choice, is something added.
    is_term = all(value.is_term for value in affine) and (fill == 1.0 or len(affine) == len(values) - len(fixed))
    return [_checked(affine, reads != 0, is_term) for reads in found]


def _inverse(value: _Affine) -> _Affine:
    if not value.is_term or value.power != 1:
        raise NotAffine
    return value._replace(power=-1, is_lost=value.is_lost | _reads_several(value.reads))


def _checked(affine: list[_Affine], reads: Bool[Array, "... E"], is_term: bool) -> _Affine:
    """Return what was made of affine parts; sums of reciprocals, and a reciprocal with something added, are not followed."""
    power, is_lost = affine[0].power, functools.reduce(jnp.logical_or, [value.is_lost for value in affine])
    if power == -1:
        if not is_term:
            raise NotAffine
        is_lost |= _reads_several(reads)
    return _Affine(reads, is_lost, is_term, power)


def _reads_several(reads: Bool[Array, "... E"]) -> Bool[Array, ""]:
    return jnp.any(jnp.sum(reads, axis=-1) > 1)
