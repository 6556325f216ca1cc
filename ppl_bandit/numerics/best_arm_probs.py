"""Which of several independent variables is the largest: the probability of each, by one integral over all of them.

With the largest being x, and of arm b, arm a falls short of x by E max(x - theta_a, 0) / F_a(x), the mean of x - theta_a given
that it is positive: integrals over the same nodes say what the identity of the best arm tells about every other one.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.numerics.log_products import computed_once
from ppl_bandit.numerics.marginal_laws import (
    MarginalLaw,
    Nodes,
    all_below,
    comparable,
    nodes_of,
    reach,
    value_of,
    without_points,
)
from ppl_bandit.numerics.pairwise_probs import win_prob
from ppl_bandit.numerics.short_sort import sort_short
from ppl_bandit.runtime.unrolled_reductions import is_all, sum_along, sum_of
from ppl_bandit.types import BestArmMoments

__all__ = ["best_arm_probs", "best_arm_moments"]

_NUM_NODES = 48  # of an arm; those of all together are denser
_NUM_POINTS = 24  # of an arm, in a best_arm_moments; with middles
_MOST_NODES = 192  # of all arms together
_MOST_POINTS = 512  # of all arms together, in a best_arm_moments, which also asks what arms that rarely win tell
_FEW_NODES = 64
_GOLDEN = 0.6180339887498949  # its multiples spread evenly between whole numbers
_FEW_ARMS = 8
_HIGHEST = jax.lax.Precision.HIGHEST  # accelerators round to 10 bits
_LEAST = 1e-12  # the probability that the largest variable lies below all nodes that are kept


def best_arm_probs(law: MarginalLaw, allowed: Bool[Array, " A"] | None = None) -> Float[Array, " A"]:
    """Compute the probability that each arm's variable is the largest, for independent arms.

    To 1e-4; to 1e-3 for Student-t laws of less than 6 degrees of freedom, and for shapes below .02.

    Args:
        allowed: arms that compete; the others get 0.
    """
    num_arms = law.centre.size
    allowed = jnp.ones(num_arms, bool) if allowed is None else allowed
    if num_arms == 1:
        return jnp.ones(1)
    law = without_points(law)
    if num_arms == 2 and law.is_common:
        won = jnp.where(is_all(allowed), win_prob(law), 1.0)
    else:
        won = _tournament(law, nodes_of(law, _NUM_NODES, in_single=True), allowed)
    won = jnp.where(allowed, jnp.maximum(won, 0.0), 0.0)
    return won / sum_of(won)


def best_arm_moments(law: MarginalLaw, allowed: Bool[Array, " A"] | None = None) -> BestArmMoments:
    """Compute what the identity of the largest variable says about all of them, for independent arms.

    Regrets and informations that follow are off by 1%, those of arms that win once in a thousand draws by 10%. Arms that are
    not allowed neither compete nor are spoken of: 0.
    """
    num_arms = law.centre.size
    allowed = jnp.ones(num_arms, bool) if allowed is None else allowed
    law = without_points(law)
    nodes = nodes_of(law, _NUM_NODES)
    one = jnp.ones_like(law.centre)
    low, high = -reach(law, -one)[:, None], reach(law, one)[:, None]  # further up a Gamma variable would overflow
    spread = np.linspace(0.0, 1.0, _NUM_POINTS, dtype=law.centre.dtype)
    points = _points(law, nodes, low + (high - low) * spread, allowed, _MOST_POINTS)
    below = computed_once(jnp.where(allowed, all_below(law, nodes, points), 1.0))
    wins = jnp.where(allowed, jnp.maximum(_steps(below) * _product_of_others(below), 0.0), 0.0)
    wins = wins / jnp.sum(wins)
    probs = jnp.sum(wins, axis=0)
    x = value_of(law, points)
    level = jnp.sum(jnp.sum(wins, axis=1) * x)  # the mean of the largest
    centred_values = jnp.sum(wins * (x - level)[:, None], axis=0)
    lacks = _running(below, x)
    lacks = jnp.where(below > 0, lacks / jnp.where(below > 0, below, 1.0), 0.0)
    lacks = jnp.where(allowed, jnp.clip(lacks, 0.0, (x - x[0])[:, None]), 0.0)
    short = jnp.matmul(wins.T, lacks, precision=_HIGHEST)
    return BestArmMoments(probs, centred_values, jnp.where(jnp.eye(num_arms, dtype=bool), 0.0, short))


def _tournament(law: MarginalLaw, nodes: Nodes, allowed: Bool[Array, " A"]) -> Float[Array, " A"]:
    """Integrate prod_b F_b dF_a between the nodes of all arms together."""
    # A third as many as nodes: middles are added, and the parabolas are as good as the cubics between nodes. Each arm's are
    # shifted by another part, so that equal arms, whose product is steeper than each of them, do not share theirs.
    parts = np.arange(law.centre.size) * _GOLDEN % 1.0
    v = jnp.minimum(nodes.v[:, ::3] + 3.0 * (parts * nodes.step)[:, None], law.reach[:, None])
    points = _points(law, nodes, v, allowed, _MOST_NODES)
    below = computed_once(jnp.where(allowed, all_below(law, nodes, points), 1.0))
    others = _product_of_others(below)
    weights = _thirds(below[:-1:2], below[1::2], below[2::2])
    won = sum(w * part for w, part in zip(weights, (others[:-1:2], others[1::2], others[2::2]), strict=True))
    won = jnp.maximum(won, 0.0)
    # However many arms rise between two points that do not resolve them, the largest variable is there as often as it is.
    known, total = jnp.diff((below[:, 0] * others[:, 0])[::2]), sum_along(won, 1)
    return jnp.sum(won * (known / jnp.where(total > 0, total, 1.0))[:, None], axis=0)


def _points(
    law: MarginalLaw, nodes: Nodes, v: Float[Array, "A n"], allowed: Bool[Array, " A"], most: int
) -> Float[Array, " m"]:
    """Return the values of all arms at v together, or `most` of them where they matter, with the middles between them."""
    x = comparable(law, v)
    is_real = allowed[:, None] & jnp.isfinite(x)
    x = jnp.where(is_real, x, jnp.max(jnp.where(is_real, x, -jnp.inf)))
    x = sort_short(x.ravel()) if x.size <= most else _where_it_is_decided(law, nodes, allowed, x, most)
    return jnp.append(jnp.stack([x[:-1], 0.5 * (x[:-1] + x[1:])], axis=1).ravel(), x[-1])


def _steps(measure: Float[Array, "n A"]) -> Float[Array, "n A"]:
    """Return the weight of each point in the integral of a function d(measure).

    On each interval both are parabolas through their values at its ends and its middle.
    """
    first, middle, last = _thirds(measure[:-1:2], measure[1::2], measure[2::2])
    nothing = jnp.zeros_like(measure[:1])
    ends = jnp.concatenate([first, nothing]) + jnp.concatenate([nothing, last])
    inner = jnp.stack([ends[:-1], middle], axis=1).reshape(-1, *measure.shape[1:])
    return jnp.concatenate([inner, ends[-1:]])


def _thirds(start: Array, half: Array, end: Array) -> tuple[Array, Array, Array]:
    """Return the weights of a function's values at both ends and the middle of an interval, the measure being a parabola."""
    curve, rise = 2.0 * (start - 2.0 * half + end), 4.0 * half - 3.0 * start - end
    return rise / 6.0, 2.0 * (rise + curve) / 3.0, rise / 6.0 + curve / 3.0


