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

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal
from jaxtyping import Array, Bool, Float

from ppl_bandit.jaxprs import bind, subjaxpr

__all__ = ["Flow", "Obstacle", "interpret", "is_inside", "open_interval"]


class Flow(NamedTuple):
    """Bounds of a quantity that latents reach, elementwise.

    Attributes:
        low, high: the quantity lies between them.
        low_open, high_open: whether it cannot attain them.
        is_analytic: whether it is proved to be a real-analytic function of the latents.
        is_latent: whether it is latents themselves, at most moved around: no arithmetic can have rounded or overflowed.
    """

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    low_open: Bool[Array, "..."]
    high_open: Bool[Array, "..."]
    is_analytic: Bool[Array, "..."]
    is_latent: bool = False


class Obstacle(NamedTuple):
    """An operation at which analyticity was lost: `happened` is a scalar flag, `words` say where and why."""

    words: str
    happened: Bool[Array, ""]


def open_interval(low: Any, high: Any, shape: tuple[int, ...]) -> Flow:
    """Return a quantity strictly between two numbers: a latent on its support."""
    yes = jnp.ones(shape, bool)
    return Flow(jnp.broadcast_to(low, shape) * 1.0, jnp.broadcast_to(high, shape) * 1.0, yes, yes, yes, True)


def is_inside(flow: Flow, low: float, high: float) -> Bool[Array, "..."]:
    """Tell where a quantity provably lies in [low, high], excluding 0 if low is 0."""
    above = (flow.low > 0) | ((flow.low == 0) & flow.low_open) if low == 0 else flow.low >= low
    return above & (flow.high <= high)


