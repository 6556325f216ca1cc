"""Bayes regret of Bernoulli arms with uniform priors, computed by backward induction without any simulation.

After n plays an arm with s successes is Beta(1 + s, 1 + n - s). So the posterior of all arms is the numbers of plays and of
successes, and the expected reward of a rule from each of these states onwards follows from that of the states one play later.
The largest one over all rules is the Bayes-optimal value. The code uses NumPy and SciPy, and nothing of the library.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from scipy import interpolate, special, stats

__all__ = ["bayes_regret", "bayes_ucb", "double_sampling", "optimal", "optimistic_gittins", "thompson"]

Plays = tuple[int, ...]  # plays of each arm
# (step, plays, value of playing each arm) -> probability of playing each arm; arrays of shape (n_1 + 1, ..., n_K + 1)
Rule = Callable[[int, Plays, Sequence[np.ndarray]], Sequence[np.ndarray]]


def bayes_regret(rule: Rule, horizon: int, num_arms: int = 2) -> float:
    """Return horizon E max(theta) less the expected sum of rewards, for `num_arms` independent uniform rates."""
    later = {plays: np.zeros([n + 1 for n in plays]) for plays in _all_plays(horizon, num_arms)}
    for step in range(horizon, 0, -1):
        now = {}
        for plays in _all_plays(step - 1, num_arms):
            values = [_value_of_play(later, plays, arm) for arm in range(num_arms)]
            now[plays] = sum(p * value for p, value in zip(rule(step, plays, values), values, strict=True))
        later = now
    return horizon * num_arms / (num_arms + 1) - float(later[(0,) * num_arms].item())


def optimal(horizon: int) -> Rule:
    """Return the rule with the least Bayes regret."""
    return lambda step, plays, values: _shared_by_largest(values)


def optimistic_gittins(horizon: int, patience: float = 2.0, learning: float = 1.0) -> Rule:
    """Return the rule that plays the largest lambda = mean + H E max(theta - lambda, 0).

    H = patience (horizon - step + 1) / (n + 2)^learning after n plays of the arm, and 0 at the last step.
    """
    index: dict[int, np.ndarray] = {}  # by the number of plays, at the step at which the induction is
    at = [0]

    def rule(step: int, plays: Plays, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        if at[0] != step:
            left = patience * (horizon - step + 1) if step < horizon else 0.0
            for n in range(step):
                a, b = _beta(n)
                # H grows from step to step of the induction, and the index with it: Newton's method starts below the root.
                index[n] = _solve_index(a, b, left / (a + b) ** learning, index.get(n, a / (a + b)))
            at[0] = step
        return _shared_by_largest(_of_each_arm([index[n] for n in plays]))

    return rule


def bayes_ucb(horizon: int) -> Rule:
    """Return the rule that plays the highest posterior quantile of order 1 - 1/step; any arm at step 1."""

    def rule(step: int, plays: Plays, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        quantiles = [special.betaincinv(*_beta(n), 1.0 - 1.0 / step) for n in plays]
        return _shared_by_largest(_of_each_arm(quantiles))

    return rule


def thompson(horizon: int) -> Rule:
    """Return probability matching: each arm is played with its probability of being best."""
    best_arm_probs = _best_arm_probs(horizon)
    return lambda step, plays, values: best_arm_probs(plays)


def double_sampling(horizon: int, num_samples: int = 1000, max_candidates: int = 1000) -> Rule:
    """Return double sampling for two arms: the mode of N candidates from p-hat, the winners of `num_samples` draws.

    p-hat of two arms is a binomial count, so the probability of a play is a polynomial in the probability p of being best, of
    degree `num_samples`. A cubic spline in the normal quantile of p replaces it, with an error below 1e-6.
    """
    wins = np.arange(num_samples + 1)
    play_probs = np.array([_mode_prob(k / num_samples, max_candidates) for k in wins])
    knots = np.linspace(-8.0, 8.0, 1601)
    log_binomial = -np.log(num_samples + 1) - special.betaln(1 + wins, 1 + num_samples - wins)
    logits = wins * special.log_ndtr(knots[:, None]) + (num_samples - wins) * special.log_ndtr(-knots[:, None])
    spline = interpolate.CubicSpline(knots, np.exp(log_binomial + logits) @ play_probs)
    best_arm_probs = _best_arm_probs(horizon)

    def rule(step: int, plays: Plays, values: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        best = np.clip(best_arm_probs(plays)[0], 0.0, 1.0)  # rounding can exceed 1
        first = spline(np.clip(special.ndtri(best), knots[0], knots[-1]))
        return first, 1.0 - first

    return rule


def _all_plays(num: int, num_arms: int) -> list[Plays]:
    """Return all numbers of plays of each arm with the sum `num`."""
    counts = itertools.product(range(num + 1), repeat=num_arms - 1)
    return [(*plays, num - sum(plays)) for plays in counts if sum(plays) <= num]


def _beta(n: int) -> tuple[np.ndarray, np.ndarray]:
    successes = np.arange(n + 1.0)
    return 1.0 + successes, 1.0 + n - successes


def _value_of_play(later: dict[Plays, np.ndarray], plays: Plays, arm: int) -> np.ndarray:
    """Return the expected sum of rewards from now on if this arm is played now."""
    after = later[(*plays[:arm], plays[arm] + 1, *plays[arm + 1 :])]
    n = plays[arm]
    success, failure = np.take(after, range(1, n + 2), axis=arm), np.take(after, range(n + 1), axis=arm)
    a, b = _beta(n)
    rate = _along(a / (a + b), arm, len(plays))
    return rate * (1.0 + success) + (1.0 - rate) * failure


def _along(values: np.ndarray, axis: int, num_axes: int) -> np.ndarray:
    return values.reshape([-1 if axis == other else 1 for other in range(num_axes)])


def _of_each_arm(scores: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return each arm's score as an array over the states of all arms."""
    return np.broadcast_arrays(*(_along(score, arm, len(scores)) for arm, score in enumerate(scores)))


