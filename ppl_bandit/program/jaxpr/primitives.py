"""The table of JAX primitives: everything the package knows about an operation, described once.

The abstract domains in this folder read this table. To support another primitive, add one row to `PRIMITIVES`. A primitive
without a row is treated conservatively: its results may depend on every operand in any way.
"""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from ppl_bandit.runtime.jax_adapter import apply_primitive


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


MODERATE = 700.0  # the exponential of a number below this neither underflows nor overflows


class Primitive(NamedTuple):
    """Description of a primitive.

    Attributes:
        kind: how results depend on operands.
        indices: the operands that hold positions or conditions, as a slice of the operands.
        numpy: for elementwise primitives, (params, *arrays) -> array; None if there is no simple equivalent.
        move: for primitives that move elements, (eqn, arrays) -> arrays in NumPy, where each array has one more trailing axis
            than the operand; None if there is no simple equivalent.
        analytic: for elementwise functions of one operand, the open interval inside which it is real-analytic, also in floating
            point: (-inf, inf) at every number, (-700, 700) if it flattens further out; None if a rule of its own decides.
        increasing: the function itself, if it is increasing.
        refusal: the reason to give if analyticity is lost at this primitive.
        remedy: what a user can write instead; "" if unknown.
    """

    kind: Kind
    indices: slice = slice(0, 0)
    numpy: Callable | None = None
    move: Callable[[Any, Sequence[np.ndarray]], list[np.ndarray]] | None = None
    analytic: tuple[float, float] | None = None
    increasing: Callable[[float], float] | None = None
    refusal: str = ""
    remedy: str = ""


def describe_primitive(eqn: Any) -> Primitive:
    """Return the description of the primitive of an equation."""
    name = eqn.primitive.name
    found = PRIMITIVES.get(name, _UNLISTED)
    return found if found.refusal else found._replace(refusal=f"`{name}` is not known to be analytic")


def index_operands(eqn: Any) -> tuple[int, ...]:
    """Return the operands of an equation that hold positions or conditions, as numbers."""
    return tuple(range(len(eqn.invars)))[describe_primitive(eqn).indices]


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


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.divide(x, y) if np.issubdtype(np.result_type(x), np.floating) else np.trunc(np.divide(x, y))


def _round(params: Any, x: np.ndarray) -> np.ndarray:
    is_even = params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return np.round(x) if is_even else np.trunc(x + np.copysign(0.5, x))


def _iota(params: Any) -> np.ndarray:
    along = np.arange(params["shape"][params["dimension"]])
    return np.broadcast_to(along.reshape(-1, *[1] * (len(params["shape"]) - params["dimension"] - 1)), params["shape"])


def _rows(kind: Kind, names: str, **fields: Any) -> dict[str, Primitive]:
    return {name: Primitive(kind, **fields) for name in names.split()}


def _move(function: Callable[[Any, Sequence[np.ndarray]], list[np.ndarray]]) -> Primitive:
    return Primitive(Kind.MOVE, move=lambda eqn, arrays: function(eqn.params, arrays))


def _index(name: str, operands: slice, reason: str = "") -> dict[str, Primitive]:
    reason = reason or f"`{name}` at a position that depends on a latent"
    return {name: Primitive(Kind.MOVE, indices=operands, refusal=reason)}


def _elementwise(function: Callable | None, refusal: str = "", kind: Kind = Kind.ELEMENTWISE) -> Primitive:
    return Primitive(kind, numpy=function and (lambda params, *arrays: function(*arrays)), refusal=refusal)


def _comparison(function: Callable) -> Primitive:
    return _elementwise(function, _COMPARED, Kind.COMPARISON)


def _function(above: float, function: Callable | None, increasing: Callable | None, refusal: str) -> Primitive:
    return _elementwise(function, refusal)._replace(analytic=(above, math.inf), increasing=increasing)


def _saturating(name: str, function: Callable | None, increasing: Callable | None = None) -> Primitive:
    refusal = f"{name} of an unbounded quantity that depends on latents, which floating point flattens far out"
    return _function(-MODERATE, function, increasing, refusal)._replace(analytic=(-MODERATE, MODERATE))


_UNLISTED = Primitive(Kind.OTHER)
_ROOT = "the square root of a quantity that may be zero or negative"
_COMPARED = "a comparison with a latent"
_UNROLL = "write a Python loop over a fixed number of turns, which the proof reads turn by turn, or a matrix product"

