"""The generalised Pareto tail, against laws whose quantiles are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto, tail_quantile

FIT = jax.jit(jax.vmap(lambda draws: fit_generalized_pareto(jnp.sort(draws))))
QUANTILE = jax.jit(jax.vmap(tail_quantile, in_axes=(0, None)))


def test_the_fit_recovers_shape_and_scale():
    rng = np.random.default_rng(0)
    num_fits, size = 400, 500
    for shape in (-0.4, 0.0, 0.3, 0.8):
        draws = stats.genpareto(shape, scale=2.0).rvs((num_fits, size), random_state=rng)
        shapes, scales = FIT(jnp.asarray(draws, jnp.float32))
        # Standard deviations of maximum likelihood, for large n: (1 + k) / sqrt(n) and sigma sqrt(2 (1 + k) / n). The
        # mean over fits may be off by 5 of its standard errors and a bias of order 1/n.
        shape_error, scale_error = (1 + shape) / np.sqrt(size), 2.0 * np.sqrt(2 * (1 + shape) / size)
        assert abs(shapes.mean() - shape) < 5 * shape_error / np.sqrt(num_fits) + 3 / size
        assert abs(scales.mean() - 2.0) < 5 * scale_error / np.sqrt(num_fits) + 6 / size
        if shape >= 0:
            # No estimator does much better, and 400 fits know a standard deviation to 3.5%. (Near k = -1/2 the large-n
            # value is not yet reached at n = 500.)
            np.testing.assert_allclose(shapes.std(), shape_error, rtol=0.12)


def test_the_fit_scales_with_the_draws():
    draws = stats.genpareto(0.2).rvs(100, random_state=np.random.default_rng(1))
    given = np.stack([draws, 1e6 * draws, 1e-6 * draws])
    shapes, scales = FIT(jnp.asarray(given, jnp.float32))
    np.testing.assert_allclose(shapes, shapes[0], rtol=1e-4)
    np.testing.assert_allclose(scales, scales[0] * np.array([1, 1e6, 1e-6]), rtol=1e-4)


def test_the_fit_at_its_edges():
    shapes, scales = FIT(jnp.stack([jnp.zeros(100), jnp.ones(100)]))
    assert shapes[0] == 0.0 and scales[0] == 0.0
    assert shapes[1] < -1.0 and scales[1] > 0.0  # all draws at the upper end: bounded, and dense there


def test_a_draw_that_dwarfs_the_others_shows_as_a_heavy_tail():
    log_weights = np.random.default_rng(6).normal(size=100)
    for spread in (10.0, 100.0, 1000.0):
        # From 100 on most weights underflow to 0 next to the largest.
        weights = np.exp(spread * (log_weights - log_weights.max())).astype(np.float32)
        shape, _ = FIT(jnp.asarray(weights[None] - weights.min()))
        assert shape[0] > 1.0
    alone, _ = FIT(jnp.zeros((1, 100)).at[0, 3].set(1.0))
    assert alone[0] > 1.0


@pytest.mark.parametrize(
    "law",
    [
        pytest.param(stats.beta(9, 3), id="Beta(9, 3)"),
        pytest.param(stats.beta(300, 80), id="Beta(300, 80)"),
        pytest.param(stats.norm(1, 2), id="Normal(1, 2)"),
        pytest.param(stats.t(5), id="StudentT(5)"),
    ],
)
def test_extrapolated_quantiles_beat_empirical_ones(law):
    num_replicates, num_draws = 400, 1000
    draws = law.rvs((num_replicates, num_draws), random_state=np.random.default_rng(2))
    for odds in (200, 1000, 2000, 5000):
        order = 1 - 1 / odds
        truth = law.ppf(order)
        extrapolated = np.asarray(QUANTILE(jnp.asarray(draws, jnp.float32), jnp.asarray(order))) - truth
        empirical = np.quantile(draws, order, axis=1) - truth
        # A root mean square of 400 replicates is known to 1 / sqrt(2 * 400) = 3.5%, and both come from the same draws.
        assert np.sqrt(np.mean(extrapolated**2)) < np.sqrt(np.mean(empirical**2))
        if odds > num_draws:
            # Beyond the sample the largest draw falls short on average; the extrapolation does not, to a third of that.
            assert abs(extrapolated.mean()) < abs(empirical.mean()) / 3 + 5 * extrapolated.std() / np.sqrt(
                num_replicates
            )
            assert empirical.mean() < -5 * empirical.std() / np.sqrt(num_replicates)


def test_below_the_threshold_the_quantile_is_the_empirical_one():
    draws = np.random.default_rng(3).normal(size=(1, 1000))
    for order in (0.0, 0.1, 0.5, 0.8):
        computed = QUANTILE(jnp.asarray(draws, jnp.float32), jnp.asarray(order))
        np.testing.assert_allclose(computed, np.quantile(draws, order, axis=1), rtol=1e-4)


def test_quantiles_rise_with_their_order_across_the_threshold_and_beyond_the_sample():
    draws = jnp.asarray(np.random.default_rng(4).normal(size=(1, 1000)), jnp.float32)
    orders = 1 - np.geomspace(0.5, 1e-6, 60)
    computed = np.array([QUANTILE(draws, jnp.asarray(order))[0] for order in orders])
    # At the threshold the empirical quantile hands over to the fit: a step back of at most a spacing of draws there.
    assert np.all(np.diff(computed) > -0.02)
    assert computed[-1] > draws.max()


def test_few_draws_and_repeated_draws_are_not_extrapolated():
    few = jnp.asarray([[3.0, 1.0, 2.0]])
    assert QUANTILE(few, jnp.asarray(0.5))[0] == 2.0
    assert QUANTILE(few, jnp.asarray(1.0))[0] == 3.0
    equal = jnp.full((1, 1000), 0.7)
    for order in (0.0, 0.5, 0.9999, 1.0):
        np.testing.assert_allclose(QUANTILE(equal, jnp.asarray(order)), 0.7, rtol=1e-6)
        two_values = jnp.where(jnp.arange(1000) % 20 == 0, 1.0, equal)
        np.testing.assert_allclose(QUANTILE(two_values, jnp.asarray(order)), np.quantile(two_values, order), rtol=1e-6)


def test_the_extrapolation_works_in_float64():
    draws = np.random.default_rng(5).normal(size=(3, 1000))
    single = QUANTILE(jnp.asarray(draws, jnp.float32), jnp.asarray(0.9995))
    with jax.enable_x64(True):
        double = QUANTILE(jnp.asarray(draws), jnp.asarray(0.9995))
    assert double.dtype == jnp.float64
    # 1 - q keeps 3 digits in float32, and the quantile moves by its density times that.
    np.testing.assert_allclose(double, single, rtol=1e-3)
