"""The posterior of a program without arms, updated as data arrive: against closed forms, and against a long run of NUTS."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import gammaln
from shared_models import prior_engine

from ppl_bandit import Online


def counts():
    rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
    numpyro.sample("y", dist.Poisson(rate))


def line(x):
    precision = numpyro.sample("precision", dist.Gamma(3.0, 2.0))
    scale = 1.0 / jnp.sqrt(precision)
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), scale).to_event(1))
    numpyro.sample("y", dist.Normal(x @ slope, scale))


def walk(*, previous=None, elapsed=1.0):
    law = dist.Normal(0.0, 1.0) if previous is None else dist.Normal(previous["level"], 0.5 * jnp.sqrt(elapsed))
    level = numpyro.sample("level", law)
    numpyro.sample("y", dist.Normal(level, 1.0))


@pytest.fixture(scope="module")
def line_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2))
    return x, x @ [1.0, -0.5] + rng.normal(size=30)


def test_counts_have_the_posterior_and_the_evidence_of_a_gamma():
    y = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    online = Online(counts)
    assert online.log_evidence == 0.0
    online.update({"y": y[:2]})
    for value in y[2:]:
        online.update({"y": value})
    a, b = 2.0 + y.sum(), 0.5 + len(y)
    evidence = 2.0 * np.log(0.5) - gammaln(2.0) + gammaln(a) - a * np.log(b) - gammaln(y + 1.0).sum()
    assert "EXACT" in online.explain() and online.num_rows == 5
    assert online.log_evidence == pytest.approx(evidence, abs=1e-3) and online.log_evidence_error == 0.0
    rate = online.posterior(4000)["rate"]
    # Four standard errors of the mean of M draws: 4 sd / sqrt(M).
    assert rate.mean() == pytest.approx(a / b, abs=4 * np.sqrt(a) / b / np.sqrt(4000))
    predicted = online.predict(4000)["y"]
    sd = np.sqrt(a / b + a / b**2)
    assert predicted.shape == (4000, 1) and predicted.mean() == pytest.approx(a / b, abs=4 * sd / np.sqrt(4000))


@pytest.mark.slow
def test_a_saved_posterior_goes_on_in_another_process(tmp_path):
    online = Online(counts)
    online.save(tmp_path / "empty.npz")
    online.update({"y": [3.0, 1.0, 4.0]})
    online.save(tmp_path / "rows.npz")
    again = Online.load(tmp_path / "rows.npz", counts)
    assert again.num_rows == 3 and again.log_evidence == pytest.approx(online.log_evidence)
    again.update({"y": 5.0})
    online.update({"y": 5.0})
    assert again.log_evidence == pytest.approx(online.log_evidence)
    assert Online.load(tmp_path / "empty.npz", counts).num_rows == 0


def test_data_may_have_any_name(tmp_path):
    def doubled(outcomes):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 0.5))
        numpyro.sample("y", dist.Poisson(rate * outcomes))

    online = Online(doubled, engine=prior_engine)
    online.update({"y": [3.0, 1.0]}, outcomes=[1.0, 2.0])
    online.save(tmp_path / "rows.npz")
    again = Online.load(tmp_path / "rows.npz", doubled, engine=prior_engine)
    assert again.num_rows == 2 and repr(again) == repr(online)
    again.update({"y": [1.0]}, outcomes=[2.0])
    assert again.num_rows == 3
    Online(doubled).save(tmp_path / "empty.npz")
    assert Online.load(tmp_path / "empty.npz", doubled).num_rows == 0


@pytest.mark.slow
def test_a_line_of_unknown_noise_has_the_evidence_of_a_t_distribution(line_data):
    x, y = line_data
    online = Online(line)
    online.update({"y": y[:10]}, x=x[:10])
    online.update({"y": y[10:]}, x=x[10:])
    # y is a multivariate t: 2 a degrees of freedom, shape b / a (I + x x').
    shape = (2.0 / 3.0) * (np.eye(30) + x @ x.T)
    evidence = stats.multivariate_t.logpdf(y, np.zeros(30), shape, df=6.0)
    assert online.log_evidence == pytest.approx(evidence, abs=1e-3) and online.log_evidence_error == 0.0
    new = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    slope = np.linalg.solve(np.eye(2) + x.T @ x, x.T @ y)
    predicted = online.predict(4000, x=new)["y"]
    assert predicted.shape == (4000, 3)
    # The predictive sd is at most 2 here: four standard errors are at most .13.
    np.testing.assert_allclose(predicted.mean(axis=0), new @ slope, atol=4 * 2.0 / np.sqrt(4000))


@pytest.mark.slow
def test_rows_that_arrive_late_are_put_in_their_place():
    time, y = np.array([0.0, 1.0, 2.5, 3.0]), np.array([0.3, -0.2, 1.1, 0.8])
    late, ordered = Online(walk), Online(walk)
    late.update({"y": list(y[[0, 3]])}, time=list(time[[0, 3]]))
    late.update({"y": y[2]}, time=time[2])
    late.update({"y": y[1]}, time=time[1])
    ordered.update({"y": y}, time=time)
    # A Gaussian vector: level_i has covariance 1 + .25 min(t_i, t_j), and y adds noise.
    covariance = 1.0 + 0.25 * np.minimum.outer(time, time) + np.eye(4)
    evidence = stats.multivariate_normal.logpdf(y, np.zeros(4), covariance)
    for online in (late, ordered):
        assert online.log_evidence == pytest.approx(evidence, abs=1e-3)
    ahead = 1.0 + 0.25 * np.minimum(time, 5.0)
    mean = ahead @ np.linalg.solve(covariance, y)
    variance = 1.0 + 0.25 * 5.0 - ahead @ np.linalg.solve(covariance, ahead) + 1.0
    for online in (late, ordered):
        predicted = online.predict(4000, time=np.array([5.0]))["y"]
        assert predicted.mean() == pytest.approx(mean, abs=4 * np.sqrt(variance / 4000))


def test_an_error_changes_nothing_and_names_what_is_wrong(line_data):
    x, y = line_data
    online = Online(line, engine=prior_engine)
    with pytest.raises(ValueError, match="call update or predict first"):
        online.posterior()
    online.update({"y": y[:10]}, x=x[:10])
    before = online.posterior(10)["slope"]
    for wrong, match in (
        (lambda: online.update([1.0], x=x[:1]), "must be a dict"),
        (lambda: online.update({"z": y[:2]}, x=x[:2]), "expected"),
        (lambda: online.update({"y": [np.nan]}, x=x[:1]), "finite"),
        (lambda: online.update({"y": y[:3]}, x=x[:2]), "shape"),
        (lambda: online.update({"y": y[:2]}, other=x[:2]), "data"),
        (lambda: online.update({"y": y[:2]}, x=["a", "b"]), "x must be an array of numbers"),
        (lambda: online.update({"y": y[:0]}, x=x[:0]), "empty"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
    with pytest.raises(ValueError, match="the program cannot produce it"):
        Online(counts).update({"y": -1.0})
    assert online.num_rows == 10
    np.testing.assert_array_equal(online.posterior(10)["slope"], before)
    with pytest.raises(ValueError, match="engine is the text"):
        Online(counts, engine="nuts")
    with pytest.raises(ValueError, match="must be a NumPyro program"):
        Online(3)


@pytest.mark.slow
def test_a_logistic_program_agrees_with_nuts_on_all_data():
    def program(x, obs=None):
        slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ slope), obs=obs)

    rng = np.random.default_rng(1)
    x = rng.normal(size=(120, 2))
    y = (rng.random(120) < 1.0 / (1.0 + np.exp(-(x @ [1.0, -1.5])))).astype(float)
    online = Online(lambda x: program(x))
    for start in range(0, 120, 20):
        online.update({"y": y[start : start + 20]}, x=x[start : start + 20])
    mcmc = numpyro.infer.MCMC(numpyro.infer.NUTS(program), num_warmup=1000, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(0), x, obs=y)
    reference = np.asarray(mcmc.get_samples()["slope"])
    found = online.posterior(1000)["slope"]
    # Weighted draws have an effective size of at least 100 (the engine's check): four standard errors are .4 sd.
    np.testing.assert_allclose(found.mean(axis=0), reference.mean(axis=0), atol=0.4 * reference.std(axis=0).max())
    np.testing.assert_allclose(found.std(axis=0), reference.std(axis=0), rtol=0.3)
    # Against an estimate of the evidence on a grid.
    grid = np.linspace(-4.0, 4.0, 401)
    slopes = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    logits = slopes @ x.T
    log_joint = stats.norm.logpdf(slopes).sum(axis=1) - np.logaddexp(0.0, np.where(y == 1.0, -logits, logits)).sum(
        axis=1
    )
    evidence = np.log(np.exp(log_joint - log_joint.max()).sum()) + log_joint.max() + 2.0 * np.log(grid[1] - grid[0])
    assert abs(online.log_evidence - evidence) < max(4.0 * online.log_evidence_error, 0.1)


def test_an_engine_without_evidence_says_so():
    online = Online(counts, engine=prior_engine)
    online.update({"y": np.full(40, 3.0)})
    with pytest.raises(ValueError, match="leave engine out, or use engines.reweight"):
        _ = online.log_evidence
