"""Draws follow their laws, in both precisions, from the smallest parameters to the largest.

Laws are compared by Kolmogorov-Smirnov tests with fixed seeds, each at LEVEL divided by the number of tests (Bonferroni).
"""

import contextlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import special, stats

from ppl_bandit.numerics import sampling
from ppl_bandit.numerics.random_bits import to_unit_interval
from ppl_bandit.runtime.random_draws import random_words

NUM_DRAWS = 50_000
LEVEL = 1e-3
CONCENTRATIONS = np.array([1e-3, 1e-2, 0.1, 0.3, 1 / 3, 0.7, 1.0, 1.5, 2.0, 5.0, 30.0, 300.0, 1e4, 1e6, 1e8])
NUM_TESTS = 200  # at least as many as there are comparisons with a law in this file

# In the default run log gammas, of which the others are made, and normals are drawn in both precisions.
both_precisions = pytest.mark.parametrize("dtype", ["float32", "float64"])
precision = pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])


@contextlib.contextmanager
def in_precision(dtype):
    with jax.enable_x64(dtype == "float64"):
        yield jnp.dtype(dtype)


def assert_follows(draws, cdf, label=""):
    p_value = stats.kstest(np.asarray(draws, np.float64), cdf, method="asymp").pvalue
    assert p_value > LEVEL / NUM_TESTS, f"{label}: p = {p_value:.2e}"


def two_sided_z(num_comparisons):
    return stats.norm.isf(LEVEL / NUM_TESTS / num_comparisons / 2)


def log_gamma_cdf(concentration):
    """The law of log G. Below e^-30, gammainc(a, x) is x^a / Gamma(a + 1) to 13 digits, and x itself underflows."""

    def cdf(logs):
        small = np.exp(concentration * np.minimum(logs, -30) - special.gammaln(concentration + 1))
        return np.where(logs < -30, small, special.gammainc(concentration, np.exp(np.maximum(logs, -30))))

    return cdf


@both_precisions
def test_log_gamma_draws_of_all_shapes_in_one_call_follow_their_laws(dtype):
    with in_precision(dtype):
        draws = sampling.log_gamma(jr.key(1), jnp.asarray(CONCENTRATIONS, dtype), (NUM_DRAWS,))
        assert draws.shape == (NUM_DRAWS, len(CONCENTRATIONS)) and draws.dtype == dtype
    assert np.all(np.isfinite(draws))
    for column, concentration in zip(np.asarray(draws).T, CONCENTRATIONS, strict=True):
        # log(1e8) has a spacing of 2e-6 in float32, a fiftieth of the draws' deviation: too coarse to call continuous
        if concentration < 1e7 or dtype == "float64":
            assert_follows(column, log_gamma_cdf(concentration), f"log Gamma({concentration})")


@pytest.mark.slow
def test_a_million_log_gamma_draws_have_their_exact_mean_and_variance():
    # Enough draws to see one wrong decision in a hundred to accept a proposal.
    concentrations, num_draws = np.array([0.05, 0.3, 1.0, 2.0, 10.0]), 1_000_000
    draws = np.asarray(sampling.log_gamma(jr.key(14), jnp.asarray(concentrations), (num_draws,)), np.float64)
    # The cumulants of log G are polygammas; Var(s^2) = (kappa_4 + 2 kappa_2^2) / n.
    variance = special.polygamma(1, concentrations)
    variance_error = np.sqrt((special.polygamma(3, concentrations) + 2 * variance**2) / num_draws)
    z = two_sided_z(2 * len(concentrations))
    assert np.all(np.abs(draws.mean(0) - special.digamma(concentrations)) < z * np.sqrt(variance / num_draws))
    assert np.all(np.abs(draws.var(0) - variance) < z * variance_error)


