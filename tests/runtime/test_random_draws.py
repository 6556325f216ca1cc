"""The unrolled hash is that of `jax.random`."""

import jax.extend.random
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.runtime.random_draws import fold_in, random_words


def test_the_unrolled_hash_gives_the_bits_of_jax():
    key = jr.key(7, impl="threefry2x32")
    index, attempt = jnp.arange(50, dtype=jnp.uint32), jnp.uint32(3)
    operands = (jnp.broadcast_to(operand, index.shape) for operand in (*jr.key_data(key), index, attempt))
    for ours, theirs in zip(
        random_words(key, index, attempt), jax.extend.random.threefry2x32_p.bind(*operands), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_folding_a_number_into_a_key_gives_the_key_of_jax():
    key = jr.key(5, impl="threefry2x32")
    for number in (0, 7, 2**31 - 1):
        ours, theirs = (fold(key, jnp.asarray(number)) for fold in (fold_in, jr.fold_in))
        np.testing.assert_array_equal(jr.key_data(ours), jr.key_data(theirs))
