"""Prove that numbers depend on latents through real-analytic operations alone.

A jaxpr is interpreted over intervals. Every quantity that latents reach carries, per element, an interval that contains
it and a flag: is it a real-analytic function of the latents, on their whole support? Arithmetic and analytic functions
keep the flag where the interval shows that they stay inside their domain (the logarithm of a positive number, division by
something that cannot be zero). Everything else - a branch, an index, a comparison that intervals do not decide, rounding,
`stop_gradient`, an operation not listed here - clears it and leaves a sentence that says so. Data may branch: quantities
that no latent reaches are simply computed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ppl_bandit.program.jaxpr import intervals
from ppl_bandit.program.jaxpr.interpreter import evaluate
from ppl_bandit.program.jaxpr.intervals import Flow, anywhere, as_flow, is_graded, is_nonzero, is_positive
from ppl_bandit.program.jaxpr.simplex_sums import Shares, followed
from ppl_bandit.program.jaxpr.source_lines import Place, place_of
from ppl_bandit.runtime.jax_adapter import Jaxpr, apply_primitive, called_jaxpr

__all__ = ["Obstacle", "interpret"]

# The new intervals, or None where nothing is proved, and the words that blame the operation if the proof ends here; "" for one
# at which it cannot.
Step = tuple[list[Flow] | None, str]


class Obstacle(NamedTuple):
    """An operation at which analyticity was lost: `happened` is a scalar flag, `words` say where and why.

    Attributes:
        is_users: whether it stands in the program itself, and not inside of a distribution.
        remedy: what helps, where that is known.
    """

    words: str
    happened: Bool[Array, ""]
    is_users: bool = True
    remedy: str = ""


def interpret(
    jaxpr: Jaxpr,
    consts: Iterable[Any],
    args: Sequence[Any],
    obstacles: list[Obstacle],
    callers: tuple[Any, ...] = (),
) -> list[Any]:
    """Interpret a jaxpr; inputs and outputs are `Flow`s where latents reach and plain arrays elsewhere.

    Args:
        callers: equations that call this jaxpr, the innermost first.
    """

    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if any(isinstance(value, Flow) for value in values):
            return _apply(eqn, values, obstacles, (eqn, *callers))
        return apply_primitive(eqn, values)

    return evaluate(jaxpr, consts, args, step)


def _apply(eqn: Any, values: list[Any], obstacles: list[Obstacle], stack: tuple[Any, ...]) -> list[Any]:
    name = eqn.primitive.name
    inner = called_jaxpr(eqn) if name in _CALLS else None
    if name == "cond" and not isinstance(values[0], Flow):
        branches = [interpret(b.jaxpr, b.consts, values[1:], obstacles, stack) for b in eqn.params["branches"]]
        return [intervals.hull([as_flow(out) for out in outs]) for outs in zip(*branches, strict=True)]
    if inner is not None:
        return interpret(inner[0], inner[1], values, obstacles, stack)
    rule = _RULES.get(name)
    if rule is None:
        outs, words = None, _REASONS.get(name, f"`{name}` is not known to be analytic")
    else:
        outs, words = rule(eqn, values)
    if outs is None:
        outs = [intervals.unproved(atom.aval.shape) for atom in eqn.outvars]
    outs = _sharpened(eqn, values, outs)
    if not words:  # it keeps what its operands have
        return outs
    came = jnp.array(True)
    for value in values:
        if isinstance(value, Flow):
            came &= jnp.all(value.is_analytic)
    left = jnp.array(True)
    for out in outs:
        left &= jnp.all(out.is_analytic)
    place = place_of(stack)
    obstacles.append(Obstacle(words + _where(place, words), came & ~left, place.is_users, _OWN_REMEDIES.get(name, "")))
    return outs


def _sharpened(eqn: Any, values: list[Any], outs: list[Flow]) -> list[Flow]:
    """Use what is known of elements that add up to 1."""
    shares: list[Any] = [value.shares if isinstance(value, Flow) else value for value in values]
    if not any(isinstance(known, Shares) for known in shares):
        return outs
    if eqn.primitive.name == "div" and all(isinstance(known, Shares) for known in shares):
        return [intervals.ratio_of_shares(outs[0], *shares)] if shares[0].site == shares[1].site else outs
    found = followed(eqn, shares, _FIXED_OPERANDS.get(eqn.primitive.name, lambda n: ())(len(values)))
    return outs if found is None else [intervals.with_shares(*pair) for pair in zip(outs, found, strict=True)]


def _where(place: Place, words: str) -> str:
    if not place.words:
        return ", inside the formula of the distribution"
    if not place.is_users:
        return f", inside NumPyro's code ({place.words})"
    return f"{f', in `{place.called}`' if place.called and f'`{place.called}`' not in words else ''} ({place.words})"


def _unary(function: Callable[[Flow], Flow], words: str = "") -> Callable[[Any, list[Any]], Step]:
    return lambda eqn, values: ([function(values[0])], words)


def _binary(function: Callable[[Flow, Flow], Flow], words: str = "") -> Callable[[Any, list[Any]], Step]:
    return lambda eqn, values: ([function(as_flow(values[0]), as_flow(values[1]))], words)


def _increasing(function: Callable, domain: Callable[[Flow], Array] | None = None, words: str = "") -> Callable:
    return _unary(lambda x: intervals.increasing(function, x, None if domain is None else domain(x)), words)


def _on_positive(x: Flow) -> Flow:
    return anywhere(x.is_analytic & is_positive(x))


def _structural(eqn: Any, values: list[Any]) -> Step:
    """Move elements around: apply the operation to each bound."""
    name = eqn.primitive.name
    fixed = _FIXED_OPERANDS.get(name, lambda n: ())(len(values))
    if any(isinstance(values[i], Flow) for i in fixed):
        return None, _REASONS.get(name, f"`{name}` at a position that depends on a latent")
    flows = [value if i in fixed else as_flow(value) for i, value in enumerate(values)]

    def moved(field: str) -> list[Array]:
        arrays = [value if i in fixed else getattr(value, field).astype(float) for i, value in enumerate(flows)]
        return apply_primitive(eqn, arrays)

    proved, words = [array > 0.5 for array in moved("is_analytic")], ""
    if name in ("gather", "dynamic_slice"):
        is_inside = _is_in_range(eqn, values)
        proved, words = [flags & is_inside for flags in proved], "an index out of range"
    return [Flow(*parts) for parts in zip(moved("low"), moved("high"), proved, strict=True)], words


def _is_in_range(eqn: Any, values: list[Any]) -> Array:
    """Tell whether data index what exists; jax would silently take the nearest element."""
    shape, inside = eqn.invars[0].aval.shape, jnp.array(True)
    if eqn.primitive.name == "gather":
        starts = {axis: values[1][..., i] for i, axis in enumerate(eqn.params["dimension_numbers"].start_index_map)}
    else:
        starts = dict(enumerate(values[1:]))
    for axis, start in starts.items():
        inside &= jnp.all((start >= 0) & (start <= shape[axis] - eqn.params["slice_sizes"][axis]))
    return inside


def _total(eqn: Any, values: list[Any]) -> Step:
    """Sums, plain, cumulative and scattered."""
    fixed = _FIXED_OPERANDS.get(eqn.primitive.name, lambda n: ())(len(values))
    if any(isinstance(values[i], Flow) for i in fixed):
        return None, "an index that depends on a latent"
    flows = [value if i in fixed else as_flow(value) for i, value in enumerate(values)]

    def added(read: Callable[[Flow], Array]) -> Array:
        return apply_primitive(eqn, [v if i in fixed else read(v).astype(float) for i, v in enumerate(flows)])[0]

    low, high = added(lambda x: x.low), added(lambda x: x.high)
    total = Flow(low, high, added(lambda x: ~x.is_analytic) < 0.5)
    return [intervals.add(total, as_flow(jnp.zeros(low.shape)))], ""


def _mul(eqn: Any, values: list[Any]) -> Step:
    if eqn.invars[0] is eqn.invars[1]:
        return [intervals.power(values[0], 2)], ""
    return [intervals.product(as_flow(values[0]), as_flow(values[1]))], ""


def _integer_pow(eqn: Any, values: list[Any]) -> Step:
    words = "a power that can overflow" if eqn.params["y"] > 0 else "a negative power of a quantity that may be zero"
    return [intervals.power(values[0], eqn.params["y"])], words


def _pow(eqn: Any, values: list[Any]) -> Step:
    base, exponent = (as_flow(v) for v in values)
    out = intervals.real_power(base, exponent, not isinstance(values[1], Flow))
    return [out], "a real power of a quantity that may be zero or negative, or a power that can overflow"


def _reduce_prod(eqn: Any, values: list[Any]) -> Step:
    x, axes = values[0], eqn.params["axes"]
    positive, proved = jnp.all(is_positive(x), axis=axes), jnp.all(x.is_analytic, axis=axes)
    low = jnp.where(positive, jnp.prod(x.low, axis=axes), -jnp.inf)
    return [Flow(low, jnp.where(positive, jnp.prod(x.high, axis=axes), jnp.inf), proved)], ""


def _cumprod(eqn: Any, values: list[Any]) -> Step:
    x, axis, backwards = values[0], eqn.params["axis"], eqn.params["reverse"]

    def along(array: Array) -> Array:
        return jax.lax.cumprod(array.astype(float), axis=axis, reverse=backwards)

    positive, proved = along(is_positive(x)) > 0.5, along(x.is_analytic) > 0.5
    low, high = (
        jnp.where(positive, along(jnp.where(is_positive(x), end, 1.0)), bound)
        for end, bound in ((x.low, -jnp.inf), (x.high, jnp.inf))
    )
    return [Flow(low, high, proved)], ""


def _dot_general(eqn: Any, values: list[Any]) -> Step:
    x, y = (as_flow(v) for v in values)

    def dot(a: Array, b: Array) -> Array:
        return apply_primitive(eqn, [a.astype(float), b.astype(float)])[0]

    ones = tuple(jnp.ones(v.low.shape) for v in (x, y))
    proved = (dot(~x.is_analytic, ones[1]) + dot(ones[0], ~y.is_analytic)) < 0.5
    if all(isinstance(v, Flow) for v in values):
        return [anywhere(proved)], ""
    flow_first = isinstance(values[0], Flow)
    flow, weights = (x, y.low) if flow_first else (y, x.low)
    up, down = jnp.maximum(weights, 0.0), jnp.minimum(weights, 0.0)

    def weighted(w: Array, bound: Array) -> Array:
        return dot(bound, w) if flow_first else dot(w, bound)

    rising = Flow(weighted(up, flow.low), weighted(up, flow.high), proved)
    return [intervals.add(rising, Flow(weighted(down, flow.high), weighted(down, flow.low), proved))], ""


def _cholesky(eqn: Any, values: list[Any]) -> Step:
    x = values[0]
    proved = jnp.broadcast_to(jnp.all(x.is_analytic, axis=(-2, -1), keepdims=True), x.low.shape)
    diagonal = jnp.broadcast_to(jnp.eye(x.low.shape[-1], dtype=bool), x.low.shape)
    tiny = jnp.finfo(x.low.dtype).tiny  # a factor's diagonal is positive where the factor exists, and nan elsewhere
    return [anywhere(proved)._replace(low=jnp.where(diagonal, tiny, -jnp.inf))], ""


def _triangular_solve(eqn: Any, values: list[Any]) -> Step:
    matrix, rhs = (as_flow(v) for v in values)
    diagonal = jnp.diagonal(is_nonzero(matrix), axis1=-2, axis2=-1)
    proved = jnp.all(matrix.is_analytic) & jnp.all(diagonal) & jnp.all(rhs.is_analytic)
    return [anywhere(jnp.broadcast_to(proved, rhs.low.shape))], "a triangular solve whose diagonal may be zero"


def _convert(eqn: Any, values: list[Any]) -> Step:
    old, new = np.dtype(eqn.invars[0].aval.dtype), np.dtype(eqn.params["new_dtype"])
    if old.kind == "b":
        return [values[0]], ""
    if jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating):
        if jnp.finfo(new).nmant >= jnp.finfo(old).nmant:
            return [values[0]], ""
        return None, f"rounding of a quantity that depends on latents from {old.name} to {new.name}"
    return None, f"conversion of a quantity that depends on latents to {new.name}"


def _compare(eqn: Any, values: list[Any]) -> Step:
    name, words = eqn.primitive.name, "a comparison with a latent"
    x, y = (as_flow(v) for v in values)
    if eqn.invars[0] is not eqn.invars[1]:
        return [intervals.compare(name, x, y)], words
    number = intervals.finiteness(x)  # a test for nan: what stays between finite numbers is not nan
    holds = jnp.full(x.low.shape, name in ("eq", "le", "ge"))
    return [intervals.truth(holds, ~holds, number.is_analytic)], words


def _logic(combine: Callable[[Any, list[Array]], Array]) -> Callable:
    def rule(eqn: Any, values: list[Any]) -> Step:
        if eqn.outvars[0].aval.dtype != bool:
            return None, f"bits of a quantity that depends on latents (`{eqn.primitive.name}`)"
        flows = [as_flow(value) for value in values]
        ends = [combine(eqn, [getattr(flow, end) for flow in flows]) for end in ("low", "high")]
        low, high = jnp.minimum(*ends), jnp.maximum(*ends)
        return [Flow(low, high, low == high)], "a comparison with a latent"

    return rule


def _select(eqn: Any, values: list[Any]) -> Step:
    which, *cases = values
    if not isinstance(which, Flow):
        return _structural(eqn, values)
    if len(cases) != 2:
        return None, _REASONS["select_n"]
    first, second = (as_flow(case) for case in cases)
    low, high, proved = (jnp.where(which.low > 0.5, b, a) for a, b in zip(first[:3], second[:3], strict=True))
    is_known = which.is_analytic & (which.low == which.high)
    return [Flow(jnp.where(is_known, low, -jnp.inf), jnp.where(is_known, high, jnp.inf), proved & is_known)], _REASONS[
        "select_n"
    ]


def _clamp(eqn: Any, values: list[Any]) -> Step:
    low, x, high = (as_flow(v) for v in values)
    return [intervals.smaller(intervals.larger(x, low), high)], "a clip of a quantity that depends on latents"


def _last(num_operands: int) -> tuple[int, ...]:
    return tuple(range(1, num_operands))


# Operands that say where elements go; they must not depend on latents.
_FIXED_OPERANDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "gather": _last,
    "dynamic_slice": _last,
    "dynamic_update_slice": lambda n: tuple(range(2, n)),
    "select_n": lambda n: (0,),
    "scatter": lambda n: (1,),
    "scatter-add": lambda n: (1,),
}

# Equations that call a jaxpr with their own operands. `reduce` also carries one, of single elements.
_CALLS = (
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat remat2 composite"
).split()


def _saturates(function: str) -> str:
    return f"{function} of an unbounded quantity that depends on latents, which floating point flattens far out"


_REASONS = {
    "gather": "indexing at a position that depends on a latent",
    "select_n": "a choice (`where`) made by a latent",
    "cond": "a branch taken by a latent",
    "while": "a loop that latents enter",
    "scan": "a `scan` that latents enter",
    "stop_gradient": "`stop_gradient` hides how the likelihood depends on a latent",
    "round": "rounding of a latent",
    "floor": "rounding of a latent",
    "ceil": "rounding of a latent",
    "reduce_max": "the largest of quantities that depend on latents",
    "reduce_min": "the smallest of quantities that depend on latents",
    "argmax": "a choice (`argmax`) made by latents",
    "argmin": "a choice (`argmin`) made by latents",
    "sort": "sorting by a latent",
    "sign": "the sign of a quantity that depends on latents",
}

_UNROLL = "write a Python loop over a fixed number of turns, which the proof reads turn by turn, or a matrix product"
_OWN_REMEDIES = {"scan": _UNROLL, "while": _UNROLL}

_RULES: dict[str, Callable[[Any, list[Any]], Step]] = {
    **{
        name: _structural
        for name in (
            "broadcast_in_dim concatenate copy copy_p device_put dynamic_slice dynamic_update_slice expand_dims gather pad "
            "reshape rev scatter slice split squeeze stack tile transpose unstack optimization_barrier"
        ).split()
    },
    **{name: _compare for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "add": _binary(intervals.add),
    "add_any": _binary(intervals.add),
    "sub": _binary(lambda x, y: intervals.add(x, intervals.negative(y))),
    "neg": _unary(intervals.negative),
    "mul": _mul,
    "div": _binary(
        lambda x, y: intervals.product(x, intervals.reciprocal(y)),
        "division by a quantity that depends on latents and may be zero",
    ),
    "square": _unary(lambda x: intervals.power(x, 2)),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "exp": _increasing(jnp.exp, is_graded, _saturates("an exponential")),
    "exp2": _increasing(jnp.exp2, is_graded, _saturates("an exponential")),
    "expm1": _increasing(jnp.expm1, is_graded, _saturates("an exponential")),
    "tanh": _increasing(jnp.tanh, is_graded, _saturates("`tanh`")),
    "sinh": _increasing(jnp.sinh, is_graded, _saturates("`sinh`")),
    "logistic": _increasing(lambda x: 1.0 / (1.0 + jnp.exp(-x)), is_graded, _saturates("a sigmoid")),
    "erf": _unary(lambda x: anywhere(x.is_analytic & is_graded(x)), _saturates("`erf`")),
    "erfc": _unary(lambda x: anywhere(x.is_analytic & is_graded(x)), _saturates("`erfc`")),
    "cosh": _unary(lambda x: anywhere(x.is_analytic & is_graded(x)), _saturates("`cosh`")),
    "sin": _unary(lambda x: anywhere(x.is_analytic)),
    "cos": _unary(lambda x: anywhere(x.is_analytic)),
    "log": _increasing(jnp.log, is_positive, "the logarithm of a quantity that may be zero or negative"),
    "log1p": _increasing(jnp.log1p, lambda x: x.low > -1, "log1p of a quantity that may be -1 or less"),
    "sqrt": _increasing(jnp.sqrt, is_positive, "the square root of a quantity that may be zero or negative"),
    "rsqrt": _unary(
        lambda x: intervals.reciprocal(intervals.increasing(jnp.sqrt, x, is_positive(x))),
        "the square root of a quantity that may be zero or negative",
    ),
    "lgamma": _unary(_on_positive, "lgamma of a quantity that may be zero or negative"),
    "digamma": _unary(_on_positive, "digamma of a quantity that may be zero or negative"),
    "abs": _unary(intervals.absolute, "`abs` of a quantity that depends on latents has a kink"),
    "max": _binary(intervals.larger, "a maximum with a quantity that depends on latents"),
    "min": _binary(intervals.smaller, "a minimum with a quantity that depends on latents"),
    "clamp": _clamp,
    "is_finite": _unary(intervals.finiteness, "a test whether a latent's image is finite"),
    "and": _logic(lambda eqn, ends: jnp.minimum(*ends)),
    "or": _logic(lambda eqn, ends: jnp.maximum(*ends)),
    "not": _logic(lambda eqn, ends: 1.0 - ends[0]),
    "reduce_and": _logic(lambda eqn, ends: jnp.min(ends[0], axis=eqn.params["axes"])),
    "reduce_or": _logic(lambda eqn, ends: jnp.max(ends[0], axis=eqn.params["axes"])),
    "select_n": _select,
    "reduce_sum": _total,
    "cumsum": _total,
    "scatter-add": _total,
    "reduce_prod": _reduce_prod,
    "cumprod": _cumprod,
    "dot_general": _dot_general,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
    "convert_element_type": _convert,
}
