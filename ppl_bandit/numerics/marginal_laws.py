"""Distributions of one real number per arm (Beta, Gamma, Student-t, Normal): densities, cdfs and quantiles.

Each distribution is tabulated at evenly spaced nodes of a variable v. With s the logit of a Beta variable, the log of a Gamma
variable, or the variable itself,

    s = centre + width sinh(v),

where centre is the mode of the density of s and 1 / width^2 is minus the second derivative of its log there. Near the mode the
nodes are a fraction of a standard deviation apart. In the tails, which can be a thousand times as long (a Beta of shape 0.01, a
Student-t with 2 degrees of freedom), they spread out in proportion. The density of v is smooth and vanishes at both ends, so
that the trapezoidal rule converges exponentially; running integrals are of sixth order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.runtime.jax_adapter import is_tracer

LOGIT, LOG, IDENTITY = range(3)  # the map from x to s
_NUM_CDF_NODES = 128
_NUM_AVERAGE_NODES = 20  # enough for integrals over the whole range, which converge exponentially
_NUM_QUANTILE_NODES = 192
_CUTOFF = 23.0  # nats below the largest log density at which a distribution is truncated: 1e-10
# The integral over an interval between two nodes, in steps, of the polynomial through the six nodes around it.
INTERVAL_WEIGHTS = np.array([11.0, -93.0, 802.0, 802.0, -93.0, 11.0]) / 1440.0
_NUM_NEWTON = 3
_GOLDEN_RATIO = 0.6180339887498949  # its multiples modulo 1 are evenly spread
_LARGEST_V = 30.0  # sinh(30) = 5e12


class MarginalLaw(NamedTuple):
    """The distribution of x = offset + slope h(s), one per arm; h is the logistic function, exp(power s), or the identity.

    Attributes:
        kind: which h, the same for all arms: LOGIT, LOG or IDENTITY.
        is_common: whether all arms have the same increasing map from s to x, so that arms can be compared by s.
        first, second: (A,), shapes a and b of a Beta; the shape of a Gamma; degrees of freedom, infinite for a Normal.
        centre, width: (A,), of s.
        offset, slope, power: (A,), of the map from s to x.
        low, high: (A,), v runs from -low to high.
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
    low: Float[Array, " A"]
    high: Float[Array, " A"]


class CdfTable(NamedTuple):
    """Distributions of v at evenly spaced nodes.

    Attributes:
        step: (A,), the distance between two nodes.
        mass: (A, G), density of v times step.
        below: (A, G), probability below each node.
    """

    step: Float[Array, " A"]
    mass: Float[Array, "A G"]
    below: Float[Array, "A G"]


def beta_law(a: Float[Array, " A"], b: Float[Array, " A"], offset: Any = 0.0, slope: Any = 1.0) -> MarginalLaw:
    """Return the distribution of offset + slope w, w ~ Beta(a, b)."""
    width = jnp.sqrt((a + b) / (a * b))
    low, high = _logit_reach(width, jnp.stack([a, b]), jnp.stack([b, a]))
    return _law(LOGIT, a, b, jnp.log(a / b), width, low, high, offset, slope, 1.0)


def gamma_law(
    shape: Float[Array, " A"], rate: Float[Array, " A"], offset: Any = 0.0, slope: Any = 1.0, power: Any = 1.0
) -> MarginalLaw:
    """Return the distribution of offset + slope u^power, u ~ Gamma(shape, rate)."""
    # At a distance d from the mode of log u the log density has fallen by shape (exp(d) - 1 - d), for d of either sign.
    width = 1.0 / jnp.sqrt(shape)
    furthest = _furthest(width)
    low, high = jnp.arcsinh(furthest / width), jnp.arcsinh(jnp.log1p(furthest) / width)
    return _law(LOG, shape, shape, jnp.log(shape / rate), width, low, high, offset, slope, power)


