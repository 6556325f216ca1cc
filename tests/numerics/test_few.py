"""Sums, the largest and the like, written out, are what jax's own are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.runtime import unrolled_reductions

ROWS = {
    "one": [2.0],
    "ties": [1.0, 3.0, 3.0, -2.0],
    "infinite": [-np.inf, -np.inf, -np.inf],
    "mixed": [np.inf, -np.inf, 0.0],
    "unknown": [1.0, np.nan, 5.0, np.nan],
    "unknown first": [np.nan, 7.0],
    "many": np.random.default_rng(0).normal(size=unrolled_reductions.FEW + 1),
}


@pytest.mark.parametrize("row", ROWS)
def test_sums_and_the_largest_of_a_few_numbers_are_those_of_jax(row):
    values = jnp.asarray(ROWS[row], jnp.float32)
    assert int(unrolled_reductions.argmax_of(values)) == int(jnp.argmax(values))
    np.testing.assert_array_equal(unrolled_reductions.max_of(values), jnp.max(values))
    # Both add n numbers one after another, or in some other order: n roundings of what was added up.
    rounding = values.size * float(jnp.finfo(values.dtype).eps) * float(jnp.nansum(jnp.abs(values)))
    for own, jax_own in ((unrolled_reductions.sum_of, jnp.sum), (unrolled_reductions.running_sums, jnp.cumsum)):
        np.testing.assert_allclose(own(values), jax_own(values), rtol=0, atol=rounding)
    if not np.isposinf(values).any():
        expected = jax.scipy.special.logsumexp(values)
        np.testing.assert_allclose(unrolled_reductions.log_sum_exp(values), expected, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 3, unrolled_reductions.FEW + 1])
def test_what_is_true_of_a_few_is_what_jax_says(size):
    for truths in (np.zeros(size, bool), np.ones(size, bool), np.arange(size) == size - 1):
        values = jnp.asarray(truths)
        assert (
            bool(unrolled_reductions.is_any(values)) == truths.any()
            and bool(unrolled_reductions.is_all(values)) == truths.all()
        )
        assert (
            int(unrolled_reductions.sum_of(values)) == truths.sum()
            and int(unrolled_reductions.argmax_of(values)) == truths.argmax()
        )
        assert bool(unrolled_reductions.is_all(values[:, None])) == truths.all()


def test_many_rows_at_once_give_what_each_gives():
    rows = jnp.asarray([ROWS["ties"], ROWS["unknown"], [0.0, -1.0, 5.0, 2.0]], jnp.float32)
    for function in (
        unrolled_reductions.sum_of,
        unrolled_reductions.max_of,
        unrolled_reductions.argmax_of,
        unrolled_reductions.running_sums,
        unrolled_reductions.log_sum_exp,
    ):
        together = jax.vmap(function)(rows)
        np.testing.assert_allclose(together, [function(row) for row in rows], rtol=1e-6)
        np.testing.assert_array_equal(jax.vmap(jax.vmap(function))(rows[None]), together[None])
