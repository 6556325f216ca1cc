"""Short rows are sorted as NumPy sorts them, one by one and many at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.numerics.short_sort import sort_short


@pytest.mark.parametrize("num", [1, 3, 48])
def test_rows_come_out_in_order_alone_in_a_batch_and_in_a_batch_of_batches(num):
    generator = np.random.default_rng(num)
    rows = generator.integers(-5, 5, (2, 3, num)) + 0.25 * generator.integers(0, 2, (2, 3, num))  # many are equal
    rows[0, 0, 0], rows[1, 2, -1] = np.inf, -np.inf
    expected = np.sort(rows, axis=-1)
    np.testing.assert_array_equal(sort_short(jnp.asarray(rows[0, 0])), expected[0, 0])
    np.testing.assert_array_equal(jax.jit(jax.vmap(sort_short))(rows[1]), expected[1])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(sort_short)))(rows), expected)


def test_numbers_of_all_signs_and_sizes_are_put_in_order():
    values = np.array([3.0, -np.inf, -1e-300, 0.0, np.inf, -2.5, 1e300, -3.0, 1e-300, 2.0])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(sort_short(jnp.asarray(values)), np.sort(values))
    narrow = np.clip(values, -1e30, 1e30).astype(np.float32)
    np.testing.assert_array_equal(sort_short(jnp.asarray(narrow)), np.sort(narrow))