def student_t_law(df: Float[Array, " A"], loc: Float[Array, " A"], scale: Float[Array, " A"]) -> MarginalLaw:
    """Return the distribution of a Student-t variable; with infinite degrees of freedom, of a Normal one."""
    is_normal = jnp.isinf(df)
    finite = jnp.where(is_normal, 1.0, df)
    exponent = jnp.minimum(_CUTOFF / finite, _LARGEST_V)
    furthest = jnp.where(is_normal, jnp.sqrt(2.0 * _CUTOFF), jnp.sqrt(finite * jnp.expm1(2.0 * exponent)))
    reach = jnp.broadcast_to(jnp.minimum(jnp.arcsinh(furthest), _LARGEST_V), loc.shape)
    df = jnp.broadcast_to(df, loc.shape)
    return _law(IDENTITY, df, df, loc, scale, reach, reach, 0.0, 1.0, 1.0)


def _law(
    kind: int,
    first: Array,
    second: Array,
    centre: Array,
    width: Array,
    low: Array,
    high: Array,
    offset: Any,
    slope: Any,
    power: Any,
) -> MarginalLaw:
    is_common = all(_is_one_number(value) for value in (offset, slope, power)) and bool(
        np.all(np.multiply(slope, power) > 0)
    )
    offset, slope, power = (
        jnp.broadcast_to(jnp.asarray(value, centre.dtype), centre.shape) for value in (offset, slope, power)
    )
    return MarginalLaw(kind, is_common, first, second, centre, width, offset, slope, power, low, high)


def _is_one_number(value: Any) -> bool:
    """Return whether a parameter is known to be the same for all arms while tracing."""
    return not is_tracer(value) and bool(np.all(np.asarray(value) == np.ravel(value)[0]))


def _furthest(width: Float[Array, " A"]) -> Float[Array, " A"]:
    """Bound the distance at which (exp(-d) - 1 + d) / width^2 exceeds the cutoff."""
    lost = _CUTOFF * width**2
    return lost + jnp.sqrt(2.0 * lost)


def _logit_reach(
    width: Float[Array, " A"], own: Float[Array, "2 A"], other: Float[Array, "2 A"]
) -> Float[Array, "2 A"]:
    """Return how far v extends towards both sides; on each the log density of a Beta falls like -own |s|."""
    total, distance = own + other, _furthest(width)
    for _ in range(_NUM_NEWTON):  # from beyond the root of a convex function: the iterates stay beyond it
        bend = jnp.expm1(-distance)
        slope = own * (-bend * (other / total)) / (1.0 + (own / total) * bend)
        fallen = own * distance + total * jnp.log1p((own / total) * bend)
        distance = distance - jnp.where(slope > 0, (fallen - _CUTOFF) / slope, 0.0)
    reach = distance / width
    return jnp.log(reach + jnp.sqrt(reach * reach + 1.0))  # arcsinh of a positive number


def widen_points(law: MarginalLaw) -> MarginalLaw:
    """Return the law with a small positive width for arms without one, such as an arm whose price is zero.

    The width is the smallest that floats resolve next to the point; next to 0, negligible in the units of the other arms.
    """
    facts = jnp.finfo(law.centre.dtype)
    share, tiny = float(facts.eps) ** 0.6, float(facts.tiny) ** 0.8
    if law.kind == IDENTITY:
        least = share * jnp.abs(law.centre) + tiny * (jnp.max(law.width) + jnp.ptp(law.centre))
        return law._replace(width=jnp.where(law.width == 0, jnp.where(least > 0, least, 1.0), law.width))
    sizes = jnp.abs(law.slope * _image(law, law.centre, law.power))
    least = share * jnp.abs(law.offset) + tiny * (jnp.max(sizes) + jnp.ptp(law.offset))
    return law._replace(slope=jnp.where(law.slope == 0, jnp.where(least > 0, least, 1.0), law.slope))


def cdf(law: MarginalLaw, x: Float[Array, " A"]) -> Float[Array, " A"]:
    """Return the probability that each arm's variable is at most x."""
    inside = widen_points(law)
    found = cdf_and_density(inside._replace(is_common=False), tabulate(inside, _NUM_CDF_NODES), x[:, None])[0][:, 0]
    is_point, point = (law.width == 0, law.centre) if law.kind == IDENTITY else (law.slope == 0, law.offset)
    return jnp.where(is_point, (x >= point).astype(found.dtype), found)


