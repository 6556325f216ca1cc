"""Normal numbers are the quantiles of their bits."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import erfcinv, ndtr

from ppl_bandit.numerics.random_bits import to_normal


def test_normal_draws_are_the_quantiles_of_their_bits():
    """Within a relative error of 2e-6, up to more than eight standard deviations."""
    rng = np.random.default_rng(0)
    high = rng.integers(0, 1 << 32, size=100_000, dtype=np.uint32)
    low = rng.integers(0, 1 << 32, size=100_000, dtype=np.uint32)
    # Steps towards the ends of the interval, each half as far from it as the one before.
    gaps = 2.0 ** -np.arange(1, 53)
    steps = np.round(gaps * 2.0**63).astype(np.uint64)
    ends = np.concatenate([(np.uint64(1) << np.uint64(63)) - steps, (np.uint64(1) << np.uint64(63)) + steps])
    high = np.append(high, (ends >> np.uint64(32)).astype(np.uint32))
    low = np.append(low, (ends & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    signed = ((high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)).view(np.int64)
    exact = (
        np.sign(signed) * np.sqrt(2.0) * erfcinv(np.where(signed < 0, 2.0**63 + signed, 2.0**63 - signed) * 2.0**-63)
    )
    with jax.enable_x64(True):
        found = to_normal(jnp.asarray(high), jnp.asarray(low), jnp.float64)
    assert np.abs(exact).max() > 8.1
    np.testing.assert_allclose(found, exact, rtol=2e-6)
    assert np.abs(ndtr(found) - ndtr(exact)).max() < 1e-7
