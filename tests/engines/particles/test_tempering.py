"""Tempered particles on targets whose moments are known."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ppl_bandit.engines.particles import tempering
from ppl_bandit.engines.particles.tempering import PathEvidence, follow_path, max_autocorrelation
from ppl_bandit.engines.state import Particles


def start_of(positions, log_targets):
    zero = jnp.zeros((), positions.dtype)
    evidence = PathEvidence(zero, zero, jnp.zeros((), int))
    return Particles(positions, jnp.zeros_like(log_targets), zero, zero, evidence=evidence, log_targets=log_targets)


def followed(key, targets, positions, *budget):
    """Follow the path of targets from its start to its end."""
    start = start_of(positions, targets((), positions, 0.0))
    return jax.jit(lambda key, start: follow_path(key, targets, (), start, jnp.array(True), *budget))(key, start)


@pytest.mark.slow
def test_under_vmap_only_the_sets_that_need_it_are_moved_as_each_would_be_alone():
    """40 sets of 50 particles, of which 7 must be moved."""
    positions = jr.normal(jr.key(0), (40, 50, 1))
    centres = jnp.linspace(-1.0, 2.0, 40)
    is_needed = jnp.isin(jnp.arange(40), jnp.array([3, 4, 11, 17, 25, 26, 39]))

    def targets(centre, x, part):
        return -0.5 * (x[:, 0] - part * centre) ** 2

    def move(key, x, centre, needed):
        return follow_path(key, targets, centre, start_of(x, targets(centre, x, 0.0)), needed)

    keys = jr.split(jr.key(1), 40)
    together = jax.jit(jax.vmap(move))(keys, positions, centres, is_needed)
    alone = jax.jit(lambda *rows: jax.lax.map(lambda row: move(*row), rows))(keys, positions, centres, is_needed)
    np.testing.assert_array_equal(together.evidence.num_stages > 0, is_needed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), together, alone)


def test_particles_reach_a_distant_target_and_estimate_the_ratio_of_integrals():
    """From N(0, 1) to N(8, .1^2) in two dimensions, unnormalised: exact moments, and the ratio of integrals .01.

    2,000 particles: a mean is off by 1 / sqrt(2,000) = .022 standard deviations and a standard deviation by .016; four of
    these. The log ratio has the standard error that is reported.
    """
    positions = jr.normal(jr.key(0), (2000, 2))

    def targets(_, x, part):
        near, far = -0.5 * jnp.sum(x**2, axis=1), -0.5 * jnp.sum(((x - 8.0) / 0.1) ** 2, axis=1)
        return near + part * (far - near)

    moved = followed(jr.key(1), targets, positions)
    drawn = (np.asarray(moved.positions) - 8.0) / 0.1
    assert np.max(np.abs(drawn.mean(axis=0))) < 4 * 0.022 and np.max(np.abs(drawn.std(axis=0) - 1)) < 4 * 0.016
    assert int(moved.evidence.num_stages) > 1 and float(moved.evidence.autocorrelation) <= max_autocorrelation(2000)
    assert abs(float(moved.log_evidence) - np.log(0.01)) < 4 * np.sqrt(float(moved.squared_error)) + 0.02


def sum_of_twenty(_, x, part):
    """N(0, 1) in 20 dimensions, and a datum: their sum is 12 with standard deviation 1."""
    return -0.5 * jnp.sum(x**2, axis=1) - part * 0.5 * (jnp.sum(x, axis=1) - 12.0) ** 2


@pytest.mark.slow
def test_particles_in_many_dimensions_reach_a_correlated_target():
    """The posterior has means 12 / 21 and variances 20 / 21; the sum has variance 20 / 21 too, not 20.

    1,000 particles whose autocorrelation is at most .16: a mean is off by about 1.2 / sqrt(1,000) = .038 standard
    deviations and a standard deviation by .027; four of these. The integral of the datum's term is that of N(12; 0, 21).
    """
    x = jr.normal(jr.key(2), (1000, 20))
    moved = followed(jr.key(3), sum_of_twenty, x)
    drawn, scale = np.asarray(moved.positions, float), np.sqrt(20 / 21)
    total = drawn.sum(axis=1)
    assert float(moved.evidence.autocorrelation) <= max_autocorrelation(1000)
    assert np.max(np.abs(drawn.mean(axis=0) - 12 / 21)) < 4 * 0.038 * scale
    assert np.max(np.abs(drawn.std(axis=0) / scale - 1)) < 4 * 0.027
    assert abs(total.mean() - 240 / 21) < 4 * 0.038 * scale and abs(total.std() / scale - 1) < 4 * 0.027
    known = -0.5 * np.log(21.0) - 0.5 * 144 / 21
    assert abs(float(moved.log_evidence) - known) < 4 * np.sqrt(float(moved.squared_error)) + 0.02


def test_moves_that_end_at_their_budget_are_not_taken_for_mixed():
    """After ten evaluations, a stage has the fewest moves: eight of four coordinates, of which few forget twenty."""
    x = jr.normal(jr.key(2), (1000, 20))
    moved = followed(jr.key(3), sum_of_twenty, x, 10)
    assert float(moved.evidence.autocorrelation) > 2 * max_autocorrelation(1000)
    np.testing.assert_allclose(moved.log_targets, sum_of_twenty((), moved.positions, 1.0), rtol=1e-4, atol=1e-3)


def test_particles_that_cannot_move_have_a_large_autocorrelation():
    """A target of spikes at the particles themselves: nothing proposed is ever accepted."""
    positions = jr.normal(jr.key(0), (100, 1))

    def targets(_, x, part):
        distance = jnp.min(jnp.abs(x - positions[:, 0]), axis=1)
        return jnp.where(distance < 1e-12, 0.0, -jnp.inf) + part * jnp.where(x[:, 0] > 0, 0.0, -2.0)

    moved = follow_path(jr.key(1), targets, (), start_of(positions, jnp.zeros(100)), jnp.array(True))
    assert float(moved.evidence.autocorrelation) > max_autocorrelation(100)
    assert np.all(np.isin(moved.positions, positions))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_proposals_without_a_density_are_counted_apart_from_impossible_ones(value):
    """N(0, 1) without a density above 0: about half of the proposals of a random walk would go there."""
    positions = -jnp.abs(jr.normal(jr.key(0), (200, 1)))

    def targets(_, x, part):
        return jnp.where(x[:, 0] > 0, value, -0.5 * x[:, 0] ** 2)

    moved = followed(jr.key(1), targets, positions)
    share = float(moved.evidence.share_undefined)
    assert share == 0.0 if value == -jnp.inf else 0.1 < share < 0.6
    assert bool(jnp.all(moved.positions <= 0))


@pytest.mark.slow  # an edge of the path that the tests above follow
def test_after_the_last_stage_of_a_long_path_particles_are_weighted_to_its_end(monkeypatch):
    """Stopped between N(0, 1) and N(8, .1^2), the particles are weighted to N(8, .1^2) by uneven weights."""
    monkeypatch.setattr(tempering, "_MAX_STAGES", 3)
    positions = jr.normal(jr.key(0), (500, 1))

    def targets(_, x, part):
        return -0.5 * (1.0 - part) * x[:, 0] ** 2 - 0.5 * part * ((x[:, 0] - 8.0) / 0.1) ** 2

    moved = followed(jr.key(1), targets, positions)
    assert int(moved.evidence.num_stages) == 3
    np.testing.assert_allclose(moved.log_targets + moved.log_weights, targets((), moved.positions, 1.0), rtol=1e-4)
    assert float(jnp.std(moved.log_weights)) > 10.0