PRIMITIVES: dict[str, Primitive] = {
    **_rows(Kind.CALL, "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"),
    **_rows(Kind.CALL, "checkpoint remat remat2 composite"),
    **_rows(Kind.IDENTITY, "copy copy_p device_put optimization_barrier"),
    # Elements move.
    "broadcast_in_dim": Primitive(Kind.MOVE, move=_broadcast_in_dim),
    **_rows(Kind.MOVE, "expand_dims reshape squeeze", move=_reshape),
    "slice": Primitive(Kind.MOVE, move=_slice),
    "concatenate": _move(lambda params, xs: [np.concatenate(xs, axis=params["dimension"])]),
    "rev": _move(lambda params, xs: [np.flip(xs[0], params["dimensions"])]),
    "split": _move(lambda params, xs: np.split(xs[0], np.cumsum(params["sizes"])[:-1], axis=params["axis"])),
    "stack": _move(lambda params, xs: [np.stack(xs, axis=params["axis"])]),
    "tile": _move(lambda params, xs: [np.tile(xs[0], (*params["reps"], 1))]),
    "transpose": _move(lambda params, xs: [xs[0].transpose(*params["permutation"], xs[0].ndim - 1)]),
    "unstack": _move(lambda params, xs: list(np.moveaxis(xs[0], params["axis"], 0))),
    "pad": Primitive(Kind.MOVE),
    "iota": Primitive(Kind.OTHER, numpy=_iota),
    **_index("gather", slice(1, None), "indexing at a position that depends on a latent"),
    **_index("dynamic_slice", slice(1, None)),
    **_index("dynamic_update_slice", slice(2, None)),
    **_index("scatter", slice(1, 2)),
    "select_n": Primitive(Kind.CHOICE, indices=slice(0, 1), refusal="a choice (`where`) made by a latent"),
    # Sums.
    **_rows(Kind.SUM, "reduce_sum cumsum"),
    "scatter-add": Primitive(Kind.SUM, indices=slice(1, 2), refusal="an index that depends on a latent"),
    "add": _elementwise(np.add, kind=Kind.LINEAR),
    "add_any": _elementwise(np.add, kind=Kind.LINEAR),
    "sub": _elementwise(np.subtract, kind=Kind.LINEAR),
    "neg": _elementwise(np.negative, kind=Kind.LINEAR),
    # Comparisons and logic.
    "lt": _comparison(np.less),
    "le": _comparison(np.less_equal),
    "gt": _comparison(np.greater),
    "ge": _comparison(np.greater_equal),
    "eq": _comparison(np.equal),
    "ne": _comparison(np.not_equal),
    "and": _elementwise(np.bitwise_and, _COMPARED),
    "or": _elementwise(np.bitwise_or, _COMPARED),
    "not": _elementwise(np.invert, _COMPARED),
    "xor": _elementwise(np.bitwise_xor),
    **_rows(Kind.REDUCTION, "reduce_and reduce_or", refusal=_COMPARED),
    "is_finite": _elementwise(np.isfinite, "a test whether a latent's image is finite"),
    # Arithmetic.
    "mul": _elementwise(np.multiply),
    "div": _elementwise(_divide, "division by a quantity that depends on latents and may be zero"),
    "rem": _elementwise(np.fmod),
    "square": _elementwise(np.square),
    "integer_pow": Primitive(Kind.ELEMENTWISE, numpy=lambda params, x: np.asarray(x, float) ** params["y"]),
    "pow": _elementwise(None, "a real power of a quantity that may be zero or negative, or a power that can overflow"),
    "rsqrt": _elementwise(None, _ROOT),
    "abs": _elementwise(np.abs, "`abs` of a quantity that depends on latents has a kink"),
    "max": _elementwise(np.maximum, "a maximum with a quantity that depends on latents"),
    "min": _elementwise(np.minimum, "a minimum with a quantity that depends on latents"),
    "clamp": _elementwise(
        lambda low, x, high: np.minimum(np.maximum(x, low), high), "a clip of a quantity that depends on latents"
    ),
    "convert_element_type": _elementwise(np.asarray),
    "reduce_prod": Primitive(Kind.REDUCTION),
    "cumprod": Primitive(Kind.CUMULATIVE),
    # Analytic functions of one number.
    "exp": _saturating("an exponential", np.exp, np.exp),
    "exp2": _saturating("an exponential", np.exp2, np.exp2),
    "expm1": _saturating("an exponential", np.expm1, np.expm1),
    "tanh": _saturating("`tanh`", np.tanh, np.tanh),
    "sinh": _saturating("`sinh`", np.sinh, np.sinh),
    "cosh": _saturating("`cosh`", np.cosh),
    "logistic": _saturating("a sigmoid", None, lambda x: 1.0 / (1.0 + np.exp(-x))),
    "erf": _saturating("`erf`", None),
    "erfc": _saturating("`erfc`", None),
    "sin": _function(-math.inf, np.sin, None, ""),
    "cos": _function(-math.inf, np.cos, None, ""),
    "log": _function(0.0, np.log, np.log, "the logarithm of a quantity that may be zero or negative"),
    "log1p": _function(-1.0, np.log1p, np.log1p, "log1p of a quantity that may be -1 or less"),
    "sqrt": _function(0.0, np.sqrt, np.sqrt, _ROOT),
    "lgamma": _function(0.0, None, None, "lgamma of a quantity that may be zero or negative"),
    "digamma": _function(0.0, None, None, "digamma of a quantity that may be zero or negative"),
    # Linear algebra.
    **_rows(Kind.OTHER, "dot_general cholesky"),
    "triangular_solve": Primitive(Kind.OTHER, refusal="a triangular solve whose diagonal may be zero"),
    # Nowhere analytic, or without a rule.
    **_rows(
        Kind.ELEMENTWISE, "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt erf_inv igamma igammac"
    ),
    **_rows(Kind.ELEMENTWISE, "nextafter polygamma reduce_precision regularized_incomplete_beta tan zeta"),
    "floor": _elementwise(np.floor, "rounding of a latent"),
    "ceil": _elementwise(np.ceil, "rounding of a latent"),
    "round": Primitive(Kind.ELEMENTWISE, numpy=_round, refusal="rounding of a latent"),
    "sign": _elementwise(np.sign, "the sign of a quantity that depends on latents"),
    "stop_gradient": _elementwise(None, "`stop_gradient` hides how the likelihood depends on a latent"),
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
