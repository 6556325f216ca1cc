"""Laws of one real number per arm - Beta, Gamma, Student-t, Normal: densities, distribution functions and quantiles.

All integrals are sums over evenly spaced nodes of one variable v, in which every one of these laws is smooth and has fallen
to nothing at both ends: with s the logit of a Beta variable, the log of a Gamma variable, or the variable itself,

    s = centre + width sinh(v),

width the curvature of the log density at its mode. Near the mode nodes are a fraction of a standard deviation apart; in the
tails, which may be a thousand times as long (a Beta of shape 0.01, a Student-t of 2 degrees of freedom), they spread out in
proportion. The plain sum of such a function converges exponentially; running sums are corrected to fourth order.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.numerics.log_densities import LOG, LOGIT, PLAIN, log_density_in_single, shape_of
from ppl_bandit.numerics.log_products import computed_once
from ppl_bandit.runtime.jax_adapter import is_tracer

__all__ = [
    "LOG",
    "LOGIT",
    "LOST",
    "PLAIN",
    "MarginalLaw",
    "Nodes",
    "all_below",
    "average",
    "beta_law",
    "cdf",
    "comparable",
    "gamma_law",
    "log_density",
    "node_values",
    "nodes_of",
    "quantile",
    "reach",
    "student_t_law",
    "value_of",
    "without_points",
]

_NUM_NODES = 128
_AVERAGE_NODES = 20  # whole sums converge exponentially
_QUANTILE_NODES = 192
LOST = 23.0  # nats by which a density has fallen where it is cut off: 1e-10
_NUM_NEWTON = 3
_WIDEST = 30.0  # of v: beyond it sinh(v) tells nothing more
_STRIDE = 8
_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round to 10 bits


class MarginalLaw(NamedTuple):
    """The law of x = offset + slope h(s), one per arm, with h the logistic function, exp(power s), or s itself.

    Attributes:
        kind: which h, for all arms: 0 logistic, 1 exponential, 2 identity.
        is_common: whether all arms have the same increasing map from s to x, so that comparing s will do.
        first, second: (A,), shapes a and b of a Beta; the shape of a Gamma; degrees of freedom, infinite for a Normal.
        centre, width: (A,), of the coordinate s.
        offset, slope, power: (A,), of the map from s to x.
        reach: (A,), v runs from -reach to reach.
    """

    kind: int
    is_common: bool
    first: Float[Array, " A"]
    second: Float[Array, " A"]
    centre: Float[Array, " A"]
    width: Float[Array, " A"]
    offset: Float[Array, " A"]
    slope: Float[Array, " A"]
    power: Float[Array, " A"]
    reach: Float[Array, " A"]


class Nodes(NamedTuple):
    """A law at its nodes: spacing, v, density times spacing, the probability below and above each node, and the cubics in
    between: coefficients of the probability below, by powers of the part of the interval that is passed.
    """

    step: Float[Array, " A"]
    v: Float[Array, "A G"]
    mass: Float[Array, "A G"]
    below: Float[Array, "A G"]
    above: Float[Array, "A G"]
    cubics: Float[Array, "A G-1 4"]


def beta_law(a: Float[Array, " A"], b: Float[Array, " A"], offset: Any = 0.0, slope: Any = 1.0) -> MarginalLaw:
    """Return the law of offset + slope w, w ~ Beta(a, b)."""
    information = a * b / (a + b)
    return _law(LOGIT, a, b, jnp.log(a / b), information, offset, slope, 1.0)


def gamma_law(
    shape: Float[Array, " A"], rate: Float[Array, " A"], offset: Any = 0.0, slope: Any = 1.0, power: Any = 1.0
) -> MarginalLaw:
    """Return the law of offset + slope u^power, u ~ Gamma(shape, rate)."""
    return _law(LOG, shape, shape, jnp.log(shape / rate), shape, offset, slope, power)


def student_t_law(df: Float[Array, " A"], loc: Float[Array, " A"], scale: Float[Array, " A"]) -> MarginalLaw:
    """Return the law of a Student-t variable; with infinite degrees of freedom, of a Normal one."""
    one, is_normal = jnp.ones_like(loc), jnp.isinf(df)
    finite = jnp.where(is_normal, 1.0, df)
    exponent = jnp.minimum(LOST / finite, _WIDEST)
    furthest = jnp.where(is_normal, jnp.sqrt(2.0 * LOST), jnp.sqrt(finite * jnp.expm1(2.0 * exponent)))
    reach = jnp.minimum(jnp.arcsinh(furthest), _WIDEST)
    return MarginalLaw(PLAIN, True, jnp.broadcast_to(df, loc.shape), one, loc, scale, 0.0 * one, one, one, reach)


def _law(
    kind: int, first: Any, second: Any, centre: Any, information: Any, offset: Any, slope: Any, power: Any
) -> MarginalLaw:
    # Both log densities are concave with a third derivative no larger than the second, so that they fall at a distance d
    # by at least information (exp(-d) - 1 + d): by d^2 / 3 of it up to d = 1, and by d - 1 of it beyond.
    near = jnp.sqrt(3.0 * LOST / information)
    furthest = jnp.where(near <= 1.0, near, 1.0 + LOST / information)
    width = 1.0 / jnp.sqrt(information)
    is_common = all(_is_same(value) for value in (offset, slope, power)) and bool(np.all(np.multiply(slope, power) > 0))
    offset, slope, power = (jnp.broadcast_to(value, first.shape) for value in (offset, slope, power))
    return MarginalLaw(
        kind, is_common, first, second, centre, width, offset, slope, power, jnp.arcsinh(furthest / width)
    )


def _is_same(value: Any) -> bool:
    """Tell whether a number is the same for all arms, as far as is known before running."""
    return not is_tracer(value) and bool(np.all(np.asarray(value) == np.ravel(value)[0]))


def without_points(law: MarginalLaw) -> MarginalLaw:
    """Return the law with a little width for arms that have none: a linear form of a context of zeros, a price of zero.

    As little as floats can tell from the point itself; next to 0, nothing to speak of in the units of the other arms.
    """
    facts = jnp.finfo(law.centre.dtype)
    share, nothing = float(facts.eps) ** 0.6, float(facts.tiny) ** 0.8
    if law.kind == PLAIN:
        least = share * jnp.abs(law.centre) + nothing * (jnp.max(law.width) + jnp.ptp(law.centre))
        return law._replace(width=jnp.where(law.width == 0, jnp.where(least > 0, least, 1.0), law.width))
    sizes = jnp.abs(_to_x(law, jnp.zeros((law.centre.size, 1)))[:, 0] - law.offset)
    least = share * jnp.abs(law.offset) + nothing * (jnp.max(sizes) + jnp.ptp(law.offset))
    return law._replace(slope=jnp.where(law.slope == 0, jnp.where(least > 0, least, 1.0), law.slope))


def cdf(law: MarginalLaw, x: Float[Array, " A"]) -> Float[Array, " A"]:
    """Return the probability that each arm's variable is at most x."""
    inside = without_points(law)
    found = _below(inside, nodes_of(inside, _NUM_NODES), x, is_x=True)
    is_point, point = (law.width == 0, law.centre) if law.kind == PLAIN else (law.slope == 0, law.offset)
    return jnp.where(is_point, (x >= point).astype(found.dtype), found)


