"""Probability that each arm is the mode of a few candidates: exact enumeration of their counts.

N candidates fall on the arms with counts x_b with probability N! prod_b p_b^x_b / x_b!. For up to three arms these are summed
as they are. For more, arm a is the mode at level c if its count is c and no other count is larger. A tie with t other arms is
won with probability 1 / (t + 1), the integral of s^t over [0, 1]. So the counts of the other arms have a generating function
that is a product of polynomials, truncated at c, of which the coefficient of N - c is needed.

All terms are positive: no digits cancel. There is no loop whose length depends on the data: a call for 3 arms takes 12 us
inside a compiled program, and 75 us by the general method of `mode_probs`.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def few_candidates(num_arms: int) -> int:
    """Return the largest number of candidates to enumerate: above three arms, products of polynomials dominate the time."""
    return 31 if num_arms <= 3 else 8


def mode_probs_of_three(probs: Float[Array, " A"], num: Int[Array, ""], *, is_lowest_first: bool) -> Float[Array, " A"]:
    """Compute the probability that each of up to three arms is the mode of `num` draws, at most `few_candidates`.

    Args:
        is_lowest_first: whether arms drawn equally often lose to the lowest index; otherwise one of them at random.
    """
    levels, powers = _powers(jnp.pad(probs, (0, 3 - probs.size)), few_candidates(probs.size))
    first, second = levels[:, None], levels
    third = num.astype(jnp.int32) - (first + second)
    at_third = powers[2].at[jnp.clip(third, 0, levels[-1])].get(mode="promise_in_bounds")
    chances = powers[0][:, None] * powers[1] * jnp.where(third >= 0, at_third, 0.0)
    largest = jnp.maximum(np.maximum(first, second), third)
    is_first, is_second, is_third = (count == largest for count in (first, second, third))
    if is_lowest_first:
        is_second, is_third = is_second & ~is_first, is_third & ~is_first & ~is_second
    else:
        chances = chances / sum(is_mode.astype(probs.dtype) for is_mode in (is_first, is_second, is_third))
    won = [jnp.sum(jnp.where(wins, chances, 0.0)) for wins in (is_first, is_second, is_third)[: probs.size]]
    return jnp.stack(won) / sum(won)


def mode_probs_of_few(
    nodes: np.ndarray, weights: np.ndarray, probs: Float[Array, " A"], num: Int[Array, ""]
) -> Float[Array, " A"]:
    """Compute the probability that each of four or more arms is the mode of `num` draws, at most `few_candidates`.

    Args:
        nodes: (G, 2), quadrature nodes of s for the arms before the winner and for those after it.
        weights: (G,), of the nodes.
    """
    num_arms, dtype = probs.size, probs.dtype
    counts, powers = _powers(probs, few_candidates(num_arms))
    levels = counts[1:]
    is_below, is_level = (compare(counts, levels[:, None]) for compare in (np.less, np.equal))
    shares = is_below[:, None] + nodes.T[:, None, :, None] * is_level[:, None]  # (2, levels, G, counts)
    before, after = (jnp.asarray(share, dtype) * powers[:, None, None] for share in shares)
    one = jnp.asarray(np.broadcast_to(counts == 0, shares.shape[1:]), dtype)
    below, above = [one], [one]  # products over the arms before each arm, and after it
    for arm in range(num_arms - 2):
        below.append(before[0] if arm == 0 else _product(below[-1], before[arm]))
        above.append(after[-1] if arm == 0 else _product(above[-1], after[-1 - arm]))
    pairs = [(after[1], above[-1]), *zip(below[1:], above[:0:-1], strict=True), (below[-1], before[-2])]
    left = num - np.add.outer(levels, counts).astype(num.dtype)  # candidates left for the second factor of a pair
    index = jnp.broadcast_to(jnp.clip(left, 0, counts.size - 1)[:, None], one.shape)
    is_possible = ((left >= 0) & (left < counts.size))[:, None]
    terms = [
        first * jnp.where(is_possible, jnp.take_along_axis(second, index, axis=-1), 0.0) for first, second in pairs
    ]
    own = powers[:, 1:, None, None] * jnp.asarray(weights, dtype)[:, None]
    won = jnp.sum(jnp.stack(terms) * own, axis=(1, 2, 3))
    return won / jnp.sum(won)


def _powers(probs: Float[Array, " A"], most: int) -> tuple[np.ndarray, Float[Array, "A counts"]]:
    """Return the counts up to `most`, and p_b^x / x! at each of them, times (most / 2)^x, which keeps products near 1.

    That factor is common to all ways in which N candidates can fall.
    """
    counts = np.arange(most + 1, dtype=np.int32)
    factors = np.array([(most / 2) ** count / math.factorial(count) for count in range(most + 1)])
    return counts, probs[:, None] ** counts.astype(probs.dtype) * factors.astype(probs.dtype)


def _product(x: Float[Array, "*B counts"], y: Float[Array, "*B counts"]) -> Float[Array, "*B counts"]:
    """Multiply polynomials, truncated at their own degree."""
    counts = np.arange(x.shape[-1])
    left = counts[:, None] - counts
    return jnp.sum(x[..., None, :] * jnp.where(left >= 0, y[..., np.maximum(left, 0)], 0.0), axis=-1)
