"""Events that join several arms have the probabilities that scipy's laws give by quadrature, also at the ends of supports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ppl_bandit.numerics import marginal_laws
from ppl_bandit.numerics.joint_events import joint_events

DELTA, RATIO, ARM = 0.05, 0.02, 1
BOUND = 1e-3  # of every probability of a look
ORDERS = np.concatenate([np.logspace(-12, -2, 1200), np.linspace(0.01, 0.99, 4000)])


def beta(counts, prior):
    shapes = [(prior + events, prior + rows - events) for events, rows in counts]
    return (*np.transpose(shapes),), [stats.beta(*shape) for shape in shapes]


def gamma(counts, prior):
    shapes = [(prior + events, prior + exposure) for events, exposure in counts]
    return (*np.transpose(shapes),), [stats.gamma(shape, scale=1.0 / rate) for shape, rate in shapes]


def normal(locs, scales):
    return (np.full(len(locs), np.inf), locs, scales), [stats.norm(*own) for own in zip(locs, scales, strict=True)]


def prices(counts, scales):
    shapes = [(1.0 + events, 1.0 + rows - events) for events, rows in counts]
    laws = [stats.beta(*shape, scale=scale) for shape, scale in zip(shapes, scales, strict=True)]
    return (*np.transpose(shapes), np.zeros(len(scales)), np.array(scales)), laws


ALL, NONE, FEW = [(5, 5), (20, 20), (2000, 2000)], [(0, 5), (0, 50), (0, 2000)], [(17, 20), (1, 50), (1990, 2000)]
COUNTS = [*ALL, *NONE, *FEW, (3, 5), (1000, 2000), (0, 20)]
RNG = np.random.default_rng(1)
PAIRS = [((20, 20), (17, 20)), ((0, 20), (0, 20)), ((0, 50), (0, 50)), ((5, 5), (1000, 2000)), ((0, 2000), (1, 2000))]
SETS = [*PAIRS, *([COUNTS[i] for i in RNG.integers(0, len(COUNTS), num)] for num in (2, 2, 2, 3, 3, 3, 3, 5, 5, 5, 5))]
CASES = {
    "Beta(1, 1)": (marginal_laws.beta_law, [beta(counts, 1.0) for counts in SETS]),
    "Beta(.5, .5)": (marginal_laws.beta_law, [beta(counts, 0.5) for counts in SETS]),
    "Gamma": (
        marginal_laws.gamma_law,
        [gamma(counts, prior) for prior in (1.0, 0.1) for counts in (PAIRS[1], PAIRS[2], NONE, [*NONE, (40, 400)])],
    ),
    "Normal": (
        marginal_laws.student_t_law,
        [
            normal([0.0, 0.02], [0.03, 0.0005]),
            normal([0.0, 0.3], [1.0, 0.01]),
            normal([0.1, 0.0, 0.1], [1e-3, 1.0, 20.0]),
        ],
    ),
    "prices": (
        marginal_laws.beta_law,
        [prices(FEW, [1.0, 0.9, 0.3]), prices([(0, 20), (0, 50), (17, 20)], [2.0, 1.0, 0.1])],
    ),
}


def by_trapezoids(laws):
    """Return P(best), P(range < delta), P(gap to one arm > delta, 0, -delta), and P(an arm is near the best)."""
    quantiles = np.concatenate([np.concatenate([law.ppf(ORDERS), law.isf(ORDERS)]) for law in laws])
    near = np.concatenate([quantiles / (1.0 + RATIO), quantiles / (1.0 - RATIO)])
    x = np.unique(np.concatenate([quantiles, quantiles - DELTA, quantiles + DELTA, near]))
    below, later, same = (np.array([law.cdf(at) for law in laws]) for at in (x, x + DELTA, x + RATIO * np.abs(x)))
    num = len(laws)

    def average(over, values):
        return np.sum(np.diff(over) * 0.5 * (values[1:] + values[:-1]))

    def others(values, arm):
        return np.prod([values[other] for other in range(num) if other != arm], axis=0)

    gaps = [1.0 - np.array([average(below[ARM], own) for own in values]) for values in (later, below)]
    gaps.append(np.array([average(own, later[ARM]) for own in below]))
    return [
        [average(below[arm], others(below, arm)) for arm in range(num)],
        sum(average(below[arm], others(later - below, arm)) for arm in range(num)),
        *(np.where(np.arange(num) == ARM, own, gap) for own, gap in zip((0.0, 0.0, 1.0), gaps, strict=True)),
        average(below[ARM], others(same, ARM)),
    ]


@functools.cache
def compiled(family, num_arms, is_double):
    def compute(*parameters):
        law = CASES[family][0](*parameters)
        joint, shifted, every = joint_events(law), joint_events(law, DELTA), jnp.ones(num_arms, bool)
        return (
            joint.best_arm_probs(every),
            shifted.range_prob(every),
            shifted.exceeding_probs(ARM),
            joint.exceeding_probs(ARM),
            1.0 - shifted.falling_short_probs(ARM),
            joint.near_best_prob(RATIO, every, ARM),
        )

    return jax.jit(jax.vmap(compute))


@pytest.mark.parametrize("is_double", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("Beta(.5, .5)", "Gamma") else name for name in CASES],
)
def test_probabilities_of_joint_events_match_scipy(family, is_double):
    cases = CASES[family][1]
    for num_arms in sorted({len(laws) for _, laws in cases}):
        chosen = [(parameters, laws) for parameters, laws in cases if len(laws) == num_arms]
        with jax.enable_x64(is_double):
            stacked = [jnp.asarray(np.stack(own), float) for own in zip(*(own for own, _ in chosen), strict=True)]
            found = jax.device_get(compiled(family, num_arms, is_double)(*stacked))
        for number, (_, laws) in enumerate(chosen):
            for own, expected in zip(found, by_trapezoids(laws), strict=True):
                np.testing.assert_allclose(own[number], expected, atol=BOUND, rtol=0, err_msg=str(chosen[number][0]))


def test_arms_that_do_not_compete_win_nothing():
    with jax.enable_x64(True):
        a, b = jnp.array([21.0, 18.0, 30.0]), jnp.array([1.0, 4.0, 2.0])
        joint = jax.jit(lambda: joint_events(marginal_laws.beta_law(a, b)))()
        probs = joint.best_arm_probs(jnp.array([True, True, False]))
        assert float(joint.range_prob(jnp.array([False, True, False]))) == 1.0
    np.testing.assert_allclose(probs, [0.9465, 0.0535, 0.0], atol=BOUND)
