"""Bounds of sums and ratios of a simplex's elements: they hold at random points, and are reached."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.program.jaxpr.analytic import analytic_intervals
from ppl_bandit.program.jaxpr.intervals import simplex_box

# Many points of 2 rows of 4 elements, none so close to 1 that 1 - z has lost its digits.
ROWS = 0.0025 + 0.99 * np.random.default_rng(5).dirichlet(np.full(4, 0.3), size=(20_000, 2))


def bounds_of(function, *data):
    """Return the bounds of a function of a (2, 4) simplex latent, and its values at random points."""
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(jnp.zeros((2, 4)), *data)
        (out,), _ = analytic_intervals(closed, [simplex_box(0, (2, 4)), *data])
        values = jax.jit(jax.vmap(lambda z: function(z, *data)))(ROWS)
        return np.asarray(out.low), np.asarray(out.high), np.asarray(values)


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (lambda z: 1 - z[:, 0] - z[:, 1], 0, 1),
        (lambda z: z[:, 1] / (1 - z[:, 0]), 0, 1),
        (lambda z: z[:, 2] / (1 - jnp.cumsum(z, axis=1)[:, 1]), 0, 1),
        (lambda z: z[:, 1:].sum(axis=1) / (1 - z[:, 0]), 1, 1),
        (lambda z: (2 * z[:, 1] - z[:, 2]) / (1 - z[:, 0] - z[:, 3]), -1, 2),
        (lambda z: jnp.stack([z[:, 3], -z[:, 0] / 4 + 1], axis=1), [0, 0.75], 1),
        (lambda z: z[:, 0] + z[::-1, 1], 0, 2),  # of two different rows: no better than their intervals
        (lambda z: 1 - z[0, 0] - z[1, 0], -1, 1),
    ],
)
def test_bounds_hold_and_are_reached(function, low, high):
    below, above, values = bounds_of(function)
    np.testing.assert_allclose(below, np.broadcast_to(low, below.shape), atol=1e-12)
    np.testing.assert_allclose(above, np.broadcast_to(high, above.shape), atol=1e-12)
    assert np.all(values >= below - 1e-12) and np.all(values <= above + 1e-12)
    # Dirichlet(.3) comes within a few percent of every corner in 20,000 points
    assert np.all(values.min(axis=0) <= below + 0.05) and np.all(values.max(axis=0) >= above - 0.05)


def test_rows_are_told_apart_by_data():
    def function(z, arm):
        return 1 - z[0, 0] - z[arm, 1]

    for arm, low in ((0, 0.0), (1, -1.0)):
        below, _, values = bounds_of(function, jnp.asarray(arm))
        np.testing.assert_allclose(below, low, atol=1e-12)
        assert np.all(values >= below - 1e-12)
