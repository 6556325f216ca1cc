"""The unrolled hash is that of `jax.random`."""

import jax.extend.random
import jax.numpy as jnp
import numpy as np

from ppl_bandit.runtime.random_draws import threefry


def test_the_unrolled_hash_gives_the_bits_of_jax():
    words = jnp.uint32(7), jnp.uint32(11)
    index, attempt = jnp.arange(50, dtype=jnp.uint32), jnp.uint32(3)
    operands = (jnp.broadcast_to(operand, index.shape) for operand in (*words, index, attempt))
    for ours, theirs in zip(
        threefry(words, index, attempt), jax.extend.random.threefry2x32_p.bind(*operands), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
