"""The two steps of double sampling: the number of candidate arms, and the mode of that many draws.

Section "Sampling-based policy" of the paper. `num_candidates` is N_{t+1}, from the probability p_FA of not picking the
optimal arm; `draw_mode` draws N_{t+1} arms from Cat(p-hat) and returns the most frequent one.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.scipy.special import log_ndtr, logsumexp, ndtr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.random_bits import uniform
from ppl_bandit.selectors.winner_frequencies import find_leader, pick_arm
from ppl_bandit.types import Key

GAUSSIAN = "gaussian"
LogTail: TypeAlias = Callable[[Float[Array, " A"], Float[Array, ""]], Float[Array, " A"]]


def num_candidates(
    probs: Float[Array, " A"],
    allowed: Bool[Array, " A"],
    max_candidates: int,
    rule: int | Callable[[Any], Any] | None = None,
    false_alarm: str = GAUSSIAN,
) -> Int[Array, ""]:
    """Choose how many candidates to draw: N = floor(log10(1 / p_FA)), at least 1 and at most `max_candidates`.

    Args:
        probs: p-hat; 0 where an arm is not allowed.
        allowed: arms that may be played.
        max_candidates: the most to draw; also the answer when one arm wins every draw, or only one is allowed.
        rule: a fixed N, or a function of 1 / p_FA in place of the logarithm; None is the logarithm.
        false_alarm: the approximation of p_FA, one of `FALSE_ALARMS`.
    """
    if isinstance(rule, int):
        return jnp.asarray(min(rule, max_candidates))
    log_prob = log_false_alarm(probs, allowed, false_alarm)
    digits = -log_prob / math.log(10.0) if rule is None else jnp.asarray(rule(jnp.exp(-log_prob)), probs.dtype)
    # p_FA can be a power of ten exactly (two arms at 1/2 among 51 give 0.01); rounding must not lose that digit.
    digits = digits * (1.0 + 16.0 * jnp.finfo(probs.dtype).eps)
    # A function of 1 / p_FA = infinity may be nan.
    return jnp.clip(jnp.nan_to_num(jnp.floor(digits), nan=max_candidates), 1, max_candidates).astype(int)


def _log_gaussian_tail(mean: Float[Array, " A"], leader: Float[Array, ""]) -> Float[Array, " A"]:
    """Return the log mass beyond p* of a Gaussian truncated to [0, 1]: 1 - Phi_[0,1]((p* - p_a) / s_a)."""
    scale = jnp.sqrt(mean * (1.0 - mean))
    log_beyond_leader = log_ndtr((mean - leader) / scale)
    log_beyond_one = log_ndtr((mean - 1.0) / scale)
    log_outside = jnp.log1p(-ndtr(-mean / scale) - jnp.exp(log_beyond_one))
    # p* <= 1 - p_a keeps the two tails at least a constant factor apart: the difference loses no digits.
    return log_beyond_leader + jnp.log1p(-jnp.exp(log_beyond_one - log_beyond_leader)) - log_outside


def _log_markov_bound(mean: Float[Array, " A"], leader: Float[Array, ""]) -> Float[Array, " A"]:
    """Return the log of p_a / p*."""
    return jnp.log(mean) - jnp.log(leader)


def _log_chebyshev_bound(mean: Float[Array, " A"], leader: Float[Array, ""]) -> Float[Array, " A"]:
    """Return the log of s_a^2 / (p* - p_a)^2; infinite for an arm that ties with the leader."""
    return jnp.log(mean) + jnp.log1p(-mean) - 2.0 * jnp.log(leader - mean)


FALSE_ALARMS: Mapping[str, LogTail] = MappingProxyType(
    {GAUSSIAN: _log_gaussian_tail, "markov": _log_markov_bound, "chebyshev": _log_chebyshev_bound}
)


def log_false_alarm(
    probs: Float[Array, " A"], allowed: Bool[Array, " A"], false_alarm: str = GAUSSIAN
) -> Float[Array, ""]:
    """Compute log p_FA, the log probability of not picking the optimal arm.

    p_FA is the mean of p_FA^(a) over the allowed arms other than the leader. p_FA^(a) is the probability that a variable with
    mean p_a and variance s_a^2 = p_a (1 - p_a) exceeds p*: that of a Gaussian truncated to [0, 1], or the bound of Markov or
    Chebyshev. An arm that no draw favours (s_a = 0) has p_FA^(a) = 0.

    Returns:
        The log, -inf when one arm wins every draw or only one is allowed.
    """
    leader = find_leader(probs)
    is_rival = allowed & (jnp.arange(probs.size) != leader)
    is_favoured = is_rival & (probs > 0)
    mean = jnp.where(is_favoured, probs, 0.5)
    log_tail = FALSE_ALARMS[false_alarm](mean, jnp.max(probs))
    num_rivals = jnp.maximum(jnp.sum(allowed) - 1, 1).astype(probs.dtype)
    return logsumexp(jnp.where(is_favoured, log_tail, -jnp.inf)) - jnp.log(num_rivals)


def draw_mode(
    key: Key, probs: Float[Array, " A"], num: Int[Array, ""], *, is_lowest_first: bool = False
) -> Int[Array, ""]:
    """Draw `num` arms from Cat(probs) and return the most frequent.

    The number of draws of the leader before the next other arm is geometric, and is drawn at once. So one iteration of the loop
    is one candidate other than the leader, and N (1 - p*) is small whenever p_FA makes N large.

    Args:
        key: spent here.
        probs: nonnegative and sum to 1.
        num: at least 1.
        is_lowest_first: whether arms drawn equally often lose to the lowest index; otherwise one of them at random.
    """
    arms = jnp.arange(probs.size)
    leader = find_leader(probs)
    other_probs = jnp.where(arms == leader, 0.0, probs)
    other_prob = jnp.minimum(jnp.cumsum(other_probs)[-1], 1.0)  # `pick_arm` computes the same cumulative sum
    is_contested = other_prob > 0
    mean_run = -1.0 / jnp.log1p(-jnp.where(is_contested, other_prob, 0.5))

    def is_unfinished(state):
        _, num_drawn, _ = state
        return num_drawn < num

    def draw_next_other(state):
        iteration, num_drawn, counts = state
        uniform_run, uniform_arm = uniform(key, (2,), probs.dtype, iteration)
        run = jnp.minimum(-jnp.log1p(-uniform_run) * mean_run, num).astype(num.dtype)
        num_drawn = num_drawn + run + 1
        is_other = (arms == pick_arm(uniform_arm, other_probs)) & (num_drawn <= num)
        return iteration + 1, num_drawn, counts + is_other

    start = (jnp.uint32(0), jnp.where(is_contested, 0, num), jnp.zeros(probs.size, num.dtype))
    num_iterations, num_drawn, counts = jax.lax.while_loop(is_unfinished, draw_next_other, start)
    num_others = num_iterations.astype(num.dtype) - (num_drawn > num)
    counts = jnp.where(arms == leader, num - num_others, counts)
    if is_lowest_first:
        return jnp.argmax(counts)
    uniform_tie = uniform(key, (3,), probs.dtype)[2]  # the loop uses the first two of every iteration
    return pick_arm(uniform_tie, (counts == jnp.max(counts)).astype(probs.dtype))