def _running(values: Float[Array, "n A"], x: Float[Array, " n"]) -> Float[Array, "n A"]:
    """Integrate values dx from the first point to each, by the same parabolas."""
    x = x[:, None]
    start, half, end = values[:-1:2], values[1::2], values[2::2]
    low, middle, high = x[:-1:2], x[1::2], x[2::2]
    quarter, near = (0.375 * a + 0.75 * b - 0.125 * c for a, b, c in ((start, half, end), (low, middle, high)))
    whole = sum(w * v for w, v in zip(_thirds(low, middle, high), (start, half, end), strict=True))
    part = sum(w * v for w, v in zip(_thirds(low, near, middle), (start, quarter, half), strict=True))
    before = jnp.concatenate([jnp.zeros_like(values[:1]), jnp.cumsum(whole, axis=0)])
    inner = jnp.stack([before[:-1], before[:-1] + part], axis=1).reshape(-1, values.shape[1])
    return jnp.concatenate([inner, before[-1:]])


def _where_it_is_decided(
    law: MarginalLaw, nodes: Nodes, allowed: Bool[Array, " A"], x: Float[Array, "A n"], num: int
) -> Float[Array, " m"]:
    """Keep as many values as are needed, in order: those that the largest variable may reach, more of arms that may be it.

    A few values tell roughly how often each arm wins. Two arms that are known well, among a hundred that are not, have few of
    all values and decide alone; a hundred that are known well have nearly all, and may lie below two that are not.
    """
    values = x.ravel()
    some = values[np.linspace(0, values.size - 1, _FEW_NODES).round().astype(int)]
    few = jnp.sort(jnp.concatenate([some, jnp.min(values)[None], jnp.max(values)[None]]))
    below = jnp.where(allowed, all_below(law, nodes, few), 1.0)
    others = _product_of_others(below)
    wins = jnp.sum(jnp.diff(below, axis=0) * 0.5 * (others[1:] + others[:-1]), axis=0)
    start = jnp.max(jnp.where(below[:, 0] * others[:, 0] < _LEAST, few, few[0]))
    # The root: an arm that wins once in a hundred times gets a tenth of the values of one that always does.
    weights = jnp.where(x >= start, jnp.sqrt(jnp.maximum(wins, 0.0) + _LEAST)[:, None], 0.0)
    passed = jnp.cumsum(weights.ravel())
    index = jnp.searchsorted(passed, passed[-1] * np.linspace(0.0, 1.0, num - 2))
    kept = values[jnp.minimum(index, values.size - 1)]
    return jnp.sort(jnp.concatenate([kept, start[None], few[-1:]]))


def _product_of_others(factors: Float[Array, "n A"]) -> Float[Array, "n A"]:
    """Multiply, for each arm, the factors of all other arms; one of them may be 0, and where two are, all products are."""
    num_arms = factors.shape[1]
    if num_arms <= _FEW_ARMS:  # written out: the fastest way there, for a CPU
        below, above = [jnp.ones_like(factors[:, 0])], [jnp.ones_like(factors[:, 0])]
        for arm in range(num_arms - 1):
            below.append(below[-1] * factors[:, arm])
            above.append(above[-1] * factors[:, num_arms - 1 - arm])
        return jnp.stack([low * high for low, high in zip(below, above[::-1], strict=True)], axis=1)
    positive = jnp.maximum(factors, float(jnp.finfo(factors.dtype).tiny) ** 0.8)
    return jnp.prod(positive, axis=1, keepdims=True) / positive
