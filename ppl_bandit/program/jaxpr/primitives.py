"""The table of JAX primitives: everything the package knows about an operation, described once.

The abstract domains in this folder read this table. To support another primitive, add one row to `PRIMITIVES`. A primitive
without a row is treated conservatively: its results may depend on every operand in any way.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_bandit.runtime.jax_adapter import apply_primitive

__all__ = [
    "PRIMITIVES",
    "AnalyticWhere",
    "Kind",
    "Primitive",
    "apply_per_column",
    "describe",
    "index_operands",
    "starts",
]


class Kind(enum.Enum):
    """How the results of a primitive depend on its operands."""

    CALL = "applies a jaxpr to its own operands"
    IDENTITY = "returns its operands"
    MOVE = "each element of the result is an element of an operand"
    CHOICE = "each element of the result is the element of one operand at the same position"
    LINEAR = "elementwise and linear"
    COMPARISON = "elementwise comparison"
    ELEMENTWISE = "elementwise, anything else"
    SUM = "each element of the result is a sum of elements of the operands"
    REDUCTION = "reduces along the parameter `axes`"
    CUMULATIVE = "reduces cumulatively along the parameter `axis`"
    OTHER = "none of these"


class AnalyticWhere(enum.Enum):
    """Where an elementwise function of one operand is real-analytic, also in floating point."""

    EVERYWHERE = "at every real number"
    POSITIVE = "at positive numbers"
    ABOVE_MINUS_ONE = "at numbers above -1"
    MODERATE = "at numbers whose exponential neither underflows nor overflows"


class Primitive(NamedTuple):
    """Description of a primitive.

    Attributes:
        kind: how results depend on operands.
        indices: the operands that hold positions or conditions, as a slice of the operands.
        numpy: for elementwise primitives, (params, *arrays) -> array; None if there is no simple equivalent.
        move: for primitives that move elements, (eqn, arrays) -> arrays in NumPy, where each array has one more trailing axis
            than the operand; None if there is no simple equivalent.
        analytic_where: for elementwise functions of one operand; None if a rule of its own decides.
        increasing: the function itself, if it is increasing.
        refusal: the reason to give if analyticity is lost at this primitive.
        remedy: what a user can write instead; "" if unknown.
    """

    kind: Kind
    indices: slice = slice(0, 0)
    numpy: Callable | None = None
    move: Callable[[Any, Sequence[np.ndarray]], list[np.ndarray]] | None = None
    analytic_where: AnalyticWhere | None = None
    increasing: Callable[[Array], Array] | None = None
    refusal: str = ""
    remedy: str = ""


def describe(eqn: Any) -> Primitive:
    """Return the description of the primitive of an equation."""
    name = eqn.primitive.name
    found = PRIMITIVES.get(name, _UNLISTED)
    return found if found.refusal else found._replace(refusal=f"`{name}` is not known to be analytic")


def index_operands(eqn: Any) -> tuple[int, ...]:
    """Return the operands of an equation that hold positions or conditions, as numbers."""
    return tuple(range(len(eqn.invars)))[describe(eqn).indices]


def starts(eqn: Any, values: Sequence[Any]) -> Iterator[tuple[Array, int]]:
    """Yield, for each axis that a `gather` or `dynamic_slice` indexes, the first positions and the last valid one."""
    if eqn.primitive.name == "gather":
        axes = eqn.params["dimension_numbers"].start_index_map
        along = [(axis, values[1][..., number]) for number, axis in enumerate(axes)]
    else:
        along = list(enumerate(values[1:]))
    for axis, first in along:
        yield first, eqn.invars[0].aval.shape[axis] - eqn.params["slice_sizes"][axis]


def apply_per_column(eqn: Any, arrays: Sequence[Any]) -> list[Array]:
    """Apply a primitive to every entry of the trailing axis of its operands; operands that are indices have no such axis."""
    fixed = index_operands(eqn)
    axes = tuple(None if number in fixed else -1 for number in range(len(arrays)))
    return jax.vmap(lambda *operands: apply_primitive(eqn, operands), in_axes=axes, out_axes=-1)(*arrays)


def _broadcast_in_dim(eqn: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    shape = (*eqn.outvars[0].aval.shape, arrays[0].shape[-1])
    sizes = [1] * (len(shape) - 1)
    for axis, target in enumerate(eqn.params["broadcast_dimensions"]):
        sizes[target] = arrays[0].shape[axis]
    return [np.broadcast_to(arrays[0].reshape(*sizes, shape[-1]), shape)]


def _reshape(eqn: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [arrays[0].reshape(*eqn.outvars[0].aval.shape, arrays[0].shape[-1])]


def _slice(eqn: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    start, limit, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    return [arrays[0][tuple(map(slice, start, limit, strides or (1,) * len(start)))]]


def _ufunc(function: Callable) -> Callable:
    return lambda params, *arrays: function(*arrays)


def _divide(params: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.divide(x, y) if np.issubdtype(np.result_type(x), np.floating) else np.trunc(np.divide(x, y))


def _iota(params: Any) -> np.ndarray:
    along = np.arange(params["shape"][params["dimension"]])
    return np.broadcast_to(along.reshape(-1, *[1] * (len(params["shape"]) - params["dimension"] - 1)), params["shape"])


def _saturates(function: str) -> str:
    return f"{function} of an unbounded quantity that depends on latents, which floating point flattens far out"


def _rows(kind: Kind, names: str, **fields: Any) -> dict[str, Primitive]:
    return {name: Primitive(kind, **fields) for name in names.split()}


_UNLISTED = Primitive(Kind.OTHER)
_ROOT = "the square root of a quantity that may be zero or negative"
_COMPARED = "a comparison with a latent"
_UNROLL = "write a Python loop over a fixed number of turns, which the proof reads turn by turn, or a matrix product"

PRIMITIVES: dict[str, Primitive] = {
    **_rows(
        Kind.CALL,
        "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat "
        "remat2 composite",
    ),
    **_rows(Kind.IDENTITY, "copy copy_p device_put optimization_barrier"),
    # Elements move.
    "broadcast_in_dim": Primitive(Kind.MOVE, move=_broadcast_in_dim),
    "concatenate": Primitive(Kind.MOVE, move=lambda eqn, xs: [np.concatenate(xs, axis=eqn.params["dimension"])]),
    **_rows(Kind.MOVE, "expand_dims reshape squeeze", move=_reshape),
    "rev": Primitive(Kind.MOVE, move=lambda eqn, xs: [np.flip(xs[0], eqn.params["dimensions"])]),
    "slice": Primitive(Kind.MOVE, move=_slice),
    "split": Primitive(
        Kind.MOVE,
        move=lambda eqn, xs: np.split(xs[0], np.cumsum(eqn.params["sizes"])[:-1], axis=eqn.params["axis"]),
    ),
    "stack": Primitive(Kind.MOVE, move=lambda eqn, xs: [np.stack(xs, axis=eqn.params["axis"])]),
    "tile": Primitive(Kind.MOVE, move=lambda eqn, xs: [np.tile(xs[0], (*eqn.params["reps"], 1))]),
    "transpose": Primitive(
        Kind.MOVE, move=lambda eqn, xs: [xs[0].transpose(*eqn.params["permutation"], xs[0].ndim - 1)]
    ),
    "unstack": Primitive(Kind.MOVE, move=lambda eqn, xs: list(np.moveaxis(xs[0], eqn.params["axis"], 0))),
    "pad": Primitive(Kind.MOVE),
    "iota": Primitive(Kind.OTHER, numpy=_iota),
    "gather": Primitive(Kind.MOVE, indices=slice(1, None), refusal="indexing at a position that depends on a latent"),
    "dynamic_slice": Primitive(
        Kind.MOVE, indices=slice(1, None), refusal="`dynamic_slice` at a position that depends on a latent"
    ),
    "dynamic_update_slice": Primitive(
        Kind.MOVE, indices=slice(2, None), refusal="`dynamic_update_slice` at a position that depends on a latent"
    ),
    "scatter": Primitive(Kind.MOVE, indices=slice(1, 2), refusal="`scatter` at a position that depends on a latent"),
    "select_n": Primitive(Kind.CHOICE, indices=slice(0, 1), refusal="a choice (`where`) made by a latent"),
    # Sums.
    "reduce_sum": Primitive(Kind.SUM),
    "cumsum": Primitive(Kind.SUM),
    "scatter-add": Primitive(Kind.SUM, indices=slice(1, 2), refusal="an index that depends on a latent"),
    "add": Primitive(Kind.LINEAR, numpy=_ufunc(np.add)),
    "add_any": Primitive(Kind.LINEAR, numpy=_ufunc(np.add)),
    "sub": Primitive(Kind.LINEAR, numpy=_ufunc(np.subtract)),
    "neg": Primitive(Kind.LINEAR, numpy=_ufunc(np.negative)),
    # Comparisons and logic.
    "lt": Primitive(Kind.COMPARISON, numpy=_ufunc(np.less), refusal=_COMPARED),
    "le": Primitive(Kind.COMPARISON, numpy=_ufunc(np.less_equal), refusal=_COMPARED),
    "gt": Primitive(Kind.COMPARISON, numpy=_ufunc(np.greater), refusal=_COMPARED),
    "ge": Primitive(Kind.COMPARISON, numpy=_ufunc(np.greater_equal), refusal=_COMPARED),
    "eq": Primitive(Kind.COMPARISON, numpy=_ufunc(np.equal), refusal=_COMPARED),
    "ne": Primitive(Kind.COMPARISON, numpy=_ufunc(np.not_equal), refusal=_COMPARED),
    "and": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.bitwise_and), refusal=_COMPARED),
    "or": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.bitwise_or), refusal=_COMPARED),
    "xor": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.bitwise_xor)),
    "not": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.invert), refusal=_COMPARED),
    "reduce_and": Primitive(Kind.REDUCTION, refusal=_COMPARED),
    "reduce_or": Primitive(Kind.REDUCTION, refusal=_COMPARED),
    "is_finite": Primitive(
        Kind.ELEMENTWISE, numpy=_ufunc(np.isfinite), refusal="a test whether a latent's image is finite"
    ),
    # Arithmetic.
    "mul": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.multiply)),
    "div": Primitive(
        Kind.ELEMENTWISE,
        numpy=_divide,
        refusal="division by a quantity that depends on latents and may be zero",
    ),
    "rem": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.fmod)),
    "integer_pow": Primitive(Kind.ELEMENTWISE, numpy=lambda params, x: np.asarray(x, float) ** params["y"]),
    "pow": Primitive(
        Kind.ELEMENTWISE,
        refusal="a real power of a quantity that may be zero or negative, or a power that can overflow",
    ),
    "square": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.square)),
    "abs": Primitive(
        Kind.ELEMENTWISE,
        numpy=_ufunc(np.abs),
        refusal="`abs` of a quantity that depends on latents has a kink",
    ),
    "max": Primitive(
        Kind.ELEMENTWISE, numpy=_ufunc(np.maximum), refusal="a maximum with a quantity that depends on latents"
    ),
    "min": Primitive(
        Kind.ELEMENTWISE, numpy=_ufunc(np.minimum), refusal="a minimum with a quantity that depends on latents"
    ),
    "clamp": Primitive(
        Kind.ELEMENTWISE,
        numpy=lambda params, low, x, high: np.minimum(np.maximum(x, low), high),
        refusal="a clip of a quantity that depends on latents",
    ),
    "convert_element_type": Primitive(Kind.ELEMENTWISE, numpy=lambda params, x: x),
    "reduce_prod": Primitive(Kind.REDUCTION),
    "cumprod": Primitive(Kind.CUMULATIVE),
    # Analytic functions of one number.
    **{
        name: Primitive(
            Kind.ELEMENTWISE,
            numpy=_ufunc(getattr(np, name)) if hasattr(np, name) else None,
            analytic_where=where,
            increasing=increasing,
            refusal=refusal,
        )
        for name, where, increasing, refusal in (
            ("exp", AnalyticWhere.MODERATE, jnp.exp, _saturates("an exponential")),
            ("exp2", AnalyticWhere.MODERATE, jnp.exp2, _saturates("an exponential")),
            ("expm1", AnalyticWhere.MODERATE, jnp.expm1, _saturates("an exponential")),
            ("tanh", AnalyticWhere.MODERATE, jnp.tanh, _saturates("`tanh`")),
            ("sinh", AnalyticWhere.MODERATE, jnp.sinh, _saturates("`sinh`")),
            ("logistic", AnalyticWhere.MODERATE, lambda x: 1.0 / (1.0 + jnp.exp(-x)), _saturates("a sigmoid")),
            ("erf", AnalyticWhere.MODERATE, None, _saturates("`erf`")),
            ("erfc", AnalyticWhere.MODERATE, None, _saturates("`erfc`")),
            ("cosh", AnalyticWhere.MODERATE, None, _saturates("`cosh`")),
            ("sin", AnalyticWhere.EVERYWHERE, None, ""),
            ("cos", AnalyticWhere.EVERYWHERE, None, ""),
            ("log", AnalyticWhere.POSITIVE, jnp.log, "the logarithm of a quantity that may be zero or negative"),
            ("log1p", AnalyticWhere.ABOVE_MINUS_ONE, jnp.log1p, "log1p of a quantity that may be -1 or less"),
            ("sqrt", AnalyticWhere.POSITIVE, jnp.sqrt, _ROOT),
            ("lgamma", AnalyticWhere.POSITIVE, None, "lgamma of a quantity that may be zero or negative"),
            ("digamma", AnalyticWhere.POSITIVE, None, "digamma of a quantity that may be zero or negative"),
        )
    },
    "rsqrt": Primitive(Kind.ELEMENTWISE, refusal=_ROOT),
    # Linear algebra.
    **_rows(Kind.OTHER, "dot_general cholesky"),
    "triangular_solve": Primitive(Kind.OTHER, refusal="a triangular solve whose diagonal may be zero"),
    # Nowhere analytic, or not proved to be.
    **_rows(
        Kind.ELEMENTWISE,
        "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt erf_inv igamma igammac nextafter polygamma "
        "reduce_precision regularized_incomplete_beta tan zeta",
    ),
    "floor": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.floor), refusal="rounding of a latent"),
    "ceil": Primitive(Kind.ELEMENTWISE, numpy=_ufunc(np.ceil), refusal="rounding of a latent"),
    "round": Primitive(Kind.ELEMENTWISE, refusal="rounding of a latent"),
    "sign": Primitive(
        Kind.ELEMENTWISE, numpy=_ufunc(np.sign), refusal="the sign of a quantity that depends on latents"
    ),
    "stop_gradient": Primitive(
        Kind.ELEMENTWISE, refusal="`stop_gradient` hides how the likelihood depends on a latent"
    ),
    "reduce_max": Primitive(Kind.REDUCTION, refusal="the largest of quantities that depend on latents"),
    "reduce_min": Primitive(Kind.REDUCTION, refusal="the smallest of quantities that depend on latents"),
    "reduce_xor": Primitive(Kind.REDUCTION),
    "argmax": Primitive(Kind.REDUCTION, refusal="a choice (`argmax`) made by latents"),
    "argmin": Primitive(Kind.REDUCTION, refusal="a choice (`argmin`) made by latents"),
    **_rows(Kind.CUMULATIVE, "cummax cummin cumlogsumexp"),
    "sort": Primitive(Kind.OTHER, refusal="sorting by a latent"),
    "cond": Primitive(Kind.OTHER, refusal="a branch taken by a latent"),
    "while": Primitive(Kind.OTHER, refusal="a loop that latents enter", remedy=_UNROLL),
    "scan": Primitive(Kind.OTHER, refusal="a `scan` that latents enter", remedy=_UNROLL),
}
