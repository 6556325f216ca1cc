"""What the identity of the best arm says about the others: the integrals match scipy's laws on a fine grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ppl_bandit.numerics import best_arm_probs, marginal_laws
from ppl_bandit.selectors.information_directed import regret_and_information

ONE, NONE = np.ones(3), np.zeros(3)
CASES = {  # a family of laws, its parameters by arm, and the laws
    "uniform": (marginal_laws.beta_law, (ONE, ONE, NONE, ONE), [stats.beta(1, 1)] * 3),
    "early": (
        marginal_laws.beta_law,
        ([30.0, 3.0, 1.0], [20.0, 7.0, 5.0], NONE, ONE),
        [stats.beta(30, 20), stats.beta(3, 7), stats.beta(1, 5)],
    ),
    "two arms": (
        marginal_laws.beta_law,
        ([1200.0, 8.0], [300.0, 7.0], NONE[:2], ONE[:2]),
        [stats.beta(1200, 300), stats.beta(8, 7)],
    ),
    "prices": (
        marginal_laws.beta_law,
        ([3.0, 8.0, 5.0], [30.0, 70.0, 9.0], NONE, [10.0, 5.0, 2.0]),
        [stats.beta(3, 30, scale=10), stats.beta(8, 70, scale=5), stats.beta(5, 9, scale=2)],
    ),
    "counts": (
        marginal_laws.gamma_law,
        ([3.0, 8.0, 0.5], [30.0, 70.0, 2.0]),
        [stats.gamma(3, scale=1 / 30), stats.gamma(8, scale=1 / 70), stats.gamma(0.5, scale=0.5)],
    ),
    "an odd unit": (
        marginal_laws.student_t_law,
        ([np.inf] * 3, [1e7, 1.1e7, 1.2e7], [1e6, 2e6, 5e5]),
        [stats.norm(1e7, 1e6), stats.norm(1.1e7, 2e6), stats.norm(1.2e7, 5e5)],
    ),
    "long tails": (
        marginal_laws.student_t_law,
        ([4.0, 5.0, 30.0], [0.0, 1.0, 2.0], [1.0, 2.0, 0.1]),
        [stats.t(4, 0, 1), stats.t(5, 1, 2), stats.t(30, 2, 0.1)],
    ),
}


@functools.cache
def compiled_moments(law):
    """Return `best_arm_moments` of the parameters of a law, compiled once for each number of arms and precision."""
    return jax.jit(lambda parameters: best_arm_probs.best_arm_moments(law(*parameters)))


def by_trapezoids(variables):
    """Return P(b is best), E[theta_b; b is best] and E[theta_b - theta_a; b is best], with scipy's functions."""
    orders = np.concatenate([np.logspace(-13, -2, 4000), np.linspace(0.01, 0.99, 20_000)])
    grid = [own.ppf(orders) for own in variables] + [own.isf(orders[:4000]) for own in variables]
    x = np.unique(np.concatenate(grid))
    x = np.unique(np.concatenate([x, np.linspace(x[0], x[-1], 100_000)]))
    below, density = (np.stack([getattr(own, name)(x) for own in variables]) for name in ("cdf", "pdf"))
    density = np.where(np.isfinite(density), density, 0.0)
    lacks = np.pad(np.cumsum(0.5 * (below[:, 1:] + below[:, :-1]) * np.diff(x), axis=1), ((0, 0), (1, 0)))
    num_arms = len(variables)
    probs, centred_values, gaps = np.zeros(num_arms), np.zeros(num_arms), np.zeros((num_arms, num_arms))
    for b in range(num_arms):
        won = density[b] * np.prod(np.delete(below, b, axis=0), axis=0)
        probs[b], centred_values[b] = np.trapezoid(won, x), np.trapezoid(x * won, x)
        for a in set(range(num_arms)) - {b}:
            others = np.prod(np.delete(below, [a, b], axis=0), axis=0)
            gaps[b, a] = np.trapezoid(density[b] * lacks[a] * others, x)
    return probs, centred_values, gaps


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_double", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_costs_and_information_are_those_of_the_laws(case, is_double):
    law, parameters, variables = CASES[case]
    with jax.enable_x64(is_double):
        found = jax.tree.map(np.asarray, compiled_moments(law)(tuple(map(jnp.asarray, parameters))))
    probs, centred_values, gaps = by_trapezoids(variables)
    spread = max(own.std() for own in variables)
    # Nodes, not draws: the error is that of the quadrature, which promises 1%, in both precisions.
    np.testing.assert_allclose(found.probs, probs, atol=5e-4)
    np.testing.assert_allclose(found.gaps, gaps, rtol=0.01, atol=1e-3 * spread)
    level = np.sum(centred_values)
    np.testing.assert_allclose(found.centred_values, centred_values - probs * level, rtol=0.01, atol=1e-3 * spread)
    assert np.all(found.gaps >= 0) and np.all(np.diag(found.gaps) == 0)


