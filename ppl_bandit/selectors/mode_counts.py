"""The exact probability that each arm is the mode of a few candidates, by adding up what they can be.

N candidates fall on the arms as counts with the probability N! times the product of p_b^x / x!, and arm a is their mode at
level c if it has count c and no other has more: a tie of t arms is won with probability 1 / (t + 1), the integral of s^t
over [0, 1]. So what the others are is a product of polynomials, cut off at c, of which the coefficient of N - c counts. All
terms are positive: no digits are lost. The work grows as the cube of N, but in one pass, and not in a loop of many.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.runtime.unrolled_reductions import sum_of

__all__ = ["few_candidates", "mode_probs_of_few"]


def few_candidates(num_arms: int) -> int:
    """Return how many candidates are few: of more arms than three, products of polynomials take most of the time."""
    return 31 if num_arms <= 3 else 8


def mode_probs_of_few(
    nodes: np.ndarray, weights: np.ndarray, probs: Float[Array, " A"], num: Int[Array, ""]
) -> Float[Array, " A"]:
    """Compute the probability that each arm is the mode of `num` draws from Cat(probs), at most `few_candidates`.

    Args:
        nodes: (G, 2), s for the arms before the winner and for those after it.
        weights: (G,), of the nodes.
    """
    num_arms, dtype = probs.size, probs.dtype
    if num_arms == 1:
        return jnp.ones_like(probs)
    most = few_candidates(num_arms)
    levels = np.arange(most + 1)
    # A power of half as many, for every candidate, is common to all terms, and lets them be of the size of 1.
    factors = np.array([(most / 2) ** level / math.factorial(level) for level in levels])
    powers = probs[:, None] ** levels.astype(dtype) * factors.astype(dtype)
    # Another arm has at most as many as the winner, so not more than half of all; two others together may.
    counts, levels = levels[: 1 + (most // 2 if num_arms <= 3 else most)], levels[1:]
    is_below, is_level = (compare(counts, levels[:, None]) for compare in (np.less, np.equal))
    shares = is_below[:, None] + nodes.T[:, None, :, None] * is_level[:, None]  # (2, levels, G, counts)
    before, after = (jnp.asarray(share, dtype) * powers[:, None, None, : counts.size] for share in shares)
    one = jnp.asarray(np.broadcast_to(counts == 0, shares.shape[1:]), dtype)
    below, above = [one], [one]  # products over the arms before one, and after it
    for arm in range(num_arms - 2):
        below.append(before[0] if arm == 0 else _product(below[-1], before[arm]))
        above.append(after[-1] if arm == 0 else _product(above[-1], after[-1 - arm]))
    pairs = [(after[1], above[-1]), *zip(below[1:], above[:0:-1], strict=True), (below[-1], before[-2])]
    left = num - np.add.outer(levels, counts).astype(num.dtype)  # of the candidates, for the second of a pair
    index = jnp.broadcast_to(jnp.clip(left, 0, counts.size - 1)[:, None], one.shape)
    is_possible = ((left >= 0) & (left < counts.size))[:, None]
    terms = [
        first * jnp.where(is_possible, jnp.take_along_axis(second, index, axis=-1), 0.0) for first, second in pairs
    ]
    own = powers[:, 1:, None, None] * jnp.asarray(weights, dtype)[:, None]
    won = jnp.sum(jnp.stack(terms) * own, axis=(1, 2, 3))
    return won / sum_of(won)


def _product(x: Float[Array, "*B counts"], y: Float[Array, "*B counts"]) -> Float[Array, "*B counts"]:
    """Multiply polynomials, up to the degree that they have."""
    counts = np.arange(x.shape[-1])
    left = counts[:, None] - counts
    return jnp.sum(x[..., None, :] * jnp.where(left >= 0, y[..., np.maximum(left, 0)], 0.0), axis=-1)
