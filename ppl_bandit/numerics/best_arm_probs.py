"""The probability that each of several independent arms has the largest expected reward, and moments given the best arm.

With F_a the posterior cdf of arm a's expected reward,

    P(a is best) = integral of prod_{b != a} F_b(x) dF_a(x).

All integrals use one grid: nodes of every arm, sorted together, so that an arm that is a thousand times as narrow as another is
resolved too. On each interval of the grid the F are cubics through their values and derivatives at its ends.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.marginal_laws import (
    IDENTITY,
    LOG,
    LOGIT,
    MarginalLaw,
    cdf_and_density,
    node_values,
    staggered_nodes,
    tabulate,
    to_common_scale,
    to_v,
    widen_points,
)
from ppl_bandit.types import BestArmMoments

_NUM_TABLE_NODES = {LOGIT: 36, LOG: 48, IDENTITY: 40}  # of each arm's cdf
_NUM_TABLE_NODES_OF_TWO = {
    **_NUM_TABLE_NODES,
    IDENTITY: 96,
}  # so that the smaller of two probabilities keeps its digits
_MAX_NODES = 192  # nodes of all arms together, all of which are used
_NUM_CHOSEN_NODES = 144  # of more nodes
_NUM_NODES = {LOGIT: 14, LOG: 20, IDENTITY: 16}  # of an arm, in the grid
_LARGEST_V = 7.0  # of a Student-t law's table: 550 widths from its centre; nodes of the grid reach half as far
_NUM_COARSE_NODES = 64  # that tell roughly how often each of many arms wins
_NEGLIGIBLE = 1e-12  # probability of a range of values that the grid may leave out
_HIGHEST = jax.lax.Precision.HIGHEST  # the default precision of a matrix product is 10 bits on some devices


def best_arm_probs(law: MarginalLaw, allowed: Bool[Array, " A"] | None = None) -> Float[Array, " A"]:
    """Compute the probability that each arm's variable is the largest, for independent arms.

    The error is at most 1e-4; 1e-3 for Student-t laws with 1 to 6 degrees of freedom and for shapes below .02.

    Args:
        allowed: arms that compete; the others get 0.
    """
    if law.centre.size == 1:
        return jnp.ones(1, law.centre.dtype)
    allowed = jnp.ones(law.centre.size, bool) if allowed is None else allowed
    law = widen_points(law)
    if law.centre.size == 2 and law.is_common:
        return jnp.where(jnp.all(allowed), _probs_of_two(law), allowed.astype(law.centre.dtype))
    return jnp.sum(_integrate(law, allowed)[0], axis=1)


def best_arm_moments(law: MarginalLaw, allowed: Bool[Array, " A"] | None = None) -> BestArmMoments:
    """Compute what the identity of the best arm implies for the means of all arms, for independent arms.

    Given that the largest variable is x and belongs to arm b, arm a falls short of x by E max(x - theta_a, 0) / F_a(x) on
    average. The error is 1%; 10% for arms that win once in a thousand draws.

    Args:
        allowed: arms that compete; all entries of the others are 0.
    """
    allowed = jnp.ones(law.centre.size, bool) if allowed is None else allowed
    law = widen_points(law)._replace(is_common=False)  # the common scale is then that of rewards
    won, x, below, density, win_density = _integrate(law, allowed, is_whole=True)
    length = jnp.diff(x)
    # The probability of an interval is divided between its ends so that the mean of x is right.
    start, end = limited_slopes(won, win_density, length)
    at_end = 0.5 * won + (end - start) / 12.0
    wins = jnp.pad(won - at_end, ((0, 0), (0, 1))) + jnp.pad(at_end, ((0, 0), (1, 0)))
    mean = jnp.sum(wins * x)
    start, end = limited_slopes(jnp.diff(below), density, length)
    pieces = length * (0.5 * (below[:, 1:] + below[:, :-1]) + (start - end) / 12.0)
    excess = jnp.pad(jnp.cumsum(pieces, axis=1), ((0, 0), (1, 0)))  # E max(x - theta_a, 0)
    shortfalls = jnp.where(below > 0, excess / jnp.where(below > 0, below, 1.0), 0.0)
    gaps = jnp.matmul(wins, jnp.clip(shortfalls, 0.0, x - x[0]).T, precision=_HIGHEST)
    is_pair = allowed[:, None] & allowed & ~np.eye(allowed.size, dtype=bool)
    return BestArmMoments(jnp.sum(wins, axis=1), jnp.sum(wins * (x - mean), axis=1), jnp.where(is_pair, gaps, 0.0))


def _probs_of_two(law: MarginalLaw) -> Float[Array, "2"]:
    """Compute both probabilities for two arms on one scale, in a third of the time of the general integral.

    The probability of the narrower arm is the mean of the other arm's cdf over it: one sum over its nodes, because that cdf is
    smooth on the scale of the narrower arm.
    """
    # Between the quartiles a Student-t with n degrees of freedom is wider than a Normal by a factor 1 + 1 / 2n.
    spread = law.width * (1.0 + 0.5 / law.first) if law.kind == IDENTITY else law.width
    is_swapped = spread[0] > spread[1]

    def swap(leaf: Any) -> Any:
        return jnp.where(is_swapped, leaf[::-1], leaf) if jnp.ndim(leaf) else leaf

    law = jax.tree.map(swap, law)
    num_nodes = _NUM_TABLE_NODES_OF_TWO[law.kind]
    table, values = tabulate(law, num_nodes), node_values(law, num_nodes)[:1]
    wider, its_table = (jax.tree.map(lambda leaf: leaf[1:] if jnp.ndim(leaf) else leaf, each) for each in (law, table))
    first = jnp.sum(table.mass[0] * cdf_and_density(wider, its_table, values)[0][0])
    return swap(jnp.stack([first, 1.0 - first]))


def _integrate(law: MarginalLaw, allowed: Bool[Array, " A"], *, is_whole: bool = False) -> tuple[Array, ...]:
    """Integrate prod_{b != a} F_b dF_a over each interval of a grid.

    Args:
        is_whole: whether the grid starts at the lower end of all arms, and not where the largest variable can be.

    Returns:
        The probability that each arm is best with a value in each interval, (A, n - 1); the grid, (n,); and on it, (A, n), each
        arm's cdf, its density, and the density of its being best.
    """
    if law.kind == IDENTITY:
        low, high = (jnp.minimum(reach, _LARGEST_V) for reach in (law.low, law.high))
        law = law._replace(low=low, high=high)
    table = tabulate(law, _NUM_TABLE_NODES[law.kind])
    points = _grid(law, table, allowed, is_whole=is_whole)
    below, density = cdf_and_density(law, table, points[None])
    below, density = jnp.where(allowed[:, None], below, 1.0), jnp.where(allowed[:, None], density, 0.0)
    order = sorting_order(points)
    points, below, density = (
        values.at[..., order].get(mode="promise_in_bounds") for values in (points, below, density)
    )
    won, win_density = win_probs(points, below, density, allowed)
    return won / jnp.sum(won), points, below, density, win_density


def win_probs(
    points: Float[Array, " n"], below: Float[Array, "A n"], density: Float[Array, "A n"], allowed: Bool[Array, " A"]
) -> tuple[Float[Array, "A n-1"], Float[Array, "A n"]]:
    """Integrate prod_{b != a} F_b dF_a over each interval of a grid, for the allowed arms; return the integrand too.

    Args:
        below, density: each arm's cdf on the grid, and its derivative.
    """
    below, density = jnp.where(allowed[:, None], below, 1.0), jnp.where(allowed[:, None], density, 0.0)
    positive = jnp.maximum(below, float(jnp.finfo(below.dtype).tiny) ** 0.8)
    product = jnp.prod(positive, axis=0)
    others, hazards = product / positive, density / positive
    other_slopes = others * (jnp.sum(hazards, axis=0) - hazards)
    length = jnp.diff(points)
    rise, other_rise = (jnp.maximum(jnp.diff(values), 0.0) for values in (below, others))
    start, end = limited_slopes(rise, density, length)
    other_start, other_end = limited_slopes(other_rise, other_slopes, length)
    won = 0.5 * (others[:, 1:] + others[:, :-1]) * rise + (other_end * start - other_start * end) / 60.0
    won = won + (rise * (other_start - other_end) - other_rise * (start - end)) / 10.0
    won = jnp.maximum(jnp.where(allowed[:, None], won, 0.0), 0.0)
    # The probability that the largest variable is in an interval is known, also where many arms rise at once.
    total = jnp.sum(won, axis=0)
    return won * (jnp.diff(product) / jnp.where(total > 0, total, 1.0)), others * density


def limited_slopes(
    rise: Float[Array, "*A n-1"], slopes: Float[Array, "*A n"], length: Float[Array, " n-1"]
) -> tuple[Float[Array, "*A n-1"], Float[Array, "*A n-1"]]:
    """Return the slopes of increasing functions at both ends of each interval, in units of its length.

    The slopes are limited so that the cubic through the ends increases, also where an interval does not resolve the function.
    """
    return jnp.minimum(slopes[..., :-1] * length, 3.0 * rise), jnp.minimum(slopes[..., 1:] * length, 3.0 * rise)


def _grid(law: MarginalLaw, table: Any, allowed: Bool[Array, " A"], *, is_whole: bool) -> Float[Array, " n"]:
    """Return nodes of all arms, in any order; where there are many arms, those nodes at which the best arm is decided."""
    num = _NUM_NODES[law.kind]
    is_rising = law.slope * law.power > 0
    first, last = jnp.where(is_rising, -law.low, law.high), jnp.where(is_rising, law.high, -law.low)
    ends = to_common_scale(law, jnp.stack([first, last], axis=1))
    start, stop = jnp.max(jnp.where(allowed[:, None], ends, -jnp.inf), axis=0)
    if is_whole:
        start = jnp.min(jnp.where(allowed, ends[:, 0], jnp.inf))
    else:  # below `start`, some arm is certainly larger
        first = jnp.clip(to_v(law, start[None, None])[0][:, 0], -law.low, law.high)
    if law.kind == IDENTITY:
        first, last = (jnp.clip(end, -0.5 * _LARGEST_V, 0.5 * _LARGEST_V) for end in (first, last))
    nodes = staggered_nodes(law, first, last, num)
    nodes = jnp.where(allowed[:, None], jnp.clip(nodes, start, stop), stop)
    if nodes.size > _MAX_NODES:
        nodes = _decisive_nodes(law, table, allowed, nodes, start if is_whole else None)
    return jnp.concatenate([jnp.stack([start, stop]), nodes.ravel()])


def _decisive_nodes(
    law: MarginalLaw, table: Any, allowed: Bool[Array, " A"], nodes: Float[Array, "A k"], start: Array | None
) -> Float[Array, " n"]:
    """Choose nodes that the largest variable can reach, more of them from arms that are likely to be best.

    A few nodes give roughly the probability of each arm to be best. Two well-known arms among a hundred others have few of all
    nodes and may decide alone; a hundred well-known arms have nearly all nodes and may lie below two others.

    Args:
        start: keep the nodes from here on; None leaves out those below which the largest variable certainly is not.
    """
    values = nodes.ravel()
    coarse = jnp.sort(values[np.linspace(0, values.size - 1, _NUM_COARSE_NODES).round().astype(int)])
    below = jnp.where(allowed[:, None], cdf_and_density(law, table, coarse[None])[0], 1.0)
    positive = jnp.maximum(below, float(jnp.finfo(below.dtype).tiny) ** 0.8)
    product = jnp.prod(positive, axis=0)
    others = product / positive
    wins = jnp.sum(jnp.diff(below) * 0.5 * (others[:, 1:] + others[:, :-1]), axis=1)
    if start is None:
        start = jnp.max(jnp.where(product < _NEGLIGIBLE, coarse, coarse[0]))
    # The square root: an arm that wins once in a hundred times gets a tenth of the nodes of one that always wins.
    weights = jnp.where(nodes >= start, jnp.sqrt(jnp.maximum(wins, 0.0) + _NEGLIGIBLE)[:, None], 0.0)
    passed = jnp.cumsum(weights.ravel())
    index = jnp.searchsorted(passed, passed[-1] * np.linspace(0.0, 1.0, _NUM_CHOSEN_NODES))
    return values[jnp.minimum(index, values.size - 1)]


def sorting_order(values: Float[Array, " n"]) -> Int[Array, " n"]:
    """Return the indices that sort a few numbers, by counting, which takes less time than `argsort`."""
    index = np.arange(values.size, dtype=np.int32)
    is_less = (values < values[:, None]) | ((values == values[:, None]) & (index < index[:, None]))
    ranks = jnp.sum(is_less, axis=1, dtype=jnp.int32)
    # A maximum, not a sum: ranks of nan coincide, and the indices must stay in bounds.
    return jnp.max(jnp.where(ranks == index[:, None], index, 0), axis=1)