@pytest.mark.parametrize(
    "concentration", [1e-3, 1.0, 1e5, *(pytest.param(c, marks=pytest.mark.slow) for c in (0.1, 30.0))]
)
def test_rounding_changes_the_distribution_function_of_a_gamma_draw_by_less_than_1e_5(concentration):
    """Proposals in float32 logarithms against the same proposals with SciPy's quantiles and float64 logarithms."""
    key, index = jr.key(8), jnp.arange(200_000, dtype=jnp.uint32)
    with in_precision("float64"):
        shapes = jnp.full(index.shape, concentration)
        found = np.asarray(jax.jit(sampling._propose_log_gamma_ratio)(key, index, jnp.uint32(0), shapes))
    high, low = (np.asarray(words, np.float64) for words in random_words(key, index, jnp.uint32(0)))
    high2, low2 = (np.asarray(words, np.float64) for words in random_words(key, index, jnp.uint32(1)))
    # The first word is a signed integer in two's complement.
    symmetric = np.where(high < 2.0**31, high, high - 2.0**32) * 2.0**-31 + high2 * 2.0**-63
    exponential = -np.log(low * 2.0**-32 + (low2 + 0.5) * 2.0**-64)
    mode = concentration + 2 / 3
    step = np.maximum(np.sqrt(2.0) * special.erfinv(symmetric) / (3.0 * np.sqrt(mode)), -1 + 1e-15)
    log_step = np.log1p(step)
    series = sum((-1) ** (power + 1) * step**power / power for power in range(4, 14))
    remainder = np.where(np.abs(step) < 0.05, series, log_step - step + step**2 / 2 - step**3 / 3)
    excess = exponential + 3.0 * mode * remainder
    is_accepted = found != np.inf
    assert np.sum(is_accepted != (excess >= 0)) <= 1
    exact = (3.0 * log_step - excess / concentration)[is_accepted & (excess >= 0)]
    cdf = log_gamma_cdf(concentration)
    errors = np.abs(cdf(np.log(mode) + found[is_accepted & (excess >= 0)]) - cdf(np.log(mode) + exact))
    assert errors.max() < 1e-5 and errors.mean() < 1e-7


@pytest.mark.parametrize("rejected", [0.5, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.0, 0.02))])
def test_rejected_elements_get_independent_draws(rejected):
    key = jr.key(6)

    def propose(index, attempt, parameters):
        high, low = random_words(key, index, attempt)
        draws = parameters + to_unit_interval(high, None, jnp.float32)
        return jnp.where(to_unit_interval(low, None, jnp.float32) < rejected, jnp.inf, draws)

    base = jnp.arange(50, dtype=jnp.float32)[:, None] % 2
    draws = np.asarray(sampling._draw_in_groups(propose, (50, 1000), base)) - np.asarray(base)
    # Proposals are floats of 23 bits between 1 and 2: of 25,000 draws some are equal, of rows that share a draw all would be.
    assert_follows(draws.ravel(), stats.uniform.cdf)
    assert all(np.unique(row).size >= 997 for row in draws)


@precision
def test_beta_draws_follow_their_laws(dtype):
    concentrations = np.array([(0.3, 0.5), (1.0, 1.0), (1.0, 3.0), (2.5, 40.0), (800.0, 200.0), (1e5, 3e5)])
    with in_precision(dtype):
        draws = sampling.beta(jr.key(3), *jnp.asarray(concentrations.T, dtype), (NUM_DRAWS,))
        assert draws.dtype == dtype
    for column, (ones, zeros) in zip(np.asarray(draws).T, concentrations, strict=True):
        assert_follows(column, stats.beta(ones, zeros).cdf, f"Beta({ones}, {zeros})")


@precision
def test_beta_draws_of_tiny_concentrations_are_near_the_ends_as_often_as_they_should_be(dtype):
    # Floats hold no number between 1 - 6e-8 and 1, so the law is compared at thresholds inside. Dvoretzky-Kiefer-
    # Wolfowitz: the largest gap between the shares and the law exceeds this tolerance with probability below `level`.
    thresholds = np.array([1e-30, 1e-20, 1e-10, 1e-5, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999])
    tolerance = np.sqrt(np.log(2 * NUM_TESTS / LEVEL) / (2 * NUM_DRAWS))
    with in_precision(dtype):
        draws = np.asarray(sampling.beta(jr.key(4), jnp.asarray(1e-2, dtype), jnp.asarray(1e-2, dtype), (NUM_DRAWS,)))
    shares = (draws[:, None] <= thresholds).mean(0)
    assert np.all((draws >= 0) & (draws <= 1))
    assert np.max(np.abs(shares - stats.beta(1e-2, 1e-2).cdf(thresholds))) < tolerance


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.floats(-6, 8), st.floats(-6, 8), st.integers(0, 2**31))
def test_beta_draws_never_leave_the_unit_interval(log_a, log_b, seed):
    draws = jitted_beta(jr.key(seed), np.float32(10**log_a), np.float32(10**log_b))
    assert np.all((draws >= 0) & (draws <= 1))


jitted_beta = jax.jit(lambda key, a, b: sampling.beta(key, a, b, (64,)))