def quantile(law: MarginalLaw, order: Float[Array, ""]) -> Float[Array, " A"]:
    """Return the quantile of each arm's variable; at order 0 or 1, the end of where its probability is above 1e-10."""
    nodes = nodes_of(law, _QUANTILE_NODES)
    rises = law.slope * law.power > 0

    def solve(below: Array, above: Array, mass: Array, is_rising: Array) -> Array:
        """Return v in nodes, by Newton's method on the cubic between two of them, from the tail that is thinner."""
        low = jnp.where(is_rising, order, 1.0 - order)
        is_upper = low > 0.5
        target = jnp.where(is_upper, 1.0 - low, low)
        running, sign = jnp.where(is_upper, above, below), jnp.where(is_upper, -1.0, 1.0)
        index = jnp.clip(jnp.sum(below < low) - 1, 0, below.size - 2)
        index = jnp.where(is_upper, jnp.clip(jnp.sum(above > target) - 1, 0, below.size - 2), index)
        ends = running[index], running[index + 1], sign * mass[index], sign * mass[index + 1]
        part = jnp.clip((target - ends[0]) / jnp.where(ends[1] == ends[0], 1.0, ends[1] - ends[0]), 0.0, 1.0)
        for _ in range(6):
            value, slope = jax.jvp(lambda part: _cubic(part, *ends), (part,), (jnp.ones_like(part),))
            part = jnp.clip(part - (value - target) / jnp.where(slope == 0, 1.0, slope), 0.0, 1.0)
        return index + part

    position = jax.vmap(solve)(nodes.below, nodes.above, nodes.mass, rises)
    return _to_x(law, (position * nodes.step - law.reach)[:, None])[:, 0]