def _shared_by_largest(scores: Sequence[np.ndarray]) -> np.ndarray:
    table = np.stack(scores)
    is_largest = table >= table.max(axis=0) - 1e-9  # equal to rounding
    return is_largest / is_largest.sum(axis=0)


def _solve_index(a: np.ndarray, b: np.ndarray, left: np.ndarray | float, index: np.ndarray) -> np.ndarray:
    """Solve lambda = mean + left E max(theta - lambda, 0) by Newton's method, from below the root."""
    mean, log_factor = a / (a + b), -np.log(a) - special.betaln(a, b)
    for _ in range(60):
        above = special.betaincc(a, b, index)
        # P(theta > lambda) under Beta(a + 1, b) is that under Beta(a, b) plus one term of the recurrence in a.
        term = np.exp(log_factor + a * np.log(index) + b * np.log1p(-index))
        excess = mean * (above + term) - index * above
        step = (mean + left * excess - index) / (1.0 + left * above)
        index = index + step
        if np.max(np.abs(step)) < 1e-11:
            break
    return index


def _best_arm_probs(horizon: int) -> Callable[[Plays], list[np.ndarray]]:
    """Return P(arm is best) as a function of plays, by Gauss-Legendre quadrature that is exact up to the horizon."""
    # The integrand f_a prod_b F_b is a polynomial of degree horizon + num_arms - 1 at most.
    nodes, weights = np.polynomial.legendre.leggauss(horizon // 2 + 3)
    nodes, weights = (nodes + 1.0) / 2.0, weights / 2.0
    law: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def density_and_cdf(n: int) -> tuple[np.ndarray, np.ndarray]:
        if n not in law:
            a, b = (value[:, None] for value in _beta(n))
            law[n] = (
                np.exp(special.xlogy(a - 1, nodes) + special.xlog1py(b - 1, -nodes) - special.betaln(a, b)),
                (special.betainc(a, b, nodes)),
            )
        return law[n]

    def best_arm_probs(plays: Plays) -> list[np.ndarray]:
        letters = "abcdef"[: len(plays)]
        formula = ",".join(f"{letter}g" for letter in letters) + ",g->" + letters
        laws = [density_and_cdf(n) for n in plays]
        return [
            np.einsum(formula, *(law[arm != best] for arm, law in enumerate(laws)), weights, optimize=True)
            for best in range(len(plays))
        ]

    return best_arm_probs


def _mode_prob(share: float, max_candidates: int) -> float:
    """Return the probability that an arm with p-hat = `share`, one of two, is the mode of N candidates."""
    if share in (0.0, 1.0):
        return share
    low, high = min(share, 1.0 - share), max(share, 1.0 - share)
    # p_FA is the mass beyond p* of a Gaussian with the moments of the other arm's p-hat, truncated to [0, 1].
    scale = np.sqrt(low * high)
    beyond_leader, beyond_one, below_zero = special.ndtr(np.array([low - high, low - 1.0, -low]) / scale)
    digits = -np.log10((beyond_leader - beyond_one) / (1.0 - beyond_one - below_zero))
    num = int(np.clip(np.floor(digits * (1.0 + 4e-15)), 1, max_candidates))
    won = stats.binom.sf(num // 2, num, share)
    return float(won + (0.5 * stats.binom.pmf(num // 2, num, share) if num % 2 == 0 else 0.0))
