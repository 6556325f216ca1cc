"""Log gammas and log betas against the same in extended precision, and where they are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.numerics.log_gamma import betaln, gammaln


def log_gamma(x):
    """Stirling's series beyond 40, where six terms leave 1e-22, in extended precision."""
    x = np.asarray(x, np.longdouble)
    z = x + 40
    series = (1, 12), (-1, 360), (1, 1260), (-1, 1680), (1, 1188), (-691, 360360)
    rest = sum(np.longdouble(n) / d / z ** (2 * k + 1) for k, (n, d) in enumerate(series))
    half_log_turn = np.log(8 * np.arctan(np.longdouble(1))) / 2
    return (z - 0.5) * np.log(z) - z + half_log_turn + rest - sum(np.log(x + k) for k in range(40))


@pytest.mark.parametrize("is_double", [True, False])
def test_log_gammas_and_betas_are_right_to_rounding(is_double):
    """Relative to what they are, or to 1 where that is smaller; a handful of terms are added, each with its own rounding.

    Extended precision holds 1e-19 of the logarithms of factorials, up to 1e7: the reference is right to 1e-12 of 1 at worst.
    """
    with jax.enable_x64(is_double):
        rng = np.random.default_rng(0)
        a, b = (jnp.asarray(10 ** rng.uniform(-6, high, 4000)) for high in (4, 6))
        rounding = float(jnp.finfo(a.dtype).eps)
        wide = np.asarray(a, np.longdouble), np.asarray(b, np.longdouble)
        for found, exact in (
            (gammaln(b), log_gamma(wide[1])),
            (betaln(a, b), log_gamma(wide[0]) + log_gamma(wide[1]) - log_gamma(wide[0] + wide[1])),
            (betaln(b, a), log_gamma(wide[0]) + log_gamma(wide[1]) - log_gamma(wide[0] + wide[1])),
        ):
            error = np.abs(np.asarray(found) - exact) / np.maximum(1.0, np.abs(exact))
            assert np.max(error) < 64 * rounding


def test_a_step_of_one_is_a_logarithm():
    """B(a + 1, b) = B(a, b) a / (a + b), also where the recursion gives way to the series."""
    with jax.enable_x64(True):
        a, b = jnp.linspace(0.5, 9.5, 400), jnp.linspace(7.9, 0.1, 400)
        np.testing.assert_allclose(betaln(a + 1.0, b) - betaln(a, b), jnp.log(a / (a + b)), atol=1e-13)


def test_what_has_no_integral_is_not_finite():
    x = jnp.array([0.0, -0.5, -1.0, -1.5, jnp.nan])
    assert not np.any(np.isfinite(gammaln(x))) and not np.any(np.isfinite(betaln(x, jnp.array(2.0))))
    assert np.isfinite(gammaln(jnp.array(1e-30))) and np.isfinite(betaln(jnp.array(1e-30), jnp.array(1e30)))