def average(law: MarginalLaw, values: Float[Array, "G A"]) -> Float[Array, " A"]:
    """Average a function of each arm's variable, given at its nodes (`node_values`), over its law."""
    return _weighted(nodes_of(law, _AVERAGE_NODES).mass, values.T)


def _weighted(mass: Float[Array, "A G"], values: Float[Array, "A G"]) -> Float[Array, " A"]:
    return jnp.sum(jnp.where(mass > 0, mass * values, 0.0), axis=1)


def node_values(law: MarginalLaw) -> Float[Array, "G A"]:
    """Return each arm's variable at the nodes over which `average` averages."""
    return _to_x(law, nodes_of(law, _AVERAGE_NODES).v).T


def nodes_of(law: MarginalLaw, num_nodes: int, *, in_single: bool = False) -> Nodes:
    """Return each arm's law at evenly spaced values of v.

    Args:
        in_single: whether densities are computed in single precision, which is wrong by at most 1e-5 of their largest.
    """
    step = 2.0 * law.reach / (num_nodes - 1)
    v = step[:, None] * jnp.arange(num_nodes) - law.reach[:, None]
    density = _density_in_single(law, v) if in_single else _density(law, step, num_nodes)
    # Sums and running sums as products of matrices: of many laws at once, a third of the time.
    upwards, downwards = _running_weights(num_nodes)
    sums = jnp.matmul(density, upwards.astype(density.dtype), precision=_HIGHEST)
    total, none = sums[:, -2:-1], jnp.zeros_like(sums[:, :1])
    below = jnp.concatenate([none, sums[:, :-1] / total], axis=1)
    above = jnp.matmul(density, downwards.astype(density.dtype), precision=_HIGHEST) / total
    above = jnp.concatenate([above, none], axis=1)
    padded = jnp.pad(density, ((0, 0), (1, 1)))
    pieces = (13.0 * (density[:, :-1] + density[:, 1:]) - padded[:, :-3] - padded[:, 3:]) / (24.0 * total)
    mass = density / sums[:, -1:]
    left, right, rise = mass[:, :-1], mass[:, 1:], pieces
    cubics = jnp.stack([below[:, :-1], left, 3.0 * rise - 2.0 * left - right, left + right - 2.0 * rise], axis=-1)
    return Nodes(step, v, mass, below, above, cubics)