def quantile(law: MarginalLaw, order: Float[Array, ""]) -> Float[Array, " A"]:
    """Return the quantile of each arm's variable; at order 0 or 1, the end of the truncated range."""
    last = _NUM_QUANTILE_NODES - 2
    density, step = _density_of_v(law, _NUM_QUANTILE_NODES), (law.low + law.high) / (_NUM_QUANTILE_NODES - 1)
    # The upper tail is summed from the upper end, so that small probabilities keep their digits there too.
    pieces = _interval_integrals(density)
    below = jnp.pad(jnp.cumsum(pieces, axis=1), ((0, 0), (1, 0)))
    above = jnp.pad(jnp.cumsum(pieces[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1)))
    total = below[:, -1:]

    def solve(below: Array, above: Array, mass: Array, is_rising: Array) -> Array:
        """Return the position between nodes, by Newton's method on the cubic between two of them, from the thinner tail."""
        low = jnp.where(is_rising, order, 1.0 - order)
        is_upper = low > 0.5
        target = jnp.where(is_upper, 1.0 - low, low)
        running, sign = jnp.where(is_upper, above, below), jnp.where(is_upper, -1.0, 1.0)
        num_passed = jnp.where(is_upper, jnp.sum(above > target), jnp.sum(below < low))
        index = jnp.clip(num_passed - 1, 0, last)
        ends = running[index], running[index + 1], sign * mass[index], sign * mass[index + 1]
        part = jnp.clip((target - ends[0]) / jnp.where(ends[1] == ends[0], 1.0, ends[1] - ends[0]), 0.0, 1.0)
        for _ in range(6):
            value, slope = hermite(part, *ends)
            part = jnp.clip(part - (value - target) / jnp.where(slope == 0, 1.0, slope), 0.0, 1.0)
        return index + part

    position = jax.vmap(solve)(below / total, above / total, density / total, law.slope * law.power > 0)
    return _from_v(law, (position * step - law.low)[:, None], to_x=True)[:, 0]


def average(law: MarginalLaw, values: Float[Array, "G A"]) -> Float[Array, " A"]:
    """Average a function of each arm's variable, given at `average_nodes`, over its distribution."""
    mass = tabulate(law, _NUM_AVERAGE_NODES).mass
    return jnp.sum(jnp.where(mass > 0, mass * values.T, 0.0), axis=1)


def node_values(law: MarginalLaw, num_nodes: int) -> Float[Array, "A G"]:
    """Return the nodes of `tabulate` on the common scale."""
    return to_common_scale(law, _nodes(law, num_nodes))


def average_nodes(law: MarginalLaw) -> Float[Array, "G A"]:
    """Return each arm's variable at the nodes over which `average` averages."""
    return _from_v(law, _nodes(law, _NUM_AVERAGE_NODES), to_x=True).T


def tabulate(law: MarginalLaw, num_nodes: int) -> CdfTable:
    """Tabulate each arm's distribution at evenly spaced nodes of v."""
    density = _density_of_v(law, num_nodes)
    below = jnp.pad(jnp.cumsum(_interval_integrals(density), axis=1), ((0, 0), (1, 0)))
    total = below[:, -1:]
    return CdfTable((law.low + law.high) / (num_nodes - 1), density / total, below / total)


def _interval_integrals(density: Float[Array, "A G"]) -> Float[Array, "A G-1"]:
    """Integrate a density that is 0 beyond the nodes over each interval between two of them, in steps."""
    num_intervals = density.shape[1] - 1
    padded = jnp.pad(density, ((0, 0), (2, 2)))
    return sum(weight * padded[:, first : first + num_intervals] for first, weight in enumerate(INTERVAL_WEIGHTS))


def _density_of_v(law: MarginalLaw, num_nodes: int) -> Float[Array, "A G"]:
    """Return the density of v at the nodes, up to a factor of each arm."""
    rise = jnp.exp(_nodes(law, num_nodes))
    fall = 1.0 / rise
    return jnp.exp(log_density(law, 0.5 * (rise - fall))) * (rise + fall)


def _nodes(law: MarginalLaw, num_nodes: int) -> Float[Array, "A G"]:
    step = (law.low + law.high) / (num_nodes - 1)
    return step[:, None] * np.arange(num_nodes, dtype=step.dtype) - law.low[:, None]


