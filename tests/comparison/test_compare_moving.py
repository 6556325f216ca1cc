"""Engines and programs compared on rows of a world that moves."""

import functools

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from ppl_bandit import RewardModel, compare, engines
from ppl_bandit.comparison import rank_models
from ppl_bandit.comparison.engine_runs import simulate_rows

NUM_ROWS, DRIFT = 24, 0.5
TRUTH = {"level": np.array([0.0, 0.5])}


def moving(arm, *, previous=None):
    with numpyro.plate("arms", 2):
        law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], DRIFT)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Normal(level[arm], 0.5))


def still(arm):
    with numpyro.plate("arms", 2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(level[arm], 0.5))


def unknown(arm, *, previous=None):
    drift = numpyro.sample("drift", dist.Uniform(0.3, 0.7))
    with numpyro.plate("arms", 2):
        law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], drift)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Normal(level[arm], 0.5))


@functools.cache
def model():
    return RewardModel(moving, 2)


@functools.cache
def rows():
    return simulate_rows(model(), TRUTH, NUM_ROWS, seed=4)


@functools.cache
def comparison():
    filters = {
        "kalman": engines.kalman,
        "particles": functools.partial(engines.particle_filter, num_particles=4000),
        "few": functools.partial(engines.particle_filter, num_particles=20),
    }
    return compare(model(), rows(), filters, num_samples=500, num_runs=4, checkpoints=[12], seed=1)


def gaussian(arm, reward, drift):
    """Return the joint law of rewards and next levels by covariance matrices: log density, means and deviations."""
    step = np.arange(NUM_ROWS + 1)
    walk = 1.0 + drift**2 * np.minimum(step[:, None], step)
    own = walk[:-1, :-1] * (arm[:, None] == arm) + 0.25 * np.eye(NUM_ROWS)
    cross = np.stack([walk[-1, :-1] * (arm == a) for a in range(2)])
    mean = cross @ np.linalg.solve(own, reward)
    variance = walk[-1, -1] - np.sum(cross * np.linalg.solve(own, cross.T).T, axis=1)
    return stats.multivariate_normal.logpdf(reward, np.zeros(NUM_ROWS), own), mean, np.sqrt(variance)


@pytest.mark.slow
def test_the_reference_of_a_linear_gaussian_world_is_the_exact_law_of_the_next_step():
    reference = comparison().reference
    _, mean, sd = gaussian(rows().arm, rows().reward, DRIFT)
    assert reference.is_exact
    np.testing.assert_allclose(reference.target.mean, mean, atol=1e-9)
    np.testing.assert_allclose(reference.target.sd, sd, atol=1e-9)


@pytest.mark.slow
def test_engines_of_a_moving_world_are_measured_and_too_few_particles_show():
    found = comparison()
    # 4 runs of 500 draws: .022 sd in a mean. 4,000 particles of an effective size of about a third: .014. Three times both.
    assert np.max(np.abs(found.engines["kalman"].latents.mean.value)) < 0.08
    assert np.max(np.abs(found.engines["particles"].latents.mean.value)) < 0.08
    # 20 particles: the mean of a run is off by about 1 / sqrt(20) = .2 sd, and one distance of draws at least as much.
    few, many = (found.engines[name].latents.wasserstein.value.max() for name in ("few", "particles"))
    assert few > 2.0 * many
    assert [point.num_rows for point in found.stream] == [12, NUM_ROWS]
    assert "reference: the exact posterior" in str(found)


def test_simulated_rows_of_a_moving_program_take_its_steps():
    # A level that takes 2,000 steps of .5 is normal with a deviation of 22; it stays within 1 with a probability of .04.
    many = simulate_rows(model(), TRUTH, 2000, seed=0)
    spread = [np.ptp(many.reward[many.arm == arm]) for arm in range(2)]
    assert min(spread) > 6.0  # twelve deviations of the noise: at rest, no row in a million is so far from another
    changes = np.diff(many.reward[many.arm == 0])
    # A reward of the same arm comes two steps later: its variance is 2 * .25 + 2 * .25 = 1, with a relative error of about
    # sqrt(2 / 1000) = .045; four times that.
    assert abs(changes.var() - 1.0) < 0.18


def test_the_log_evidence_of_a_kalman_filter_is_exact_and_ranks_programs_that_move_and_do_not():
    ranking = rank_models({"still": RewardModel(still, 2), "moving": model()}, rows(), num_samples=40)
    assert [score.name for score in ranking.scores] == ["moving", "still"]
    for score, drift in zip(ranking.scores, (DRIFT, 0.0), strict=True):
        assert score.evidence_way == "exact"
        assert score.log_evidence == pytest.approx(gaussian(rows().arm, rows().reward, drift)[0], abs=1e-8)
        assert np.isnan(score.elpd)
    assert "LOO was not computed: latents of moving move" in str(ranking)


@pytest.mark.slow
def test_the_log_evidence_of_an_unknown_drift_is_that_of_quadrature():
    ranking = rank_models({"unknown": RewardModel(unknown, 2), "moving": model()}, rows(), num_samples=40)
    score = next(score for score in ranking.scores if score.name == "unknown")
    drifts = np.linspace(0.3, 0.7, 201)
    values = np.array([gaussian(rows().arm, rows().reward, drift)[0] for drift in drifts])
    exact = np.log(np.trapezoid(np.exp(values - values.max()), drifts) / 0.4) + values.max()
    assert score.evidence_way == "collapsed_kalman"
    assert score.log_evidence_error < 0.05
    assert abs(score.log_evidence - exact) < 4.0 * score.log_evidence_error + 1e-3


@pytest.mark.slow
def test_the_reference_of_a_world_without_a_closed_form_is_a_long_run_of_its_filter():
    found = compare(RewardModel(unknown, 2), rows(), num_samples=200, num_runs=2, checkpoints=[], seed=1)
    assert found.reference.name == "collapsed_kalman"
    assert "drift is not Gaussian" in found.refused["kalman"]
    # 2 runs of 200 draws: .05 sd in a mean; three times that for the largest of three latents.
    for label in ("collapsed_kalman", "particle_filter"):
        assert np.max(np.abs(found.engines[label].latents.mean.value)) < 0.15, label