@functools.cache
def _running_weights(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what makes of the densities at nodes the integrals from the first to each later one, in steps, and their sum.

    And those from each to the last. On an interval by the cubic through the four nodes about it; beyond the ends is nothing.
    """
    pieces = np.zeros((num_nodes + 2, num_nodes - 1))
    for interval in range(num_nodes - 1):
        pieces[interval : interval + 4, interval] = np.array([-1.0, 13.0, 13.0, -1.0]) / 24.0
    pieces = pieces[1:-1]
    upwards = pieces @ np.triu(np.ones((num_nodes - 1, num_nodes - 1)))
    downwards = pieces @ np.tril(np.ones((num_nodes - 1, num_nodes - 1)))
    return np.concatenate([upwards, np.ones((num_nodes, 1))], axis=1), downwards


def _density(law: MarginalLaw, step: Float[Array, " A"], num_nodes: int) -> Float[Array, "A G"]:
    """Return the density of v at nodes, up to a factor."""
    rise = _exponentials(step, law.reach, num_nodes)
    fall = 1.0 / rise
    return jnp.exp(log_density(law, 0.5 * (rise - fall))) * 0.5 * (rise + fall)


def _density_in_single(law: MarginalLaw, v: Float[Array, "A G"]) -> Float[Array, "A G"]:
    rise = jnp.exp(v.astype(jnp.float32))
    fall = 1.0 / rise
    shape = shape_of(*(field[:, None] for field in (law.first, law.second, law.width)))
    height = jnp.exp(log_density_in_single(law.kind, shape, 0.5 * (rise - fall)))
    return (height * (0.5 * (rise + fall))).astype(v.dtype)


def _exponentials(step: Float[Array, " A"], reach: Float[Array, " A"], num_nodes: int) -> Float[Array, "A G"]:
    """Return exp(step i - reach) for i = 0, 1, ...: products of a few exponentials, which cost several times as much."""
    coarse = jnp.exp(_STRIDE * step[:, None] * jnp.arange(-(-num_nodes // _STRIDE)) - reach[:, None])
    fine = jnp.exp(step[:, None] * jnp.arange(_STRIDE))
    return (coarse[:, :, None] * fine[:, None, :]).reshape(step.size, -1)[:, :num_nodes]


def reach(law: MarginalLaw, side: Float[Array, " A"]) -> Float[Array, " A"]:
    """Return how far v goes to one side of the centre, up or down in s, until the density has fallen by `LOST` nats."""
    if law.kind == PLAIN:
        return law.reach
    # A Gamma's falls by shape (exp(d) - 1 - d) upwards and by shape (exp(-d) - 1 + d) downwards. The second is a bound for a
    # Beta's too, whose log density has a third derivative no larger than the second.
    lost = LOST * law.width**2
    distance = lost + jnp.sqrt(2.0 * lost)
    if law.kind == LOG:
        distance = jnp.where(side > 0, jnp.log1p(distance), distance)
    else:
        own, other = jnp.where(side > 0, law.second, law.first), jnp.where(side > 0, law.first, law.second)
        total = own + other
        for _ in range(_NUM_NEWTON):  # from beyond the root of a convex function: it never falls short
            bend = jnp.expm1(-distance)
            below = 1.0 + (own / total) * bend
            slope = own * (-bend * (other / total)) / below
            fallen = own * distance + total * jnp.log1p((own / total) * bend)
            distance = distance - jnp.where(slope > 0, (fallen - LOST) / slope, 0.0)
    return jnp.arcsinh(distance / law.width)


def log_density(law: MarginalLaw, z: Float[Array, "A G"]) -> Float[Array, "A G"]:
    """Return the log density of s = centre + width z, less its largest value."""
    d = law.width[:, None] * z
    first, second = law.first[:, None], law.second[:, None]
    if law.kind == LOGIT:
        # Towards either side the larger term is taken out of the logarithm, so that nothing overflows.
        total, towards = first + second, jnp.where(d > 0, second, first)
        return -towards * jnp.abs(d) - total * jnp.log1p((towards / total) * jnp.expm1(-jnp.abs(d)))
    if law.kind == LOG:
        return first * (d - jnp.expm1(jnp.minimum(d, 700.0)))
    finite = jnp.where(jnp.isinf(first), 1.0, first)
    return jnp.where(jnp.isinf(first), -0.5 * z**2, -0.5 * (finite + 1.0) * jnp.log1p(z**2 / finite))


def comparable(law: MarginalLaw, v: Float[Array, "A G"]) -> Float[Array, "A G"]:
    """Return a number by which arms can be compared: s where it will do, else x."""
    return _to_s(law, v) if law.is_common else _to_x(law, v)


def value_of(law: MarginalLaw, comparable: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return x at numbers by which arms are compared."""
    return law.offset[0] + law.slope[0] * _image(law, comparable, law.power[0]) if law.is_common else comparable


def _to_s(law: MarginalLaw, v: Float[Array, "A G"]) -> Float[Array, "A G"]:
    return law.centre[:, None] + law.width[:, None] * _sinh(v)


def _sinh(v: Array) -> Array:
    return 0.5 * (
        jnp.exp(v) - jnp.exp(-v)
    )  # errors of one rounding are harmless, and the library's costs twice as much


def _to_x(law: MarginalLaw, v: Float[Array, "A G"]) -> Float[Array, "A G"]:
    return law.offset[:, None] + law.slope[:, None] * _image(law, _to_s(law, v), law.power[:, None])


def _image(law: MarginalLaw, s: Array, power: Array) -> Array:
    """Return h(s) of x = offset + slope h(s)."""
    return (jax.nn.sigmoid, lambda s: jnp.exp(power * s), lambda s: s)[law.kind](s)


def _from_x(law: MarginalLaw, x: Array) -> Array:
    """Return s at x; the last axis runs over arms."""
    inner = (x - law.offset) / law.slope
    if law.kind == LOGIT:
        s = jnp.log(inner) - jnp.log1p(-inner)
        return jnp.where(inner <= 0, -jnp.inf, jnp.where(inner >= 1, jnp.inf, s))
    if law.kind == LOG:
        return jnp.where(inner > 0, jnp.log(jnp.where(inner > 0, inner, 1.0)), -jnp.inf) / law.power
    return inner


def all_below(law: MarginalLaw, nodes: Nodes, values: Float[Array, " n"]) -> Float[Array, "n A"]:
    """Interpolate all arms' distribution functions at the same values, with one gather of rows."""
    num_arms, num_pieces, _ = nodes.cubics.shape
    index, part = _position(law, nodes, values[:, None])
    rows = computed_once(nodes.cubics.reshape(-1, 4))
    cubic = rows.at[index + num_pieces * jnp.arange(num_arms, dtype=index.dtype)].get(mode="promise_in_bounds")
    return _interpolated(law, cubic, part)


def _below(law: MarginalLaw, nodes: Nodes, value: Float[Array, " A"], *, is_x: bool = False) -> Float[Array, " A"]:
    """Interpolate the probability that each arm's variable is at most a comparable value, or at most x."""
    index, part = _position(law, nodes, value, is_x=is_x)
    cubic = jnp.take_along_axis(nodes.cubics, index[:, None, None], axis=1, mode="promise_in_bounds")[:, 0]
    return _interpolated(law, cubic, part)


def _position(law: MarginalLaw, nodes: Nodes, value: Array, *, is_x: bool = False) -> tuple[Array, Array]:
    """Return the interval between nodes that a value falls into, and the part of it that is passed."""
    s = value if law.is_common and not is_x else _from_x(law, value)
    last = nodes.v.shape[1] - 1
    # From here on in single precision, which is wrong by less than 1e-4 of an interval and costs a third.
    z = ((s - law.centre) * (1.0 / law.width)).astype(jnp.float32)
    size = jnp.abs(z)
    v = jnp.copysign(jnp.log(size + jnp.sqrt(size * size + 1.0)), z)
    position = jnp.clip(v * (1.0 / nodes.step).astype(jnp.float32) + 0.5 * last, 0.0, float(last))
    index = jnp.clip(position.astype(jnp.int32), 0, last - 1)
    return index, (position - index).astype(value.dtype)


def _interpolated(law: MarginalLaw, cubic: Float[Array, "... 4"], part: Float[Array, "..."]) -> Float[Array, "..."]:
    lower = cubic[..., 0] + part * (cubic[..., 1] + part * (cubic[..., 2] + part * cubic[..., 3]))
    lower = jnp.clip(lower, 0.0, 1.0)
    return jnp.where(law.slope * law.power > 0, lower, 1.0 - lower)


def _cubic(part: Array, start: Array, end: Array, slope: Array, end_slope: Array) -> Array:
    """Interpolate between two values with given slopes; `part` runs from 0 to 1."""
    rest = 1.0 - part
    return rest**2 * ((1.0 + 2.0 * part) * start + part * slope) + part**2 * (
        (1.0 + 2.0 * rest) * end - rest * end_slope
    )