def log_density(law: MarginalLaw, z: Float[Array, "A G"]) -> Float[Array, "A G"]:
    """Return the log density of s = centre + width z, less its largest value."""
    d = law.width[:, None] * z
    first, second = law.first[:, None], law.second[:, None]
    is_double = (
        d.dtype == jnp.float64
    )  # then these are accurate to 1e-16 nats per unit of shape, and take half the time
    expm1 = (lambda d: jnp.exp(d) - 1.0) if is_double else jnp.expm1
    log1p = (lambda x: jnp.log(1.0 + x)) if is_double else jnp.log1p
    if law.kind == LOGIT:
        # The larger of two exponentials is factored out of the logarithm on either side, so that neither overflows.
        total, towards = first + second, jnp.where(d > 0, second, first)
        return -towards * jnp.abs(d) - total * log1p((towards / total) * expm1(-jnp.abs(d)))
    if law.kind == LOG:
        return first * (d - expm1(jnp.minimum(d, 700.0)))
    finite = jnp.where(jnp.isinf(first), 1.0, first)
    return jnp.where(jnp.isinf(first), -0.5 * z**2, -0.5 * (finite + 1.0) * log1p(z**2 / finite))


def log_density_and_slope(law: MarginalLaw, s: Float[Array, "#A n"]) -> tuple[Float[Array, "A n"], Float[Array, "A n"]]:
    """Return the log density of s, less its largest value, and its derivative."""
    first, second, d = law.first[:, None], law.second[:, None], s - law.centre[:, None]
    z, is_double = d / law.width[:, None], d.dtype == jnp.float64
    if law.kind == LOGIT and is_double:  # one exponential and one logarithm for all arms whose s is the same
        total, centre = first + second, law.centre[:, None]
        height = first * d - total * (jax.nn.softplus(s) - jax.nn.softplus(centre))
        return height, first - total * jax.nn.sigmoid(s)
    if law.kind == LOGIT:
        return log_density(law, z), first - (first + second) * jax.nn.sigmoid(s)
    if law.kind == LOG:
        growth = jnp.exp(jnp.minimum(d, 700.0)) - 1.0 if is_double else jnp.expm1(jnp.minimum(d, 80.0))
        return first * (d - growth), -first * growth
    finite = jnp.where(jnp.isinf(first), 1.0, first)
    pull = jnp.where(jnp.isinf(first), z, (finite + 1.0) * z / (finite + z**2))
    return log_density(law, z), -pull / law.width[:, None]


def staggered_nodes(
    law: MarginalLaw, first: Float[Array, " A"], last: Float[Array, " A"], num_nodes: int
) -> Float[Array, "A G"]:
    """Return nodes of each arm between two values of its v, on the common scale.

    The nodes of arms are shifted against each other: equal arms would share theirs otherwise.
    """
    shifts = np.arange(1, law.centre.size + 1) * _GOLDEN_RATIO % 1.0
    parts = jnp.asarray((np.arange(num_nodes) + shifts[:, None]) / num_nodes, law.centre.dtype)
    return to_common_scale(law, first[:, None] + (last - first)[:, None] * parts)


def to_common_scale(law: MarginalLaw, v: Float[Array, "A G"]) -> Float[Array, "A G"]:
    """Return numbers by which arms can be compared: s where all arms have the same map from s to x, else x."""
    return _from_v(law, v, to_x=not law.is_common)


def _from_v(law: MarginalLaw, v: Float[Array, "A G"], *, to_x: bool) -> Float[Array, "A G"]:
    rise = jnp.exp(v)
    s = law.centre[:, None] + law.width[:, None] * (0.5 * (rise - 1.0 / rise))
    return law.offset[:, None] + law.slope[:, None] * _image(law, s, law.power[:, None]) if to_x else s


def _image(law: MarginalLaw, s: Array, power: Array) -> Array:
    """Return h(s) of x = offset + slope h(s)."""
    return (jax.nn.sigmoid, lambda s: jnp.exp(power * s), lambda s: s)[law.kind](s)


