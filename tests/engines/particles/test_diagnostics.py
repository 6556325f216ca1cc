"""Diagnostics against laws whose values are known."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT, chain_ess, moment_shifts, notable_k_hat, pareto_k_hat
from ppl_bandit.engines.particles.weights import (
    finite_log_weights,
    normalize_weights,
    weight_ess,
)
from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto

k_hat = jax.jit(pareto_k_hat)


@jax.jit
def k_hat_if_notable(log_weights):
    return notable_k_hat(log_weights, normalize_weights(log_weights))


@pytest.mark.parametrize("shape", [0.3, 0.5, 1.0])
def test_k_hat_finds_the_shape_of_pareto_weights(shape):
    # w = u^(-shape) has the tail index `shape`; with 3 sqrt(M) = 949 of 100,000 weights in the tail, the standard error of
    # the estimate is (1 + shape) / sqrt(949), at most 0.065, and four of them are allowed.
    log_weights = -shape * jnp.log(jr.uniform(jr.key(0), (100_000,), minval=1e-12))
    assert abs(float(k_hat(log_weights)) - shape) < 4 * (1 + shape) / 949**0.5


@pytest.mark.slow
def test_a_tail_is_fitted_only_if_the_largest_weight_is_large_enough_to_matter():
    """Weights 1 + scale X, X of a Pareto tail with k = 0.7, from nearly equal ones to ones of which a few count.

    Where no tail is fitted, the mean of M weights is to be off by no more than that of M independent draws, 1 / sqrt(M)
    relatively, as root of the mean square over the runs. Where one is fitted it is off by more, or nothing was to be found.
    """
    num, num_runs = 1000, 400
    generator = np.random.default_rng(0)
    find, fit = jax.jit(jax.vmap(k_hat_if_notable)), jax.jit(jax.vmap(k_hat))
    unfitted, fitted = [], []
    for scale in (0.01, 0.03, 0.1):
        excess = (generator.uniform(size=(num_runs, num)) ** -0.7 - 1.0) / 0.7  # of mean 1 / 0.3
        weights = 1.0 + scale * excess
        means = weights.mean(axis=1)
        stands_out = weights.max(axis=1) > means * num**0.5 / 7
        log_weights = jnp.log(jnp.asarray(weights))
        np.testing.assert_array_equal(find(log_weights), np.where(stands_out, fit(log_weights), 0.0))
        errors = means / (1.0 + scale / 0.3) - 1.0
        unfitted.append(errors[~stands_out])
        fitted.append(errors[stands_out])
    quiet, loud = np.concatenate(unfitted), np.concatenate(fitted)
    assert len(quiet) > 300 and len(loud) > 300
    assert np.sqrt(np.mean(quiet**2)) < 1.0 / np.sqrt(num) < np.sqrt(np.mean(loud**2))


def test_equal_weights_have_no_tail_and_impossible_weights_are_never_trusted():
    assert float(k_hat(jnp.full(1000, -3.2))) == 0.0
    assert float(k_hat(-1000.0 + 1e-4 * jr.normal(jr.key(0), (1000,)))) == 0.0  # the rounding of a long sum
    assert float(k_hat(jnp.full(1000, -jnp.inf))) == jnp.inf
    assert float(k_hat(jnp.zeros(1000).at[7].set(jnp.nan))) == jnp.inf
    for impossible in (jnp.full(1000, -jnp.inf), jnp.zeros(1000).at[7].set(jnp.nan)):
        assert float(k_hat_if_notable(impossible)) == jnp.inf
    assert float(weight_ess(jnp.full(50, 2.0))) == pytest.approx(50.0)
    assert float(weight_ess(jnp.zeros(50).at[1:].set(-jnp.inf))) == pytest.approx(1.0)
    assert float(weight_ess(jnp.full(50, -jnp.inf))) == 0.0
    np.testing.assert_array_equal(finite_log_weights(jnp.array([jnp.nan, -jnp.inf])), [0.0, 0.0])
    np.testing.assert_array_equal(finite_log_weights(jnp.array([jnp.nan, 1.0])), [-jnp.inf, 1.0])


def test_moment_shifts_match_closed_forms():
    # exp(x / 2) makes N(1/2, 1) of N(0, 1). Two means of 100,000 and of exp(-1/4) times as many: 0.005, and four of these.
    positions = jr.normal(jr.key(0), (100_000, 2))
    mean, sd = moment_shifts(positions, positions[:, 1] / 2)
    assert abs(float(mean) - 0.5) < 0.02
    # The weighted sd has an error of 1 / sqrt(2 x 78,000) = 0.0025; the larger of two coordinates, four of it.
    assert float(sd) < 0.01
    # exp(-x^2 / 2) makes N(0, 1/2) of it: sds are too wide by sqrt(2) - 1.
    mean, sd = moment_shifts(positions, -0.5 * positions[:, 0] ** 2)
    assert float(mean) < 0.02 and abs(float(sd) - (2**0.5 - 1)) < 0.02
    # Sums of 100,000 floats of 32 bits, rounded at each of some 17 levels.
    np.testing.assert_allclose(moment_shifts(positions, jnp.zeros(100_000)), 0.0, atol=1e-4)


def test_the_ess_of_ar1_chains_matches_its_closed_form():
    # An AR(1) chain has ESS = M (1 - r) / (1 + r). Autocorrelations of 10,000 draws are off by 0.01 each, a sum of some ten
    # by 0.03, so the sum 1/3 that belongs to r = -0.5 by a tenth; three of these are allowed.
    correlation = np.array([0.0, 0.7, -0.5])
    noise = np.random.default_rng(0).normal(size=(501, 20, 3))
    path = np.empty((501, 20, 3))
    path[0] = noise[0]
    for t in range(1, 501):
        path[t] = correlation * path[t - 1] + np.sqrt(1 - correlation**2) * noise[t]
    ess = jax.jit(chain_ess)(jnp.swapaxes(jnp.asarray(path[1:]), 0, 1))
    np.testing.assert_allclose(ess, 10_000 * (1 - correlation) / (1 + correlation), rtol=0.3)


def test_chains_that_disagree_or_do_not_move_have_a_small_ess():
    apart = 0.01 * np.random.default_rng(0).normal(size=(10, 100)) + np.arange(10.0)[:, None]
    ess = jax.jit(chain_ess)(jnp.stack([jnp.asarray(apart), jnp.ones((10, 100))], axis=-1))
    assert 0.0 < float(ess[0]) < 20.0
    assert float(ess[1]) < 20.0


@pytest.mark.slow
def test_the_k_hat_of_weights_whose_tail_is_found_in_single_precision_is_that_of_a_sort():
    """Tails that raise the flag and tails that do not, a level far from 0, and weights that single precision cannot tell apart.

    They are the same numbers but for the rounding of exponentials, 1e-16: of exceedances of 1e-10, in the last case, a
    millionth, and so much of their logarithms, of which k-hat is a mean.
    """
    noise = np.random.default_rng(0).standard_normal(1000)
    uniform = np.random.default_rng(1).uniform(size=1000)
    cases = [
        *(-shape * np.log(uniform) for shape in (0.2, 0.6, 0.8, 1.5)),
        0.05 * noise,
        -1e5 - 0.9 * np.log(uniform),
        np.where(uniform > 0.95, 3.0 * uniform, 1e-9 * noise),
    ]
    with jax.enable_x64(True):
        find = jax.jit(pareto_k_hat)
        fires = []
        for log_weights in cases:
            ordered = np.sort(log_weights)[::-1][:96]
            weights = np.exp(ordered - ordered[0])
            shape, _ = fit_generalized_pareto(jnp.asarray(weights[:-1] - weights[-1])[::-1])
            expected = (95 * float(shape) + 5.0) / 105.0
            assert abs(float(find(jnp.asarray(log_weights))) - expected) < 1e-6
            fires.append(expected > MAX_K_HAT)
        assert any(fires) and not all(fires)
