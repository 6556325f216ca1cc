"""Selectors that depend on p-hat only, the share of draws that each arm wins.

They range from matching that probability to playing its maximum: Thompson sampling is double sampling with one candidate,
greedy is double sampling with infinitely many, and top-two splits the play between two arms in a fixed proportion.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ppl_bandit.arguments import check_flag, check_number
from ppl_bandit.selectors.candidate_sampling import (
    FALSE_ALARMS,
    GAUSSIAN,
    draw_mode,
    num_candidates as choose_num_candidates,
)
from ppl_bandit.selectors.mode_probs import mode_probs
from ppl_bandit.selectors.selector_contract import RuleInputs, make_selector
from ppl_bandit.selectors.winner_frequencies import draw_arm, is_largest, share_equally
from ppl_bandit.types import Key, Selector

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