@precision
@pytest.mark.parametrize(
    "concentrations",
    [(0.2, 0.5, 3.0), *(pytest.param(c, marks=pytest.mark.slow) for c in ((1.0, 1.0, 1.0, 1.0), (1e4, 3e4, 2.0)))],
)
def test_dirichlet_draws_sum_to_one_and_have_beta_marginals(concentrations, dtype):
    with in_precision(dtype):
        draws = sampling.dirichlet(jr.key(5), jnp.asarray(concentrations, dtype), (NUM_DRAWS,))
        assert draws.dtype == dtype
    draws = np.asarray(draws)
    assert np.max(np.abs(draws.sum(-1) - 1)) < 4 * len(concentrations) * np.finfo(dtype).eps
    for column, weight in zip(draws.T, concentrations, strict=True):
        assert_follows(column, stats.beta(weight, sum(concentrations) - weight).cdf, f"{weight} of {concentrations}")


def test_dirichlet_draws_of_tiny_concentrations_pick_one_category_in_proportion():
    weights = np.array([1e-3, 2e-3, 3e-3])
    draws = np.asarray(sampling.dirichlet(jr.key(6), jnp.asarray(weights), (NUM_DRAWS,)))
    probs = weights / weights.sum()
    assert not np.any(np.isnan(draws))
    # E of a component is its share, and its variance is below that of an indicator.
    assert np.all(np.abs(draws.mean(0) - probs) < two_sided_z(3) * np.sqrt(probs * (1 - probs) / NUM_DRAWS))


@both_precisions
def test_normal_draws_follow_their_law_far_into_the_tails(dtype):
    with in_precision(dtype):
        mean, scale = np.array([0.0, -3.0, 1e4], dtype), np.array([1.0, 0.1, 50.0], dtype)
        draws = sampling.normal(jr.key(7), mean, scale, (NUM_DRAWS,))
        tails = np.asarray(sampling.normal(jr.key(8), jnp.zeros((), dtype), jnp.ones((), dtype), (4_000_000,)))
        assert draws.dtype == dtype and tails.dtype == dtype
    for column, loc, sd in zip(np.asarray(draws).T, mean, scale, strict=True):
        assert_follows(column, stats.norm(loc, sd).cdf, f"Normal({loc}, {sd})")
    for threshold in (3.0, 4.0):  # about 5,400 and 127 draws beyond each end: a Poisson count
        for count in ((tails > threshold).sum(), (tails < -threshold).sum()):
            expected = len(tails) * stats.norm.sf(threshold)
            assert abs(count - expected) < two_sided_z(4) * np.sqrt(expected)


@precision
def test_gaussian_draws_have_the_inverse_of_the_precision_as_covariance(dtype):
    rng = np.random.default_rng(9)
    roots = rng.normal(size=(3, 4, 4))
    precisions = roots @ roots.swapaxes(-1, -2) + 0.5 * np.eye(4)
    with in_precision(dtype):
        draws = sampling.normal_vectors(jr.key(9), jnp.asarray(precisions, dtype), (100, 500))
        assert draws.shape == (100, 500, 3, 4) and draws.dtype == dtype
    draws = np.asarray(draws, np.float64).reshape(NUM_DRAWS, 3, 4)
    z = two_sided_z(3 * (4 + 16))
    for arm, exact in enumerate(np.linalg.inv(precisions)):
        variances = np.diag(exact)
        # Var of a covariance estimated from n Gaussian draws: (S_ii S_jj + S_ij^2) / n.
        error = np.sqrt((np.outer(variances, variances) + exact**2) / NUM_DRAWS)
        assert np.all(np.abs(np.cov(draws[:, arm], rowvar=False) - exact) < z * error)
        assert np.all(np.abs(draws[:, arm].mean(0)) < z * np.sqrt(variances / NUM_DRAWS))
        assert_follows(draws[:, arm, 0], stats.norm(0.0, np.sqrt(exact[0, 0])).cdf)