def interpret(jaxpr: Jaxpr, consts: Iterable[Any], args: Sequence[Any], obstacles: list[Obstacle]) -> list[Any]:
    """Interpret a jaxpr; inputs and outputs are `Flow`s where latents reach and plain arrays elsewhere."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        if not any(isinstance(value, Flow) for value in values):
            outs = bind(eqn, values)
        else:
            outs = _apply(eqn, values, obstacles)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: Any, values: list[Any], obstacles: list[Obstacle]) -> list[Any]:
    name = eqn.primitive.name
    inner = subjaxpr(eqn) if name in _CALLS else None
    if name == "cond" and not isinstance(values[0], Flow):
        branches = [interpret(b.jaxpr, b.consts, values[1:], obstacles) for b in eqn.params["branches"]]
        return [_hull([_flow(out) for out in outs]) for outs in zip(*branches, strict=True)]
    if inner is not None:
        return interpret(inner[0], inner[1], values, obstacles)
    rule = _RULES.get(name)
    if rule is None:
        outs, words = None, _REASONS.get(name, f"`{name}` is not known to be analytic")
    else:
        outs, words = rule(eqn, values)
    if outs is None:
        outs = [_unproved(atom.aval.shape) for atom in eqn.outvars]
    came = jnp.array(True)
    for value in values:
        if isinstance(value, Flow):
            came &= jnp.all(value.is_analytic)
    left = jnp.array(True)
    for out in outs:
        left &= jnp.all(out.is_analytic) if isinstance(out, Flow) else True
    obstacles.append(Obstacle(f"{words}{_line(eqn)}", came & ~left))
    return outs


def _line(eqn: Any) -> str:
    frames = getattr(eqn.source_info.traceback, "frames", None) or []
    for frame in frames:
        name = frame.file_name
        if "site-packages" not in name and "ppl_bandit" not in name and "<frozen" not in name:
            return f" (line {frame.line_num} of {name.rsplit('/', 1)[-1]})"
    return ""


def _flow(value: Any) -> Flow:
    if isinstance(value, Flow):
        return value
    array = jnp.asarray(value).astype(float)
    no = jnp.zeros(array.shape, bool)
    return Flow(array, array, no, no, ~no)


def _unproved(shape: tuple[int, ...]) -> Flow:
    no = jnp.zeros(shape, bool)
    return Flow(jnp.full(shape, -jnp.inf), jnp.full(shape, jnp.inf), ~no, ~no, no)


def _anywhere(is_analytic: Array) -> Flow:
    return _unproved(is_analytic.shape)._replace(is_analytic=is_analytic)


def _hull(flows: list[Flow]) -> Flow:
    out = flows[0]
    for flow in flows[1:]:
        low, high = jnp.minimum(out.low, flow.low), jnp.maximum(out.high, flow.high)
        out = Flow(
            low,
            high,
            jnp.where(out.low == low, out.low_open, True) & jnp.where(flow.low == low, flow.low_open, True),
            jnp.where(out.high == high, out.high_open, True) & jnp.where(flow.high == high, flow.high_open, True),
            out.is_analytic & flow.is_analytic,
        )
    return out


def _is_positive(x: Flow) -> Array:
    return (x.low > 0) | ((x.low == 0) & x.low_open)


def _is_nonzero(x: Flow) -> Array:
    return _is_positive(x) | (x.high < 0) | ((x.high == 0) & x.high_open)


def _structural(eqn: Any, values: list[Any]) -> tuple[list[Flow] | None, str]:
    """Move elements around: apply the operation to each bound."""
    name = eqn.primitive.name
    fixed = _FIXED_OPERANDS.get(name, lambda n: ())(len(values))
    if any(isinstance(values[i], Flow) for i in fixed):
        return None, _REASONS.get(name, f"`{name}` at a position that depends on a latent")
    flows = [value if i in fixed else _flow(value) for i, value in enumerate(values)]

    def moved(field: str) -> list[Array]:
        arrays = [value if i in fixed else getattr(value, field).astype(float) for i, value in enumerate(flows)]
        return bind(eqn, arrays)

    lows, highs = moved("low"), moved("high")
    low_open, high_open, proved = ([a > 0.5 for a in moved(f)] for f in ("low_open", "high_open", "is_analytic"))
    is_latent = all(value.is_latent for value in values if isinstance(value, Flow))
    return [Flow(*parts, is_latent) for parts in zip(lows, highs, low_open, high_open, proved, strict=True)], ""


def _total(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    """Sums, plain and cumulative: bounds add up, and one open bound makes the sum's open."""
    x = values[0]

    def added(array: Array) -> Array:
        return bind(eqn, [array.astype(float)])[0]

    return [
        Flow(
            _no_nan(added(x.low), -jnp.inf),
            _no_nan(added(x.high), jnp.inf),
            added(x.low_open) > 0.5,
            added(x.high_open) > 0.5,
            added(~x.is_analytic) < 0.5,
        )
    ], ""


def _no_nan(array: Array, value: float) -> Array:
    return jnp.where(jnp.isnan(array), value, array)


