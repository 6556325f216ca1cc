"""Logarithms of products against sums of logarithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.numerics.log_products import log_product
from ppl_bandit.runtime.unrolled_reductions import sum_along


@pytest.mark.parametrize(
    "num", [1, 5, 16, 96, 1100]
)  # written out, a loop, and more factors than exponents have room for
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_log_of_a_product_is_the_sum_of_logs_whatever_the_size(num, dtype):
    rng = np.random.default_rng(num)
    reach = 30 if dtype == jnp.float32 else 290
    with jax.enable_x64(True):
        factors = jnp.asarray(10.0 ** rng.uniform(-reach, reach, size=(2, num, 3)), dtype)
        exact = np.sum(np.log(np.asarray(factors, np.float64)), axis=1)
        found = log_product(factors, 1)
        # Rounded as the product's mantissas and the sum of exponents are: num roundings of 1, and one of the largest term.
        size = np.sum(np.abs(np.log(np.asarray(factors, np.float64))), axis=1)
        assert np.all(np.abs(found - exact) <= jnp.finfo(dtype).eps * (num + size))
        np.testing.assert_allclose(
            sum_along(jnp.log(factors), 1), exact, atol=float(jnp.finfo(dtype).eps * num * size.max())
        )


def test_what_is_no_positive_number_has_no_log():
    with jax.enable_x64(True):
        for bad in (0.0, -1.0, np.inf, np.nan, 1e-310):
            found = log_product(jnp.array([[2.0, 2.0], [bad, 3.0]]), 0)
            assert np.isnan(found[0]) and np.isclose(found[1], np.log(6.0))
