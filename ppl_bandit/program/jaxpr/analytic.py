"""The domain of real-analytic functions: prove that numbers depend on latents through real-analytic operations alone.

Every quantity that latents reach is an `Interval`: bounds, and a flag that says whether it is proved to be a real-analytic
function of the latents on their whole support. Arithmetic and analytic functions keep the flag where the bounds show that they
stay inside their domain (the logarithm of a positive number, division by something that cannot be zero). Everything else - a
branch, an index, a comparison that the bounds do not decide, rounding, `stop_gradient`, a primitive without a rule - clears
the flag and adds an `Obstacle` that names the operation. Data may branch: what no latent reaches is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ppl_bandit.program.jaxpr import intervals
from ppl_bandit.program.jaxpr.interpreter import Domain, interpret
from ppl_bandit.program.jaxpr.intervals import Interval, as_interval, is_moderate, is_nonzero, is_positive, unbounded
from ppl_bandit.program.jaxpr.polynomial_degree import highest_degree, result_degree, result_power
from ppl_bandit.program.jaxpr.primitives import AnalyticWhere, Kind, describe_primitive, index_operands, starts
from ppl_bandit.program.jaxpr.simplex_sums import SimplexSum, ratio_bounds, sums_of_results
from ppl_bandit.program.jaxpr.source_lines import SourceLine, source_line
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, apply_primitive

__all__ = ["Obstacle", "analytic_intervals", "location_of"]

# The new intervals, or None if nothing is proved, and the reason to give if analyticity is lost here; "" if it cannot be.
Step = tuple[list[Interval] | None, str]


class Obstacle(NamedTuple):
    """An operation at which analyticity may be lost.

    Attributes:
        reason: why, and in which line.
        is_present: scalar flag: whether it is lost.
        in_program: whether the operation stands in the program itself, and not inside a distribution.
        remedy: what the user can write instead; "" if unknown.
    """

    reason: str
    is_present: Bool[Array, ""]
    in_program: bool = True
    remedy: str = ""


def analytic_intervals(
    closed: ClosedJaxpr, args: Sequence[Any], *, may_flatten_outer: bool = False
) -> tuple[list[Any], list[Obstacle]]:
    """Interpret a jaxpr over intervals.

    Args:
        args: an `Interval` for each input that is or depends on a latent, and an array for each other input.
        may_flatten_outer: whether quantities of degree 0 depend on outer sites alone, and a function of these that saturates
            is marked by `may_flatten` instead of being an obstacle.

    Returns:
        The outputs, in the same form, and the operations at which analyticity may be lost.
    """
    obstacles: list[Obstacle] = []

    def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> Sequence[Any]:
        if not any(isinstance(value, Interval) for value in values):
            return apply_primitive(eqn, values)
        if eqn.primitive.name == "cond" and not isinstance(values[0], Interval):
            branches = [
                interpret(domain, branch.jaxpr, branch.consts, values[1:], (eqn, *callers))
                for branch in eqn.params["branches"]
            ]
            by_output = [[as_interval(out) for out in outs] for outs in zip(*branches, strict=True)]
            return [
                intervals.hull(outs)._replace(
                    degree=highest_degree([out.degree for out in outs]),
                    power=max(out.power for out in outs),
                    may_flatten=_any_flattens(outs),
                )
                for outs in by_output
            ]
        degree = result_degree(eqn, values, [getattr(value, "degree", 0) for value in values])
        power = result_power(eqn, values, [getattr(value, "power", -1) for value in values])
        flattens = _any_flattens(values)
        outs: list[Interval] | None
        if may_flatten_outer and _is_saturating(eqn) and isinstance(degree, int) and degree == 0:
            outs, reason = [_saturated(eqn, values[0])], ""
            flattens |= ~jnp.all(is_moderate(values[0]))
        else:
            outs, reason = _rule(eqn)(eqn, values)
        if outs is None:
            outs = [unbounded(jnp.zeros(atom.aval.shape, bool)) for atom in eqn.outvars]
        outs = [
            out._replace(degree=degree, power=power, may_flatten=flattens)
            for out in _narrowed_by_sums(eqn, values, outs)
        ]
        if reason:
            was_analytic = _all_analytic([value for value in values if isinstance(value, Interval)])
            line = source_line((eqn, *callers))
            lost = was_analytic & ~_all_analytic(outs)
            obstacles.append(
                Obstacle(reason + location_of(line, reason), lost, line.is_users, describe_primitive(eqn).remedy)
            )
        return outs

    domain = Domain(apply, lambda value: not isinstance(value, Interval))
    return interpret(domain, closed.jaxpr, closed.consts, args), obstacles


def _all_analytic(values: Sequence[Interval]) -> Bool[Array, ""]:
    found = jnp.array(True)
    for value in values:
        found &= jnp.all(value.is_analytic)
    return found


def _any_flattens(values: Sequence[Any]) -> Any:
    found: Any = False
    for value in values:
        found |= getattr(value, "may_flatten", False)
    return found


def _narrowed_by_sums(eqn: Any, values: list[Any], outs: list[Interval]) -> list[Interval]:
    """Narrow intervals by what is known about the elements of a simplex, which add up to 1."""
    sums: list[Any] = [value.simplex_sum if isinstance(value, Interval) else value for value in values]
    if not any(isinstance(known, SimplexSum) for known in sums):
        return outs
    if eqn.primitive.name == "div" and all(isinstance(known, SimplexSum) for known in sums):
        return [intervals.within(outs[0], *ratio_bounds(*sums))] if sums[0].site == sums[1].site else outs
    found = sums_of_results(eqn, sums)
    return outs if found is None else [intervals.with_sum(*pair) for pair in zip(outs, found, strict=True)]


def location_of(line: SourceLine, reason: str) -> str:
    """Return where an operation stands, as the end of a sentence."""
    if not line.text:
        return ", inside the formula of the distribution"
    if not line.is_users:
        return f", inside NumPyro's code ({line.text})"
    called = f", in `{line.called}`" if line.called and f"`{line.called}`" not in reason else ""
    return f"{called} ({line.text})"


def _rule(eqn: Any) -> Callable[[Any, list[Any]], Step]:
    described = describe_primitive(eqn)
    rule = _RULES.get(eqn.primitive.name) or _RULES_OF_KINDS.get(described.kind)
    if rule is None and described.analytic_where is not None:
        rule = _function
    return rule or (lambda eqn, values: (None, described.refusal))


def _function(eqn: Any, values: list[Any]) -> Step:
    """Apply an analytic function of one number."""
    described, x = describe_primitive(eqn), values[0]
    if described.analytic_where is AnalyticWhere.EVERYWHERE:
        return [unbounded(x.is_analytic)], ""
    if described.analytic_where is AnalyticWhere.MODERATE:
        is_inside = is_moderate(x)
    else:
        is_inside = x.low > (0 if described.analytic_where is AnalyticWhere.POSITIVE else -1)
    if described.increasing is None:
        return [unbounded(x.is_analytic & is_inside)], described.refusal
    return [intervals.increasing(described.increasing, x, is_inside)], described.refusal


def _is_saturating(eqn: Any) -> bool:
    return describe_primitive(eqn).analytic_where is AnalyticWhere.MODERATE


def _saturated(eqn: Any, x: Interval) -> Interval:
    """Apply a function that is analytic at every number, although floating point rounds it to a constant far out."""
    increasing = describe_primitive(eqn).increasing
    return unbounded(x.is_analytic) if increasing is None else intervals.increasing(increasing, x)


def _identity(eqn: Any, values: list[Any]) -> Step:
    return [as_interval(value) for value in values], ""


def _linear(eqn: Any, values: list[Any]) -> Step:
    """Move or add elements: apply the primitive to each bound, and count the terms that are not analytic."""
    fixed = index_operands(eqn)
    if any(isinstance(values[i], Interval) for i in fixed):
        return None, describe_primitive(eqn).refusal
    operands = [value if i in fixed else as_interval(value) for i, value in enumerate(values)]

    def applied(read: Callable[[Interval], Array]) -> list[Array]:
        return apply_primitive(eqn, [v if i in fixed else read(v).astype(float) for i, v in enumerate(operands)])

    lows, highs = applied(lambda x: x.low), applied(lambda x: x.high)
    proved, reason = [count < 0.5 for count in applied(lambda x: ~x.is_analytic)], ""
    if eqn.primitive.name in ("gather", "dynamic_slice"):  # out of range, JAX would silently read the nearest element
        is_valid = jnp.array(True)
        for first, last in starts(eqn, values):
            is_valid &= jnp.all((first >= 0) & (first <= last))
        proved, reason = [flags & is_valid for flags in proved], "an index out of range"
    return [intervals.with_bounds(*parts) for parts in zip(lows, highs, proved, strict=True)], reason


def _choice(eqn: Any, values: list[Any]) -> Step:
    which, *cases = values
    if not isinstance(which, Interval):
        return _linear(eqn, values)
    if len(cases) != 2:
        return None, describe_primitive(eqn).refusal
    first, second = (as_interval(case) for case in cases)
    low, high, proved = (jnp.where(which.low > 0.5, b, a) for a, b in zip(first[:3], second[:3], strict=True))
    is_decided = which.is_analytic & (which.low == which.high)
    out = Interval(jnp.where(is_decided, low, -jnp.inf), jnp.where(is_decided, high, jnp.inf), proved & is_decided)
    return [out], describe_primitive(eqn).refusal


def _compare(eqn: Any, values: list[Any]) -> Step:
    name, reason = eqn.primitive.name, describe_primitive(eqn).refusal
    x, y = (as_interval(v) for v in values)
    if eqn.invars[0] is not eqn.invars[1]:
        return [intervals.decide_comparison(name, x, y)], reason
    # x == x is a test for nan: a quantity between finite bounds is not nan.
    holds = jnp.full(x.low.shape, name in ("eq", "le", "ge"))
    return [intervals.truth(holds, ~holds, intervals.finiteness(x).is_analytic)], reason


def _unary(function: Callable[[Interval], Interval]) -> Callable[[Any, list[Any]], Step]:
    return lambda eqn, values: ([function(values[0])], describe_primitive(eqn).refusal)


def _binary(function: Callable[[Interval, Interval], Interval]) -> Callable[[Any, list[Any]], Step]:
    return lambda eqn, values: (
        [function(as_interval(values[0]), as_interval(values[1]))],
        describe_primitive(eqn).refusal,
    )


def _never_lost(rule: Callable[[Any, list[Any]], Step]) -> Callable[[Any, list[Any]], Step]:
    """Return the rule of an operation that is analytic wherever its operands are."""
    return lambda eqn, values: (rule(eqn, values)[0], "")


def _mul(eqn: Any, values: list[Any]) -> Step:
    if eqn.invars[0] is eqn.invars[1]:
        return [intervals.power(values[0], 2)], ""
    return [intervals.product(as_interval(values[0]), as_interval(values[1]))], ""


def _integer_pow(eqn: Any, values: list[Any]) -> Step:
    reason = "a power that can overflow" if eqn.params["y"] > 0 else "a negative power of a quantity that may be zero"
    return [intervals.power(values[0], eqn.params["y"])], reason


def _pow(eqn: Any, values: list[Any]) -> Step:
    base, exponent = (as_interval(v) for v in values)
    return [intervals.real_power(base, exponent, not isinstance(values[1], Interval))], describe_primitive(eqn).refusal


def _clamp(eqn: Any, values: list[Any]) -> Step:
    low, x, high = (as_interval(v) for v in values)
    return [intervals.smaller(intervals.larger(x, low), high)], describe_primitive(eqn).refusal


def _logic(combine: Callable[[Any, list[Array]], Array]) -> Callable[[Any, list[Any]], Step]:
    def rule(eqn: Any, values: list[Any]) -> Step:
        if eqn.outvars[0].aval.dtype != bool:
            return None, f"bits of a quantity that depends on latents (`{eqn.primitive.name}`)"
        operands = [as_interval(value) for value in values]
        ends = [combine(eqn, [getattr(operand, end) for operand in operands]) for end in ("low", "high")]
        low, high = jnp.minimum(*ends), jnp.maximum(*ends)
        return [Interval(low, high, low == high)], describe_primitive(eqn).refusal

    return rule


def _product(eqn: Any, values: list[Any]) -> Step:
    """Multiply along axes; there are bounds where all factors are positive."""
    x = values[0]

    def multiplied(array: Array) -> Array:
        return apply_primitive(eqn, [array.astype(float)])[0]

    positive, proved = multiplied(is_positive(x)) > 0.5, multiplied(x.is_analytic) > 0.5
    low, high = (
        jnp.where(positive, multiplied(jnp.where(is_positive(x), end, 1.0)), bound)
        for end, bound in ((x.low, -jnp.inf), (x.high, jnp.inf))
    )
    return [Interval(low, high, proved)], ""


def _dot_general(eqn: Any, values: list[Any]) -> Step:
    x, y = (as_interval(v) for v in values)

    def dot(a: Array, b: Array) -> Array:
        return apply_primitive(eqn, [a.astype(float), b.astype(float)])[0]

    ones = tuple(jnp.ones(v.low.shape) for v in (x, y))
    proved = (dot(~x.is_analytic, ones[1]) + dot(ones[0], ~y.is_analytic)) < 0.5
    if all(isinstance(v, Interval) for v in values):
        return [unbounded(proved)], ""
    is_first = isinstance(values[0], Interval)
    operand, weights = (x, y.low) if is_first else (y, x.low)
    above, below = jnp.maximum(weights, 0.0), jnp.minimum(weights, 0.0)

    def weighted(w: Array, bound: Array) -> Array:
        return dot(bound, w) if is_first else dot(w, bound)

    rising = Interval(weighted(above, operand.low), weighted(above, operand.high), proved)
    falling = Interval(weighted(below, operand.high), weighted(below, operand.low), proved)
    return [intervals.add(rising, falling)], ""


def _cholesky(eqn: Any, values: list[Any]) -> Step:
    x = values[0]
    proved = jnp.broadcast_to(jnp.all(x.is_analytic, axis=(-2, -1), keepdims=True), x.low.shape)
    diagonal = jnp.broadcast_to(jnp.eye(x.low.shape[-1], dtype=bool), x.low.shape)
    tiny = jnp.finfo(
        x.low.dtype
    ).tiny  # the diagonal of a factor is positive where the factor exists, and nan elsewhere
    return [unbounded(proved)._replace(low=jnp.where(diagonal, tiny, -jnp.inf))], ""


def _triangular_solve(eqn: Any, values: list[Any]) -> Step:
    matrix, rhs = (as_interval(v) for v in values)
    diagonal = jnp.diagonal(is_nonzero(matrix), axis1=-2, axis2=-1)
    proved = jnp.all(matrix.is_analytic) & jnp.all(diagonal) & jnp.all(rhs.is_analytic)
    return [unbounded(jnp.broadcast_to(proved, rhs.low.shape))], describe_primitive(eqn).refusal


def _convert(eqn: Any, values: list[Any]) -> Step:
    old, new = np.dtype(eqn.invars[0].aval.dtype), np.dtype(eqn.params["new_dtype"])
    if old.kind == "b":
        return [values[0]], ""
    if jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating):
        if jnp.finfo(new).nmant >= jnp.finfo(old).nmant:
            return [values[0]], ""
        return None, f"rounding of a quantity that depends on latents from {old.name} to {new.name}"
    return None, f"conversion of a quantity that depends on latents to {new.name}"


_RULES_OF_KINDS: dict[Kind, Callable[[Any, list[Any]], Step]] = {
    Kind.IDENTITY: _identity,
    Kind.MOVE: _linear,
    Kind.CHOICE: _choice,
    Kind.SUM: _linear,
    Kind.COMPARISON: _compare,
}
_RULES: dict[str, Callable[[Any, list[Any]], Step]] = {
    "add": _never_lost(_binary(intervals.add)),
    "add_any": _never_lost(_binary(intervals.add)),
    "sub": _never_lost(_binary(lambda x, y: intervals.add(x, intervals.negative(y)))),
    "neg": _never_lost(_unary(intervals.negative)),
    "square": _never_lost(_unary(lambda x: intervals.power(x, 2))),
    "mul": _mul,
    "div": _binary(lambda x, y: intervals.product(x, intervals.reciprocal(y))),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "rsqrt": _unary(lambda x: intervals.reciprocal(intervals.increasing(jnp.sqrt, x, is_positive(x)))),
    "abs": _unary(intervals.absolute),
    "max": _binary(intervals.larger),
    "min": _binary(intervals.smaller),
    "clamp": _clamp,
    "is_finite": _unary(intervals.finiteness),
    "and": _logic(lambda eqn, ends: jnp.minimum(*ends)),
    "or": _logic(lambda eqn, ends: jnp.maximum(*ends)),
    "not": _logic(lambda eqn, ends: 1.0 - ends[0]),
    "reduce_and": _logic(lambda eqn, ends: jnp.min(ends[0], axis=eqn.params["axes"])),
    "reduce_or": _logic(lambda eqn, ends: jnp.max(ends[0], axis=eqn.params["axes"])),
    "reduce_prod": _product,
    "cumprod": _product,
    "dot_general": _dot_general,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
    "convert_element_type": _convert,
}