def _to_s(law: MarginalLaw, x: Float[Array, "#A n"]) -> tuple[Array, Array]:
    """Return s at x, and the absolute value of ds/dx, 0 outside of the support."""
    slope, power = law.slope[:, None], law.power[:, None]
    inner = (x - law.offset[:, None]) / slope
    if law.kind == IDENTITY:
        return inner, 1.0 / jnp.abs(slope)
    is_inside = (inner > 0) & (inner < 1) if law.kind == LOGIT else inner > 0
    safe = jnp.where(is_inside, inner, 0.5)
    if law.kind == LOGIT:
        s = jnp.where(is_inside, jnp.log(safe) - jnp.log1p(-safe), jnp.where(inner <= 0, -jnp.inf, jnp.inf))
        speed = 1.0 / jnp.abs(safe * (1.0 - safe) * slope)
    else:
        s = jnp.where(is_inside, jnp.log(safe), -jnp.inf) / power
        speed = 1.0 / jnp.abs(safe * slope * power)
    return s, jnp.where(is_inside, speed, 0.0)


def to_v(law: MarginalLaw, values: Float[Array, "#A n"]) -> tuple[Float[Array, "A n"], Float[Array, "A n"]]:
    """Return v at values on the common scale, and the absolute value of its derivative."""
    s, speed = (values, 1.0) if law.is_common else _to_s(law, values)
    z = (s - law.centre[:, None]) * (1.0 / law.width[:, None])
    size = jnp.abs(z)
    stretch = jnp.sqrt(size * size + 1.0)
    return jnp.copysign(jnp.log(size + stretch), z), speed / (law.width[:, None] * stretch)


def to_own_scale(law: MarginalLaw, values: Float[Array, " n"]) -> tuple[Float[Array, "#A n"], Float[Array, "#A n"]]:
    """Return each arm's s at values on the common scale, within its range, and the absolute value of its derivative."""
    if law.is_common:
        return values[None], jnp.ones_like(values)[None]
    s, speed = _to_s(law, values[None])
    low, high = (law.centre + law.width * jnp.sinh(v) for v in (-law.low, law.high))
    inside = jnp.clip(s, low[:, None], high[:, None])
    return inside, jnp.where(s == inside, speed, 0.0)


def common_image(law: MarginalLaw, values: Float[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return x at values on the common scale, and its derivative."""
    if not law.is_common:
        return values, jnp.ones_like(values)
    of_one = lambda s: law.offset[0] + law.slope[0] * _image(law, s, law.power[0])  # noqa: E731
    return jax.jvp(of_one, (values,), (jnp.ones_like(values),))


def common_preimage(law: MarginalLaw, x: Float[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Return the value on the common scale at x, infinite beyond the support, and its derivative, 0 there."""
    if not law.is_common:
        return x, jnp.ones_like(x)
    first = law._replace(offset=law.offset[:1], slope=law.slope[:1], power=law.power[:1])
    s, speed = _to_s(first, x[None])
    return s[0], jnp.broadcast_to(speed, s.shape)[0]


def cdf_and_density(
    law: MarginalLaw, table: CdfTable, values: Float[Array, "#A n"]
) -> tuple[Float[Array, "A n"], Float[Array, "A n"]]:
    """Interpolate each arm's cdf, and its derivative, at values on the common scale."""
    num_nodes = table.below.shape[1]
    v, speed = to_v(law, values)
    per_step = 1.0 / table.step[:, None]
    position = jnp.clip((v + law.low[:, None]) * per_step, 0.0, num_nodes - 1.0)
    index = jnp.minimum(position.astype(jnp.int32), num_nodes - 2)
    ends = [
        jnp.take_along_axis(values, at, axis=1, mode="promise_in_bounds")
        for values in (table.below, table.mass)
        for at in (index, index + 1)
    ]
    below, mass = hermite(position - index, *ends)
    below = jnp.clip(below, 0.0, 1.0)
    is_inside = (v > -law.low[:, None]) & (v < law.high[:, None])
    density = jnp.where(is_inside, jnp.maximum(mass, 0.0) * speed * per_step, 0.0)
    return jnp.where((law.slope * law.power > 0)[:, None], below, 1.0 - below), density


def hermite(part: Array, start: Array, end: Array, slope: Array, end_slope: Array) -> tuple[Array, Array]:
    """Interpolate between two values with given slopes, and return the derivative too; `part` runs from 0 to 1."""
    rise = end - start
    square, cube = 3.0 * rise - 2.0 * slope - end_slope, slope + end_slope - 2.0 * rise
    value = start + part * (slope + part * (square + part * cube))
    return value, slope + part * (2.0 * square + 3.0 * part * cube)
