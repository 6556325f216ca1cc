"""Which of several independent variables is the largest: the probability of each, by one integral over all of them."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.duels import win_prob
from ppl_bandit.numerics.laws import Law, Nodes, all_below, comparable, nodes_of, without_points

__all__ = ["best_arm_probs"]

_NUM_NODES = 48  # of an arm; those of all together are denser
_MOST_NODES = 512  # of all arms together: they are dense where many arms have theirs
_FEW_NODES = 64
_LEAST = 1e-12  # the probability that the largest variable lies below all nodes that are kept


def best_arm_probs(law: Law, allowed: Bool[Array, " A"] | None = None) -> Float[Array, " A"]:
    """Compute the probability that each arm's variable is the largest, for independent arms.

    To 1e-4; to 1e-3 for Student-t laws of less than 2 degrees of freedom, and for shapes below .02.

    Args:
        allowed: arms that compete; the others get 0.
    """
    num_arms = law.centre.size
    allowed = jnp.ones(num_arms, bool) if allowed is None else allowed
    if num_arms == 1:
        return jnp.ones(1)
    law = without_points(law)
    if num_arms == 2 and law.is_common:
        won = jnp.where(jnp.all(allowed), win_prob(law), 1.0)
    else:
        won = _tournament(law, nodes_of(law, _NUM_NODES), allowed)
    won = jnp.where(allowed, jnp.maximum(won, 0.0), 0.0)
    return won / jnp.sum(won)


def _tournament(law: Law, nodes: Nodes, allowed: Bool[Array, " A"]) -> Float[Array, " A"]:
    """Integrate prod_b F_b dF_a between the nodes of all arms together, which resolve every arm's steps.

    On each interval both factors are parabolas through their values at its ends and its middle.
    """
    # Every third node: middles are added, and the parabolas are as good as the cubics between nodes.
    x = jnp.sort(jnp.where(allowed[:, None], comparable(law, nodes.v)[:, ::3], jnp.inf).ravel())
    num_real = jnp.sum(jnp.isfinite(x))
    x = jnp.where(jnp.isfinite(x), x, jnp.max(jnp.where(jnp.isfinite(x), x, -jnp.inf)))
    if x.size > _MOST_NODES:
        x = _where_it_is_decided(law, nodes, allowed, x, num_real)
    points = jnp.append(jnp.stack([x[:-1], 0.5 * (x[:-1] + x[1:])], axis=1).ravel(), x[-1])
    below = jnp.where(allowed, all_below(law, nodes, points), 1.0)
    others = _product_of_others(below)
    first, middle, last = others[:-1:2], others[1::2], others[2::2]
    bend, slope = 2.0 * (first - 2.0 * middle + last), 4.0 * middle - 3.0 * first - last
    start, half, end = below[:-1:2], below[1::2], below[2::2]
    curve, rise = 2.0 * (start - 2.0 * half + end), 4.0 * half - 3.0 * start - end
    whole = rise * (first + slope / 2.0 + bend / 3.0) + 2.0 * curve * (first / 2.0 + slope / 3.0 + bend / 4.0)
    return jnp.sum(whole, axis=0)


def _where_it_is_decided(
    law: Law, nodes: Nodes, allowed: Bool[Array, " A"], x: Float[Array, " n"], num_real: Int[Array, ""]
) -> Float[Array, " m"]:
    """Keep as many nodes as are needed of those that the largest variable may reach: with many arms, those of upper tails."""
    stride = x.size // _FEW_NODES
    few = x[::stride]
    log_below = jnp.log(jnp.where(allowed, all_below(law, nodes, few), 1.0))
    is_lost = jnp.sum(log_below, axis=1) < math.log(_LEAST)
    start = stride * jnp.maximum(jnp.sum(is_lost) - 1, 0)
    spread = jnp.arange(_MOST_NODES) / (_MOST_NODES - 1.0)
    return x[start + jnp.round(spread * (num_real - 1 - start)).astype(int)]


def _product_of_others(factors: Float[Array, "n A"]) -> Float[Array, "n A"]:
    """Multiply, for each arm, the factors of all other arms; from both ends, because a factor may be 0."""
    one = jnp.ones_like(factors[..., :1])
    from_left = jnp.cumprod(jnp.concatenate([one, factors[..., :-1]], axis=-1), axis=-1)
    from_right = jnp.cumprod(jnp.concatenate([one, factors[..., :0:-1]], axis=-1), axis=-1)[..., ::-1]
    return from_left * from_right