@pytest.mark.slow  # statistical; the laws are checked by other tests
def test_elements_neighbours_and_keys_are_uncorrelated():
    concentration = jnp.array([0.05, 1.0, 1.0, 50.0])
    together = np.asarray(sampling.log_gamma(jr.key(10), concentration, (NUM_DRAWS,)))
    keys = jr.split(jr.key(11), NUM_DRAWS)
    apart = np.asarray(jax.vmap(lambda key: sampling.log_gamma(key, concentration))(keys))
    normals = np.asarray(sampling.normal(jr.key(10), jnp.zeros(4), 1.0, (NUM_DRAWS,)))
    z = two_sided_z(3 * 2 * 16)
    for draws in (together, apart, normals):
        # Ranks, so that the heavy left tail of small shapes does not decide; Var(rank correlation) = 1 / (n - 1).
        ranks = stats.rankdata(draws, axis=0)
        between = np.corrcoef(ranks, rowvar=False) - np.eye(4)
        lagged = np.corrcoef(ranks[:-1], ranks[1:], rowvar=False)[:4, 4:]
        assert np.max(np.abs(between)) < z / np.sqrt(NUM_DRAWS - 1)
        assert np.max(np.abs(lagged)) < z / np.sqrt(NUM_DRAWS - 2)


SHAPES = jnp.array([0.01, 1.0, 40.0])
DRAW = {
    "log_gamma": lambda key: sampling.log_gamma(key, SHAPES, (11,)),
    "beta": lambda key: sampling.beta(key, SHAPES, SHAPES[::-1], (11,)),
    "dirichlet": lambda key: sampling.dirichlet(key, SHAPES, (11,)),
    "normal": lambda key: sampling.normal(key, SHAPES, SHAPES, (11,)),
    "gaussian": lambda key: sampling.normal_vectors(key, PRECISION, (11,)),
}
PRECISION = jnp.array([[2.25, 0.75], [0.75, 1.25]])


# The others are made of draws of log gammas and normals.
@pytest.mark.parametrize(
    "name", [n if n in ("log_gamma", "gaussian") else pytest.param(n, marks=pytest.mark.slow) for n in DRAW]
)
def test_vmap_scan_and_jit_draw_what_a_loop_draws(name):
    draw = DRAW[name]
    keys = jr.split(jr.key(12), 20)
    looped = np.stack([draw(key) for key in keys])
    scanned = jax.jit(lambda keys: jax.lax.scan(lambda _, key: (None, draw(key)), None, keys)[1])(keys)
    # Compiled in another shape, sums may round otherwise.
    np.testing.assert_allclose(jax.vmap(draw)(keys), looped, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(scanned, looped, rtol=2e-5, atol=1e-6)
    assert len(np.unique(looped[:, 0].ravel())) > 20  # different keys draw differently
    np.testing.assert_array_equal(draw(keys[0]), draw(keys[0]))


def test_outside_jit_a_second_draw_compiles_nothing(count_compilations):
    first, second = jr.split(jr.key(0))
    sampling.log_gamma(first, SHAPES, (13,))
    with count_compilations() as compiled:
        sampling.log_gamma(second, SHAPES, (13,))
    assert compiled == []


@pytest.mark.parametrize("key", [jr.PRNGKey(3), jr.key(3, impl="rbg")], ids=["legacy", "rbg"])
def test_other_kinds_of_key_serve(key):
    assert_follows(np.exp(sampling.log_gamma(key, jnp.array(2.0), (NUM_DRAWS,))), stats.gamma(2.0).cdf)


def test_types_follow_the_parameters():
    with jax.enable_x64(True):
        assert sampling.log_gamma(jr.key(0), jnp.float32(2.0)).dtype == jnp.float32
        assert sampling.log_gamma(jr.key(0), 2).dtype == jnp.float64
        assert sampling.normal(jr.key(0), jnp.float32(0), jnp.float64(1)).dtype == jnp.float64
    assert sampling.beta(jr.key(0), 1, 2).dtype == jnp.float32


def test_a_parameter_that_is_no_shape_gives_nan_and_spoils_no_other():
    # Were it rejected for ever, the draw would never return.
    draws = sampling.log_gamma(jr.key(0), jnp.array([jnp.nan, -1e-40, -2.0, jnp.inf, 3.0]), (5,))
    assert np.all(np.isnan(draws[:, :4])) and np.all(np.isfinite(draws[:, 4]))


@pytest.mark.parametrize("shape", [(0,), (1,), (31,), (33, 3)])
def test_none_of_however_many_draws_is_left_out(shape):
    """A twentieth of these is rejected at first, and drawn again in groups that need not divide their number."""
    with jax.enable_x64(True):
        ratios = sampling.log_gamma(jr.key(0), jnp.full(shape, 0.01), (7,))
    assert ratios.shape == (7, *shape)
    assert np.all(np.isfinite(ratios)) and len(np.unique(ratios)) == ratios.size
