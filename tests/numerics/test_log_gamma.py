"""Log gammas and log betas against the same in decimal arithmetic, and where they are not finite."""

import math
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.numerics import sampling as own

gammaln, betaln = jax.jit(own.gammaln), jax.jit(own.betaln)
HALF_LOG_2_PI = Decimal("0.91893853320467274178032973640561763986")


def log_gamma(x):
    """Stirling's series beyond 40, where six terms leave 1e-22, with 40 decimal digits."""
    z = x + 40
    series = (1, 12), (-1, 360), (1, 1260), (-1, 1680), (1, 1188), (-691, 360360)
    rest = sum(Decimal(n) / d / z ** (2 * k + 1) for k, (n, d) in enumerate(series))
    return (z - Decimal("0.5")) * z.ln() - z + HALF_LOG_2_PI + rest - math.prod(x + k for k in range(40)).ln()


@pytest.mark.parametrize("is_double", [True, False])
def test_log_gammas_and_betas_are_right_to_rounding(is_double):
    """Relative to the value, or to 1 where that is smaller: some tens of operations, each with its own rounding.

    The reference is decimal: log gammas of up to 1e7 cancel in a log beta, and extended precision would leave 1e-12 of them.
    """
    with jax.enable_x64(is_double), localcontext(prec=40):
        rng = np.random.default_rng(0)
        a, b = (jnp.asarray(10 ** rng.uniform(-6, high, 1000)) for high in (4, 6))
        pairs = [(Decimal(float(x)), Decimal(float(y))) for x, y in zip(a, b, strict=True)]
        exact_gammas = [log_gamma(y) for _, y in pairs]
        exact_betas = [log_gamma(x) + of_y - log_gamma(x + y) for (x, y), of_y in zip(pairs, exact_gammas, strict=True)]
        rounding = float(jnp.finfo(a.dtype).eps)
        for found, exact in ((gammaln(b), exact_gammas), (betaln(a, b), exact_betas), (betaln(b, a), exact_betas)):
            errors = [
                abs(Decimal(float(value)) - target) / max(1, abs(target))
                for value, target in zip(found, exact, strict=True)
            ]
            assert max(errors) < 64 * rounding


def test_a_step_of_one_is_a_logarithm():
    """B(a + 1, b) = B(a, b) a / (a + b), also where the recursion gives way to the series."""
    with jax.enable_x64(True):
        a, b = jnp.linspace(0.5, 9.5, 400), jnp.linspace(7.9, 0.1, 400)
        np.testing.assert_allclose(betaln(a + 1.0, b) - betaln(a, b), jnp.log(a / (a + b)), atol=1e-13)


def test_what_has_no_integral_is_not_finite():
    x = jnp.array([0.0, -0.5, -1.0, -1.5, jnp.nan])
    assert not np.any(np.isfinite(gammaln(x))) and not np.any(np.isfinite(betaln(x, jnp.array(2.0))))
    assert np.isfinite(gammaln(jnp.array(1e-30))) and np.isfinite(betaln(jnp.array(1e-30), jnp.array(1e30)))
