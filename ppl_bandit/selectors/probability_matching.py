"""Selectors that depend on p-hat only, the share of draws that each arm wins.

They range from matching that probability to playing its maximum: Thompson sampling is double sampling with one candidate,
greedy is double sampling with infinitely many, and top-two splits the play between two arms in a fixed proportion.

Also here: the two steps of double sampling: the number of candidate arms, and the mode of that many draws.

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
from ppl_bandit.selectors.mode_probs import mode_probs
from ppl_bandit.selectors.selector_contract import (
    RuleInputs,
    draw_arm,
    find_leader,
    is_largest,
    make_selector,
    pick_arm,
    share_equally,
)
from ppl_bandit.types import Key, Selector, check_flag, check_number

GAUSSIAN = "gaussian"
LogTail: TypeAlias = Callable[[Float[Array, " A"], Float[Array, ""]], Float[Array, " A"]]


def choose_num_candidates(
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


_ROUNDING = 8.0  # equal shares of thirds and sevenths, added up in another order, differ by an epsilon or two


def double_sampling(
    max_candidates: int = 1000,
    ties: str = "random",
    *,
    exact: bool = False,
    num_candidates: int | Callable[[Any], Any] | None = None,
    false_alarm: str = GAUSSIAN,
) -> Selector:
    """Draw N arms from Cat(p-hat) and play their mode, with N larger the surer the best arm: the paper's policy.

    N = floor(log10(1 / p_FA)), where p_FA is the probability that another arm is better than the leader.

    At the edges: N = 1 (Thompson sampling) while arms are hard to tell apart; N = `max_candidates` when one arm wins
    every draw or only one is allowed, and that arm is played; an arm that no draw favours adds 0 to p_FA and is
    averaged with the rest, so p-hat = (0, .5, .5) gives N = 1.

    Args:
        max_candidates: the most candidates to draw, at least 1.
        ties: "random" shares a draw that several arms win and breaks ties of the mode at random, so that no result
            depends on the order of the arms. "lowest" gives both to the lowest index, as the paper's authors' code
            does.
        exact: whether p-hat is the exact probability that each arm is best, by quadrature, in place of a share of M
            draws, wherever the engine offers it (an exact posterior with independent arms). Then no arm's p-hat is ever
            0, so that no arm is excluded because M is small.
        num_candidates: a fixed N; or a function of 1 / p_FA, written in jax.numpy, such as `jnp.log` or `jnp.sqrt`, whose value
            is rounded down and cut to [1, max_candidates]; None is `jnp.log10`, the paper's choice.
        false_alarm: how p_FA is approximated from p-hat: "gaussian", the tail of a truncated Gaussian as in the paper, or the
            bound of "markov" or "chebyshev". The bounds are larger, so that N is smaller.

    Returns:
        A selector whose propensities are the exact distribution of the mode.
    """
    if isinstance(max_candidates, bool) or not isinstance(max_candidates, int) or max_candidates < 1:
        raise ValueError(
            f"max_candidates must be an integer of at least 1, got {max_candidates!r}; "
            "use thompson() to draw one candidate"
        )
    if ties not in ("random", "lowest"):
        raise ValueError(
            f'ties must be "random" or "lowest", got {ties!r}; "random" does not depend on the order of the arms'
        )
    is_lowest_first = ties == "lowest"
    is_fixed = isinstance(num_candidates, int) and not isinstance(num_candidates, bool)
    if num_candidates is not None and not callable(num_candidates):
        if not is_fixed or not 1 <= num_candidates <= max_candidates:
            raise ValueError(
                f"num_candidates must be an integer from 1 to max_candidates = {max_candidates}, or a function of 1 / p_FA, "
                f"got {num_candidates!r}; None is the logarithm to base 10"
            )
    check_flag(exact, "exact")
    if not isinstance(false_alarm, str) or false_alarm not in FALSE_ALARMS:
        raise ValueError(f"false_alarm must be one of {', '.join(map(repr, FALSE_ALARMS))}, got {false_alarm!r}")

    def rule(key: Key, inputs: RuleInputs):
        probs = inputs.best_arm_probs
        num = choose_num_candidates(probs, inputs.allowed, max_candidates, num_candidates, false_alarm)
        arm = draw_mode(key, probs, num, is_lowest_first=is_lowest_first)
        return arm, num, mode_probs(probs, num, is_lowest_first=is_lowest_first)

    settings: dict[str, Any] = {"max_candidates": max_candidates, "ties": ties, "exact": exact}
    # Defaults are left out, so that journals and files of earlier releases name the same selector.
    settings |= {} if num_candidates is None else {"num_candidates": num_candidates}
    settings |= {} if false_alarm == GAUSSIAN else {"false_alarm": false_alarm}
    return make_selector(rule, settings=settings, is_lowest_first=is_lowest_first, reads_table=False, is_exact=exact)


def thompson() -> Selector:
    """Play each arm with the probability that it is best: Thompson sampling, or double sampling with N = 1.

    The propensities are p-hat itself. An arm that wins no draw is never played. Where the engine offers the exact
    probability P that each arm is best, the recorded propensities are P, the mean of p-hat: the probability of each arm
    before the draws.
    """

    def rule(key: Key, inputs: RuleInputs):
        return draw_arm(key, inputs.best_arm_probs), jnp.asarray(1), inputs.best_arm_probs

    return make_selector(rule, reads_table=False, is_linear=True)


def greedy() -> Selector:
    """Play the arm that wins most draws: double sampling with N = infinity.

    Arms that win equally many share the play equally. It draws no candidates: num_candidates is 0.
    """

    def rule(key: Key, inputs: RuleInputs):
        probs = inputs.best_arm_probs
        propensities = share_equally(is_largest(probs, inputs.allowed, rounding=_ROUNDING), probs.dtype)
        return draw_arm(key, propensities), jnp.asarray(0), propensities

    return make_selector(rule, reads_table=False, is_deterministic=True)


def top_two(challenge_rate: float = 0.5) -> Selector:
    """Play the arm that wins most draws, or with a fixed probability the one that wins second most.

    Meant for finding the best arm, where the runner-up is the arm to compare it with, also when the leader wins every
    draw (the others then tie for second place). Ties for either place are broken at random; a single allowed arm is
    always played.

    Args:
        challenge_rate: probability of playing the runner-up, strictly inside (0, 1).
    """
    if not 0.0 < check_number(challenge_rate, "challenge_rate") < 1.0:
        raise ValueError(
            f"challenge_rate must lie strictly inside (0, 1), got {challenge_rate}; "
            "use greedy() to never challenge the leader"
        )

    def rule(key: Key, inputs: RuleInputs):
        probs, allowed = inputs.best_arm_probs, inputs.allowed
        is_leader = is_largest(probs, allowed, rounding=_ROUNDING)
        leader_probs = share_equally(is_leader, probs.dtype)
        is_rival = allowed & ~is_leader
        challenger_probs = share_equally(is_largest(probs, is_rival, rounding=_ROUNDING), probs.dtype)
        split_probs = (1.0 - challenge_rate) * leader_probs + challenge_rate * challenger_probs
        # Leaders that tie are each other's challengers: every one of them is played equally often.
        has_challenger = (jnp.sum(is_leader) == 1) & jnp.any(is_rival)
        propensities = jnp.where(has_challenger, split_probs, leader_probs)
        return draw_arm(key, propensities), jnp.asarray(0), propensities

    return make_selector(rule, settings={"challenge_rate": challenge_rate}, reads_table=False)