def _add(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    x, y = (_flow(v) for v in values)
    return [
        Flow(
            _no_nan(x.low + y.low, -jnp.inf),
            _no_nan(x.high + y.high, jnp.inf),
            x.low_open | y.low_open,
            x.high_open | y.high_open,
            x.is_analytic & y.is_analytic,
        )
    ], ""


def _negative(x: Flow) -> Flow:
    return Flow(-x.high, -x.low, x.high_open, x.low_open, x.is_analytic)


def _product(x: Flow, y: Flow) -> Flow:
    ends = [
        (a * b, a_open | b_open)
        for a, a_open in ((x.low, x.low_open), (x.high, x.high_open))
        for b, b_open in ((y.low, y.low_open), (y.high, y.high_open))
    ]
    products = jnp.stack([_no_nan(p, 0.0) for p, _ in ends])  # 0 * inf is 0: the infinite end is never attained
    opens = jnp.stack([jnp.broadcast_to(o, products.shape[1:]) for _, o in ends])
    low, high = products.min(0), products.max(0)
    excludes_zero = _is_nonzero(x) & _is_nonzero(y)
    low_open = jnp.where(low == 0, excludes_zero, jnp.all(opens | (products != low), axis=0))
    high_open = jnp.where(high == 0, excludes_zero, jnp.all(opens | (products != high), axis=0))
    return Flow(low, high, low_open, high_open, x.is_analytic & y.is_analytic)


def _mul(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    if eqn.invars[0] is eqn.invars[1]:
        return [_power(values[0], 2)], ""
    return [_product(*(_flow(v) for v in values))], ""


def _reciprocal(x: Flow) -> Flow:
    crosses = ~_is_nonzero(x)
    negative = x.high <= 0
    low = jnp.where(crosses | (negative & (x.high == 0)), -jnp.inf, 1.0 / jnp.where(x.high == 0, 1.0, x.high))
    high = jnp.where(crosses | (~negative & (x.low == 0)), jnp.inf, 1.0 / jnp.where(x.low == 0, 1.0, x.low))
    return Flow(low, high, x.high_open, x.low_open, x.is_analytic & ~crosses)


def _div(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    x, y = (_flow(v) for v in values)
    return [_product(x, _reciprocal(y))], "division by a quantity that depends on latents and may be zero"


def _monotone(function: Callable, domain: Callable[[Flow], Array] | None = None, words: str = "") -> Callable:
    """An increasing analytic function."""

    def rule(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
        x = values[0]
        inside = jnp.ones(x.low.shape, bool) if domain is None else domain(x)
        low = _no_nan(function(jnp.where(inside, x.low, 1.0)), -jnp.inf)
        high = _no_nan(function(jnp.where(inside, x.high, 1.0)), jnp.inf)
        # An infinite argument is never attained, so neither is its image.
        low_open, high_open = x.low_open | jnp.isinf(x.low), x.high_open | jnp.isinf(x.high)
        return [Flow(low, high, low_open, high_open, x.is_analytic & inside)], words

    return rule


def _entire(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    return [_anywhere(values[0].is_analytic)], ""


def _on_positive(words: str) -> Callable:
    def rule(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
        return [_anywhere(values[0].is_analytic & _is_positive(values[0]))], words

    return rule


def _power(x: Flow, exponent: int) -> Flow:
    if exponent < 0:
        return _reciprocal(_power(x, -exponent))
    if exponent == 0:
        return _flow(jnp.ones(x.low.shape))
    a, b = x.low**exponent, x.high**exponent
    if exponent % 2:
        return x._replace(low=a, high=b, is_latent=False)
    crosses = ~_is_nonzero(x)
    low = jnp.where((x.low < 0) & (x.high > 0), 0.0, jnp.minimum(a, b))
    both = x.low_open & x.high_open
    low_open = jnp.where(a < b, x.low_open, jnp.where(a > b, x.high_open, both))
    high_open = jnp.where(a > b, x.low_open, jnp.where(a < b, x.high_open, both))
    return Flow(low, jnp.maximum(a, b), jnp.where(low == 0, ~crosses, low_open), high_open, x.is_analytic)


def _integer_pow(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    return [_power(values[0], eqn.params["y"])], "a negative power of a quantity that may be zero"


def _pow(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    base, exponent = (_flow(v) for v in values)
    safe = jnp.where(_is_positive(base), base.low, 1.0), jnp.where(_is_positive(base), base.high, 1.0)
    log_base = Flow(
        jnp.log(safe[0]), jnp.log(safe[1]), base.low_open, base.high_open, base.is_analytic & _is_positive(base)
    )
    x = _product(log_base, exponent)
    powers = Flow(
        jnp.exp(x.low),
        jnp.exp(x.high),
        x.low_open | jnp.isinf(x.low),
        x.high_open | jnp.isinf(x.high),
        x.is_analytic,
    )
    if not isinstance(values[1], Flow):  # `z ** 2.0` is a polynomial, whatever the sign of z
        whole = (exponent.low >= 0) & (exponent.low == jnp.floor(exponent.low)) & ~_is_positive(base)
        anywhere = _anywhere(base.is_analytic & whole)
        powers = Flow(*(jnp.where(whole, a, b) for a, b in zip(anywhere[:5], powers[:5], strict=True)))
    return [powers], "a real power of a quantity that may be zero or negative"


def _rsqrt(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    root, words = _RULES["sqrt"](eqn, values)
    return [_reciprocal(root[0])], words


def _reduce_prod(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    x, axes = values[0], eqn.params["axes"]
    proved = jnp.all(x.is_analytic, axis=axes)
    positive = jnp.all(_is_positive(x), axis=axes)
    low = jnp.where(positive, _no_nan(jnp.prod(x.low, axis=axes), 0.0), -jnp.inf)
    high = jnp.where(positive, _no_nan(jnp.prod(x.high, axis=axes), jnp.inf), jnp.inf)
    return [Flow(low, high, positive, jnp.any(x.high_open, axis=axes), proved)], ""


def _dot_general(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    x, y = (_flow(v) for v in values)

    def dot(a: Array, b: Array) -> Array:
        return bind(eqn, [a.astype(float), b.astype(float)])[0]

    ones = tuple(jnp.ones(v.low.shape) for v in (x, y))
    proved = (dot(~x.is_analytic, ones[1]) + dot(ones[0], ~y.is_analytic)) < 0.5
    if all(isinstance(v, Flow) for v in values):
        return [_anywhere(proved)], ""
    flow_first = isinstance(values[0], Flow)
    flow, weights = (x, y.low) if flow_first else (y, x.low)

    def weighted(w: Array, bound: Array) -> Array:
        return dot(bound, w) if flow_first else dot(w, bound)

    def finite(bound: Array) -> Array:
        return jnp.where(jnp.isinf(bound), 0.0, bound)

    up, down = jnp.maximum(weights, 0.0), jnp.minimum(weights, 0.0)
    no_low = weighted(up > 0, flow.low == -jnp.inf) + weighted(down < 0, flow.high == jnp.inf) > 0.5
    no_high = weighted(up > 0, flow.high == jnp.inf) + weighted(down < 0, flow.low == -jnp.inf) > 0.5
    low = jnp.where(no_low, -jnp.inf, weighted(up, finite(flow.low)) + weighted(down, finite(flow.high)))
    high = jnp.where(no_high, jnp.inf, weighted(up, finite(flow.high)) + weighted(down, finite(flow.low)))
    low_open = weighted(up > 0, flow.low_open) + weighted(down < 0, flow.high_open) > 0.5
    high_open = weighted(up > 0, flow.high_open) + weighted(down < 0, flow.low_open) > 0.5
    return [Flow(low, high, low_open | no_low, high_open | no_high, proved)], ""


def _cholesky(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    x = values[0]
    proved = jnp.broadcast_to(jnp.all(x.is_analytic, axis=(-2, -1), keepdims=True), x.low.shape)
    diagonal = jnp.broadcast_to(jnp.eye(x.low.shape[-1], dtype=bool), x.low.shape)
    return [_anywhere(proved)._replace(low=jnp.where(diagonal, 0.0, -jnp.inf))], ""


def _triangular_solve(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    matrix, rhs = (_flow(v) for v in values)
    diagonal = jnp.diagonal(_is_nonzero(matrix), axis1=-2, axis2=-1)
    return [
        _anywhere(
            jnp.broadcast_to(jnp.all(matrix.is_analytic) & jnp.all(diagonal) & jnp.all(rhs.is_analytic), rhs.low.shape)
        )
    ], "a triangular solve whose diagonal may be zero"


def _convert(eqn: Any, values: list[Any]) -> tuple[list[Flow] | None, str]:
    old, new = np.dtype(eqn.invars[0].aval.dtype), np.dtype(eqn.params["new_dtype"])
    if old.kind == "b":  # the outcome of a comparison that intervals decided, or one that lost its proof already
        return [values[0]], ""
    if jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating):
        if jnp.finfo(new).nmant >= jnp.finfo(old).nmant:
            return [values[0]], ""
        return None, f"rounding of a quantity that depends on latents from {old.name} to {new.name}"
    return None, f"conversion of a quantity that depends on latents to {new.name}"


def _truth(is_true: Array, is_false: Array, is_analytic: Array) -> Flow:
    """Return a truth value that is known, and then a constant, or not."""
    low, high = is_true & is_analytic, ~(is_false & is_analytic)
    no = jnp.zeros(low.shape, bool)
    return Flow(low * 1.0, high * 1.0, no, no, low == high)


def _compare(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    """Decide a comparison whose two sides cannot meet.

    Bounds that are not attained count for latents themselves alone: `exp` reaches 0 and infinity in floating point.
    """
    name, words = eqn.primitive.name, "a comparison with a latent"
    x, y = (_flow(v) for v in values)
    proved = x.is_analytic & y.is_analytic
    exact = all(value.is_latent for value in values if isinstance(value, Flow))
    if eqn.invars[0] is eqn.invars[1]:  # a test for nan: a latent is not nan, nor is what stays between finite numbers
        bounded = jnp.isfinite(x.low) & jnp.isfinite(x.high) | exact
        holds = jnp.full(x.low.shape, name in ("eq", "le", "ge"))
        return [_truth(holds & bounded, ~holds & bounded, proved)], words
    below = (x.high < y.low) | ((x.high == y.low) & (x.high_open | y.low_open) & exact)
    above = (x.low > y.high) | ((x.low == y.high) & (x.low_open | y.high_open) & exact)
    apart = below | above
    never = jnp.zeros(apart.shape, bool)
    is_true = {"lt": below, "le": below, "gt": above, "ge": above, "ne": apart, "eq": never}[name]
    is_false = {"lt": above, "le": above, "gt": below, "ge": below, "ne": never, "eq": apart}[name]
    return [_truth(is_true, is_false, proved)], words


def _is_finite(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    x = values[0]
    bounded = jnp.isfinite(x.low) & jnp.isfinite(x.high) | x.is_latent
    return [_truth(bounded, jnp.zeros(bounded.shape, bool), x.is_analytic)], "a test whether a latent's image is finite"


def _logic(combine: Callable) -> Callable:
    def rule(eqn: Any, values: list[Any]) -> tuple[list[Flow] | None, str]:
        if eqn.outvars[0].aval.dtype != bool:
            return None, f"bits of a quantity that depends on latents (`{eqn.primitive.name}`)"
        flows = [_flow(value) for value in values]
        low, high = (combine(eqn, [getattr(flow, end) for flow in flows]) for end in ("low", "high"))
        low, high = jnp.minimum(low, high), jnp.maximum(low, high)
        no = jnp.zeros(low.shape, bool)
        return [Flow(low, high, no, no, low == high)], "a comparison with a latent"

    return rule


def _select(eqn: Any, values: list[Any]) -> tuple[list[Flow] | None, str]:
    which, *cases = values
    if not isinstance(which, Flow):
        return _structural(eqn, values)
    if len(cases) != 2:
        return None, _REASONS["select_n"]
    known = which.is_analytic & (which.low == which.high)
    flows = [_flow(case) for case in cases]

    def chosen(field: str) -> Array:
        return jnp.where(which.low > 0.5, getattr(flows[1], field), getattr(flows[0], field))

    shape = flows[0].low.shape
    known = jnp.broadcast_to(known, shape)
    return [
        Flow(
            jnp.where(known, chosen("low"), -jnp.inf),
            jnp.where(known, chosen("high"), jnp.inf),
            chosen("low_open") | ~known,
            chosen("high_open") | ~known,
            chosen("is_analytic") & known,
        )
    ], _REASONS["select_n"]


def _abs(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    x = values[0]
    negative = _negative(x)
    is_negative = (x.high < 0) | ((x.high == 0) & x.high_open)
    parts = [jnp.where(is_negative, b, a) for a, b in zip(x[:5], negative[:5], strict=True)]
    return [Flow(*parts[:4], x.is_analytic & _is_nonzero(x))], "`abs` of a quantity that depends on latents has a kink"


def _larger(x: Flow, y: Flow, sign: int) -> Flow:
    """Return the larger of two quantities (the smaller if sign is -1), proved where it is always the same one of them."""
    above, below = x.low >= y.high, y.low >= x.high
    is_first, is_second = (above, below) if sign > 0 else (below, above)
    parts = [jnp.where(is_first, a, b) for a, b in zip(x[:5], y[:5], strict=True)]
    return Flow(*parts[:4], parts[4] & (is_first | is_second))


def _max(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    return [_larger(*(_flow(v) for v in values), 1)], "`maximum` (or a clip) of a quantity that depends on latents"


def _min(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    return [_larger(*(_flow(v) for v in values), -1)], "`minimum` (or a clip) of a quantity that depends on latents"


def _clamp(eqn: Any, values: list[Any]) -> tuple[list[Flow], str]:
    low, x, high = (_flow(v) for v in values)
    return [_larger(_larger(x, low, 1), high, -1)], "a clip of a quantity that depends on latents"


def _last(num_operands: int) -> tuple[int, ...]:
    return tuple(range(1, num_operands))


# Operands that say where elements go; they must not depend on latents.
_FIXED_OPERANDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "gather": _last,
    "dynamic_slice": _last,
    "dynamic_update_slice": lambda n: tuple(range(2, n)),
    "select_n": lambda n: (0,),
    "scatter": lambda n: (1,),
}

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

# Equations that call a jaxpr with their own operands. `reduce` also carries one, of single elements.
_CALLS = (
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr checkpoint remat remat2 composite"
).split()

_RULES: dict[str, Callable[[Any, list[Any]], tuple[list[Flow] | None, str]]] = {
    name: _structural
    for name in (
        "broadcast_in_dim concatenate copy copy_p device_put dynamic_slice dynamic_update_slice expand_dims gather pad "
        "reshape rev scatter slice split squeeze stack transpose optimization_barrier"
    ).split()
} | {
    "select_n": _select,
    **{name: _compare for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    "is_finite": _is_finite,
    "and": _logic(lambda eqn, ends: jnp.minimum(*ends)),
    "or": _logic(lambda eqn, ends: jnp.maximum(*ends)),
    "not": _logic(lambda eqn, ends: 1.0 - ends[0]),
    "reduce_and": _logic(lambda eqn, ends: jnp.min(ends[0], axis=eqn.params["axes"])),
    "reduce_or": _logic(lambda eqn, ends: jnp.max(ends[0], axis=eqn.params["axes"])),
    "abs": _abs,
    "max": _max,
    "min": _min,
    "clamp": _clamp,
    "add": _add,
    "add_any": _add,
    "sub": lambda eqn, values: _add(eqn, [_flow(values[0]), _negative(_flow(values[1]))]),
    "neg": lambda eqn, values: ([_negative(values[0])], ""),
    "mul": _mul,
    "div": _div,
    "square": lambda eqn, values: ([_power(values[0], 2)], ""),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "exp": _monotone(jnp.exp),
    "exp2": _monotone(jnp.exp2),
    "expm1": _monotone(jnp.expm1),
    "tanh": _monotone(jnp.tanh),
    "sinh": _monotone(jnp.sinh),
    "logistic": _monotone(lambda x: 1.0 / (1.0 + jnp.exp(-x))),
    "erf": _entire,
    "erfc": _entire,
    "sin": _entire,
    "cos": _entire,
    "cosh": _entire,
    "log": _monotone(jnp.log, _is_positive, "the logarithm of a quantity that may be zero or negative"),
    "log1p": _monotone(
        jnp.log1p,
        lambda x: (x.low > -1) | ((x.low == -1) & x.low_open),
        "log1p of a quantity that may be -1 or less",
    ),
    "sqrt": _monotone(jnp.sqrt, _is_positive, "the square root of a quantity that may be zero or negative"),
    "rsqrt": _rsqrt,
    "lgamma": _on_positive("lgamma of a quantity that may be zero or negative"),
    "digamma": _on_positive("digamma of a quantity that may be zero or negative"),
    "reduce_sum": _total,
    "cumsum": _total,
    "reduce_prod": _reduce_prod,
    "dot_general": _dot_general,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
    "convert_element_type": _convert,
}
