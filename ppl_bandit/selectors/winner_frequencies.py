"""Shares of draws that each arm wins, and draws of an arm from given probabilities.

`winner_frequencies` is p-hat of the paper, the Monte Carlo estimate of the probability that each arm is optimal.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.random_bits import uniform
from ppl_bandit.types import Key


def winner_frequencies(
    table: Float[Array, "M A"], allowed: Bool[Array, " A"], *, is_lowest_first: bool = False
) -> Float[Array, " A"]:
    """Count the share of draws that each arm wins: p-hat_a = (1/M) sum_m 1[arm a is best in draw m].

    Args:
        table: sampled expected rewards, finite where allowed.
        allowed: arms that compete; the others get 0.
        is_lowest_first: whether a tied row goes to its lowest index alone; otherwise tied arms share it equally.

    Returns:
        Shares that sum to 1; exactly one-hot when one arm wins every draw.
    """
    num_draws = table.shape[0]
    rows_won = jnp.sum(winner_weights(table, allowed, is_lowest_first=is_lowest_first), axis=1)
    # XLA may divide by multiplying with a reciprocal, and n * (1 / n) is not always 1.
    return jnp.where(rows_won == num_draws, 1.0, rows_won / num_draws)


def winner_weights(
    table: Float[Array, "M A"], allowed: Bool[Array, " A"], *, is_lowest_first: bool = False
) -> Float[Array, "A M"]:
    """Give each draw's winner weight 1, and 0 to the rest; winners that tie share it as in `winner_frequencies`."""
    # Arms first: reductions over draws, the long axis, then read contiguous memory, several times faster for a few arms.
    competing = jnp.where(allowed[:, None], table.T, -jnp.inf)
    if is_lowest_first:
        return (jnp.argmax(competing, axis=0) == jnp.arange(table.shape[1])[:, None]).astype(table.dtype)
    is_winner = competing == jnp.max(competing, axis=0)
    return is_winner / jnp.sum(is_winner, axis=0).astype(table.dtype)


def is_largest(values: Float[Array, " A"], allowed: Bool[Array, " A"], *, rounding: float) -> Bool[Array, " A"]:
    """Mark the allowed arms whose value is the largest, or short of it by at most `rounding` relative epsilons."""
    largest = jnp.max(jnp.where(allowed, values, -jnp.inf))
    return allowed & (values >= largest - rounding * jnp.finfo(values.dtype).eps * jnp.abs(largest))


def share_equally(is_member: Bool[Array, " A"], dtype: jnp.dtype) -> Float[Array, " A"]:
    """Spread probability 1 evenly over the marked arms; all 0 if no arm is marked."""
    return is_member.astype(dtype) / jnp.maximum(jnp.sum(is_member), 1).astype(dtype)


def draw_arm(key: Key, probs: Float[Array, " A"]) -> Int[Array, ""]:
    """Draw one arm from Cat(probs); see `pick_arm`."""
    return pick_arm(uniform(key, (), probs.dtype), probs)


def pick_arm(uniform: Float[Array, ""], probs: Float[Array, " A"]) -> Int[Array, ""]:
    """Turn a uniform number into a draw from Cat(probs); an arm of probability 0 is never drawn.

    Args:
        uniform: in [0, 1).
        probs: nonnegative, at least one positive; need not sum to exactly 1.
    """
    cumulative = jnp.cumsum(probs)
    # A parallel cumulative sum may rise by a rounding error at an arm of probability 0: hence the two guards.
    total = jnp.max(jnp.where(probs > 0, cumulative, 0.0))
    return jnp.argmax((probs > 0) & (cumulative > uniform * total))


def find_leader(probs: Float[Array, " A"]) -> Int[Array, ""]:
    """Return the arm with the largest probability, the lowest index of several."""
    return jnp.argmax(probs)