def test_a_contest_is_what_a_table_of_draws_estimates():
    with jax.enable_x64(True):
        shapes = np.array([[5.0, 4.0], [3.0, 4.0], [9.0, 30.0], [2.0, 2.0]])
        allowed = jnp.array([True, True, True, False])
        found = jax.device_get(
            jax.jit(lambda: best_arm_probs.best_arm_moments(marginal_laws.beta_law(*jnp.asarray(shapes.T)), allowed))()
        )
        draws = np.random.default_rng(0).beta(*shapes.T, size=(200_000, 4))
        table = jnp.where(allowed, draws, 0.0)
        probs = np.bincount(np.argmax(np.where(allowed, draws, -1.0), axis=1), minlength=4) / len(draws)
        regrets, informations = jax.jit(regret_and_information)(table, allowed, jnp.asarray(probs))
    # Four standard errors of a mean of 200,000 draws whose deviation is at most .25, and of a share.
    np.testing.assert_allclose(found.probs, probs, atol=4 * 0.5 / 200_000**0.5)
    np.testing.assert_allclose(np.sum(found.gaps, axis=0)[:3], regrets[:3], atol=4 * 0.25 / 200_000**0.5)
    sums = (found.centred_values[:, None] - found.gaps)[:3, :3]
    shifts = sums / found.probs[:3, None] - np.sum(sums, axis=0)
    # A mean given the winner is off by .25 / sqrt(200,000 p), p at least .02: .004; squares of shifts of at most .3 by .0024.
    np.testing.assert_allclose(found.probs[:3] @ shifts**2, informations[:3], atol=4 * 0.0024 * 0.1)
    assert found.probs[3] == 0 and np.all(found.gaps[3] == 0) and np.all(found.gaps[:, 3] == 0)


MANY = {  # how many arms, successes, failures
    "two known well above many that are not": [(1, 8e5, 2e5), (1, 8.001e5, 1.999e5), (98, 2.5, 4.5)],
    "two known well amid many that are not": [(2, 8e6, 2e6), (1, 16.0, 6.0), (97, 2.5, 2.5)],
    "three unknown above many known well": [(1, 6.0, 7.0), (1, 7.0, 6.0), (1, 6.5, 6.5), (97, 3e5, 7e5)],
    "one seen, the others never": [(1, 6.0, 6.0), (99, 1.0, 1.0)],
    "all alike but one": [(1, 501.0, 9501.0), (99, 41.0, 961.0)],
}


@pytest.mark.slow
def test_of_a_hundred_arms_those_that_decide_are_resolved():
    def reference(groups):
        """Integrate with scipy's functions, arms of a kind at once, from the values that their quantiles have together."""
        kinds, counts = [stats.beta(a, b) for _, a, b in groups], np.array([num for num, _, _ in groups])
        orders = np.concatenate([np.logspace(-14, -2, 2000), np.linspace(0.01, 0.99, 10_000)])
        x = np.unique([own(orders) for kind in kinds for own in (kind.ppf, kind.isf)])
        below = np.stack([kind.cdf(x) for kind in kinds])
        middle = 0.5 * (below[:, 1:] + below[:, :-1])
        won = [
            np.sum(np.diff(own) * np.prod(middle ** (counts - (np.arange(len(kinds)) == k))[:, None], axis=0))
            for k, own in enumerate(below)
        ]
        return np.repeat(won, counts)

    with jax.enable_x64(True):
        find = jax.jit(lambda a, b: best_arm_probs.best_arm_probs(marginal_laws.beta_law(a, b)))
        for name, groups in MANY.items():
            counts, a, b = map(np.array, zip(*groups, strict=True))
            found = find(jnp.repeat(a, counts, total_repeat_length=100), jnp.repeat(b, counts, total_repeat_length=100))
            np.testing.assert_allclose(found, reference(groups), rtol=0, atol=1e-4, err_msg=name)
