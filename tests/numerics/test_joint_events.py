"""Events that join several arms have the probabilities that scipy's laws give on a fine grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ppl_bandit.numerics import marginal_laws
from ppl_bandit.numerics.joint_events import joint_events

DELTA, RATIO, ARM = 0.04, 0.02, 1
CASES = {
    "rates": (
        lambda: marginal_laws.beta_law(jnp.array([60.0, 320.0, 75.0]), jnp.array([40.0, 180.0, 60.0])),
        [stats.beta(60, 40), stats.beta(320, 180), stats.beta(75, 60)],
    ),
    "prices": (
        lambda: marginal_laws.beta_law(
            jnp.array([30.0, 80.0, 50.0]), jnp.array([300.0, 700.0, 90.0]), 0.0, np.array([1.0, 0.9, 0.3])
        ),
        [stats.beta(30, 300, scale=1.0), stats.beta(80, 700, scale=0.9), stats.beta(50, 90, scale=0.3)],
    ),
    "counts": (
        lambda: marginal_laws.gamma_law(jnp.array([30.0, 80.0, 45.0]), jnp.array([300.0, 700.0, 400.0])),
        [stats.gamma(30, scale=1 / 300), stats.gamma(80, scale=1 / 700), stats.gamma(45, scale=1 / 400)],
    ),
    "means": (
        lambda: marginal_laws.student_t_law(
            jnp.array([jnp.inf, jnp.inf, jnp.inf]), jnp.array([0.0, 0.02, 0.05]), jnp.array([0.03, 0.02, 0.05])
        ),
        [stats.norm(0.0, 0.03), stats.norm(0.02, 0.02), stats.norm(0.05, 0.05)],
    ),
    "unknown noise": (
        lambda: marginal_laws.student_t_law(
            jnp.array([20.0, 40.0, 60.0]), jnp.array([0.0, 0.02, 0.05]), jnp.array([0.03, 0.02, 0.05])
        ),
        [stats.t(20, 0.0, 0.03), stats.t(40, 0.02, 0.02), stats.t(60, 0.05, 0.05)],
    ),
}


def by_midpoints(laws):
    """Return P(best), P(best of the first two), P(range < delta), P(gap to one arm > delta) and P(an arm is near the best)."""
    ends = [np.min([law.ppf(1e-11) for law in laws]), np.max([law.isf(1e-11) for law in laws])]
    x = np.linspace(*ends, 20_001)
    middle = 0.5 * (x[1:] + x[:-1])
    masses = np.diff([law.cdf(x) for law in laws], axis=1)
    below, shifted = (np.array([law.cdf(middle + delta) for law in laws]) for delta in (0.0, DELTA))
    near = np.array([law.cdf(middle + RATIO * np.abs(middle)) for law in laws])

    def product(values, arm, arms=(0, 1, 2)):
        return np.prod([values[other] for other in arms if other != arm], axis=0)

    return (
        [np.sum(masses[arm] * product(below, arm)) for arm in range(3)],
        [np.sum(masses[arm] * product(below, arm, (0, 1))) for arm in range(2)] + [0.0],
        sum(np.sum(masses[arm] * product(shifted - below, arm)) for arm in range(3)),
        [0.0 if arm == ARM else np.sum(masses[ARM] * (1.0 - shifted[arm])) for arm in range(3)],
        np.sum(masses[ARM] * product(near, ARM)),
    )


@pytest.mark.parametrize("name", CASES)
def test_probabilities_of_joint_events_match_scipy(name):
    make, laws = CASES[name]
    every = jnp.ones(3, bool)

    def compute():
        joint = joint_events(make(), every, DELTA)
        return (
            joint.best_arm_probs(every),
            joint.best_arm_probs(jnp.array([True, True, False])),
            joint.range_prob(DELTA, every),
            joint.gap_probs(DELTA, ARM),
            joint.near_best_prob(RATIO, every, ARM),
        )

    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(compute)())
    for own, expected in zip(found, by_midpoints(laws), strict=True):
        np.testing.assert_allclose(
            own, expected, atol=2e-5, rtol=0
        )  # the grid's bound of 1e-5, and as much for the midpoints
