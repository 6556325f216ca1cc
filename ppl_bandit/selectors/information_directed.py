"""Information-directed sampling, in its variance-based form (Russo and Van Roy, 2014).

Among all distributions over arms, play the one that pays the least squared regret per unit of information about which
arm is best: it minimises (sum_a pi_a Delta_a)^2 / (sum_a pi_a v_a), with Delta_a the expected regret of arm a and v_a
the variance of its mean reward explained by the identity of the best arm. A minimum is reached on two arms, so all
pairs are tried.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.selectors.selector_contract import (
    RuleInputs,
    draw_arm,
    is_largest,
    make_selector,
    share_equally,
    winner_weights,
)
from ppl_bandit.types import BestArmMoments, Key, Marginals, Selector


def information_directed() -> Selector:
    """Play the two-arm mixture with the least squared regret per unit of information about the best arm.

    Unlike the other selectors it uses the dependence between arms: an arm that cannot be best is played if its rewards are
    informative about the best one.

    Regrets and information are exact where the engine offers moments given the best arm (`marginals.best_arm_moments`:
    independent arms in closed form). Otherwise they are estimated from the table alone.

    At the edges: an arm that is best (or tied) in every draw is played, because its regret is 0; where no arm is
    informative, as with one draw or one arm, the arms of least regret share the play; mixtures whose ratio is the least
    to rounding share equally, so that relabelling the arms relabels the result. num_candidates is 0.
    """

    def score(marginals: Marginals, step: Int[Array, ""], allowed: Bool[Array, " A"]) -> Float[Array, "2 A"] | None:
        del step
        return (
            None
            if marginals.best_arm_moments is None
            else jnp.stack(_regret_and_information_of_moments(marginals.best_arm_moments(allowed)))
        )

    def rule(key: Key, inputs: RuleInputs):
        if inputs.scores is None:
            assert inputs.table is not None  # the contract: scores or a table
            pair = regret_and_information(inputs.table, inputs.allowed, inputs.best_arm_probs)
        else:
            pair = inputs.scores[0], inputs.scores[1]
        regrets, informations = pair
        propensities = least_ratio_mixture(regrets, informations, inputs.allowed)
        return draw_arm(key, propensities), jnp.asarray(0), propensities

    return make_selector(rule, score=score, required_marginals=("best_arm_moments",), reads_table=False, is_exact=True)


def _regret_and_information_of_moments(
    best_arm_moments: BestArmMoments,
) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
    """Return expected regrets and informations, as `regret_and_information` does, without a table."""
    probs, sums = (
        best_arm_moments.probs[:, None],
        best_arm_moments.centred_values[:, None] - best_arm_moments.gaps,
    )  # E[theta_a - level; b is best]
    shifts = jnp.where(probs > 0, sums / jnp.where(probs > 0, probs, 1.0), 0.0) - jnp.sum(sums, axis=0)
    return jnp.sum(best_arm_moments.gaps, axis=0), jnp.sum(probs * shifts**2, axis=0)


def regret_and_information(
    table: Float[Array, "M A"], allowed: Bool[Array, " A"], probs: Float[Array, " A"]
) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
    """Estimate the expected regret of each arm and its information about the best arm.

    Args:
        table: sampled expected rewards, 0 where an arm is not allowed.
        allowed: arms that may be played.
        probs: p-hat.

    Returns:
        Expected regrets Delta_a = E[max_b theta_b - theta_a], and v_a = sum_b p-hat_b (E[theta_a | b is best] -
        E[theta_a])^2.
    """
    num_draws = table.shape[0]
    best = jnp.max(jnp.where(allowed, table, -jnp.inf), axis=1, keepdims=True)
    regrets = jnp.mean(best - table, axis=0)
    centred = table - jnp.mean(table, axis=0)
    is_possible = probs > 0
    weights = winner_weights(table, allowed) / (num_draws * jnp.where(is_possible, probs, 1.0))[:, None]
    means_if_best = jnp.matmul(weights, centred, precision="highest")
    # Around their own mean, so that the rounding of a large common mean drops out: one winner leaves exactly 0.
    shifts = means_if_best - jnp.sum(probs[:, None] * means_if_best, axis=0)
    informations = jnp.sum(probs[:, None] * shifts**2, axis=0)
    noise = 8.0 * jnp.finfo(table.dtype).eps * jnp.max(jnp.abs(centred), axis=0)
    return regrets, jnp.where(informations > noise**2, informations, 0.0)


def least_ratio_mixture(
    regrets: Float[Array, " A"], informations: Float[Array, " A"], allowed: Bool[Array, " A"]
) -> Float[Array, " A"]:
    """Minimise (pi . regrets)^2 / (pi . informations) over distributions pi on two allowed arms.

    The ratio is convex in the weight q of a pair's first arm, and its derivative vanishes at
    q = Delta_2 / (Delta_1 - Delta_2) - 2 v_2 / (v_1 - v_2); outside [0, 1] the nearer end is the minimum.

    Returns:
        The mean of all minimising mixtures, itself a minimiser because the ratio is convex in pi.
    """
    first_regret, second_regret = regrets[:, None], regrets[None, :]
    first_information, second_information = informations[:, None], informations[None, :]
    regret_gap, information_gap = first_regret - second_regret, first_information - second_information
    # Arms that differ by rounding alone must count as equal, or rounding would decide between them.
    rounding = 1e3 * jnp.finfo(regrets.dtype).eps
    has_interior = jnp.abs(regret_gap) > rounding * (first_regret + second_regret)
    has_interior &= jnp.abs(information_gap) > rounding * (first_information + second_information)
    interior = second_regret / jnp.where(has_interior, regret_gap, 1.0)
    interior -= 2.0 * second_information / jnp.where(has_interior, information_gap, 1.0)

    def ratio(weight):
        regret = second_regret + weight * regret_gap
        information = second_information + weight * information_gap
        positive = jnp.where(information > 0, information, 1.0)
        return jnp.where(regret <= 0, 0.0, jnp.where(information > 0, regret**2 / positive, jnp.inf))

    at_first, at_second = ratio(1.0), ratio(0.0)
    is_first_better = at_first < at_second * (1.0 - rounding)
    is_second_better = at_second < at_first * (1.0 - rounding)
    better_end = jnp.where(is_first_better, 1.0, jnp.where(is_second_better, 0.0, 0.5))
    inside = jnp.clip(interior, 0.0, 1.0)
    is_inside = has_interior & (ratio(inside) < jnp.minimum(at_first, at_second))
    weight = jnp.where(is_inside, inside, better_end)
    ratios = jnp.where(allowed[:, None] & allowed[None, :], ratio(weight), jnp.inf)
    least = jnp.min(ratios)
    is_least = (ratios <= least * (1.0 + rounding)) & jnp.isfinite(ratios)
    mixture = jnp.sum(is_least * weight, axis=1) + jnp.sum(is_least * (1.0 - weight), axis=0)
    mixture = mixture / jnp.maximum(jnp.sum(mixture), 1.0)
    return jnp.where(
        jnp.isfinite(least), mixture, share_equally(is_largest(-regrets, allowed, rounding=8.0), regrets.dtype)
    )
