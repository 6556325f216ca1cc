"""The parts of a comparison, each against a formula or another implementation."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import betaln, gammaln

from ppl_bandit import Interaction, RewardModel, engines
from ppl_bandit.comparison import results as errors
from ppl_bandit.comparison.results import exact_marginals
from ppl_bandit.live.exports import observed_outcomes, replicate_outcomes
from ppl_bandit.runtime.compile_ahead import quick_jit


def test_distances_of_samples_agree_with_scipy():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(200, 3)), rng.normal(0.3, 1.4, size=(200, 3))
    second[:, 2] = np.round(second[:, 2])  # ties within a sample, and with the other
    first[:, 2] = np.round(first[:, 2])
    for k in range(3):
        expected = stats.ks_2samp(first[:, k], second[:, k]).statistic
        assert errors.kolmogorov(first, second)[k] == pytest.approx(expected, abs=1e-12)
        expected = stats.wasserstein_distance(first[:, k], second[:, k])
        assert errors.wasserstein(first, second)[k] == pytest.approx(expected, rel=1e-12)


def test_the_floor_is_the_mean_of_the_kolmogorov_distribution():
    num_draws, num_samples = 1000, 200
    samples = np.random.default_rng(1).normal(size=(num_samples, num_draws, 1))
    target = errors.ReferenceLatents(*np.ones((3, 1)), np.ones((5, 1)), samples)
    floor = errors.latent_floor(target)[1]
    # sqrt(M / 2) times the distance has mean sqrt(pi / 2) log 2 in the limit, and is about 1% less at M = 1000.
    limit = np.sqrt(np.pi / 2) * np.log(2) / np.sqrt(num_draws / 2)
    error = floor.error[0] / np.sqrt(num_samples / 2)
    assert abs(floor.value[0] - limit) < 4 * error + 0.02 * limit


def test_a_shift_and_a_stretch_are_measured_in_reference_sds():
    rng = np.random.default_rng(2)
    mean, sd, num_runs, num_draws = 3.0, 0.5, 8, 4000
    levels = np.array(errors.QUANTILES)
    target = errors.ReferenceLatents(
        np.array([mean]),
        np.array([sd]),
        np.array([sd]),
        stats.norm(mean, sd).ppf(levels)[:, None],
        rng.normal(mean, sd, size=(num_runs, num_draws, 1)),
    )
    shift, stretch = 0.25, 1.5
    found = errors.latent_errors(rng.normal(mean + shift * sd, stretch * sd, (num_runs, num_draws, 1)), target)
    for measured, expected in (
        (found.mean, shift),
        (found.sd, stretch - 1),
        (found.quantiles, shift + (stretch - 1) * stats.norm.ppf(levels)[:, None]),
    ):
        # Eight runs: a t with 7 degrees of freedom stays within 7 standard errors but for 2 in 10,000.
        assert np.all(np.abs(measured.value - expected) < 7 * measured.error)
        assert np.all(measured.error < 0.05)


def test_runs_that_disagree_show_in_r_hat():
    runs = np.random.default_rng(3).normal(size=(4, 500, 2))
    runs[0, :, 1] += 2.0
    alike, apart = errors.r_hat(runs)
    assert alike < 1.01 and apart > 1.1
    assert np.isnan(errors.r_hat(runs[:1])).all()


OUTCOMES = ("click", "value", "category", "count", "level")


def every_family(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(2.0, 3.0))
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        mean = numpyro.sample("mean", dist.Normal(1.0, 2.0 * jnp.sqrt(variance)))
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5])))
        intensity = numpyro.sample("intensity", dist.Gamma(2.0, 1.5))
    level = numpyro.sample("level_mean", dist.Normal(0.5, 2.0))
    numpyro.sample("click", dist.Bernoulli(rate[arm]))
    numpyro.sample("value", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))
    numpyro.sample("category", dist.Categorical(probs[arm]))
    numpyro.sample("count", dist.Poisson(intensity[arm]))
    numpyro.sample("level", dist.Normal(jnp.full(arm.shape, 1.0) * level, 0.7))
    numpyro.deterministic("expected_reward", rate[arm] * mean[arm])


ARM = np.array([0, 0, 1, 0, 1, 1, 0])
ROWS = {
    "click": np.array([1.0, 0, 1, 1, 0, 0, 0]),
    "value": np.array([0.3, 1.2, 4.0, -0.5, 2.2, 3.1, 0.9]),
    "category": np.array([0.0, 2, 1, 1, 0, 2, 1]),
    "count": np.array([0.0, 3, 1, 2, 5, 1, 0]),
    "level": np.array([1.1, 0.2, 0.9, 1.4, -0.3, 0.6, 0.8]),
}


@pytest.fixture(scope="module")
def family_posterior():
    with jax.enable_x64(True):
        model = RewardModel(every_family, 2, outcomes=OUTCOMES)
        engine = engines.conjugate(model)
        rows = jax.tree.map(jnp.asarray, Interaction(ARM, ROWS))
        prior = engine.init(jr.key(0))
        posterior, info = quick_jit(engine.update)(jr.key(0), prior, rows)
        assert bool(info.is_trusted)
        return model, engine, prior, posterior, rows


def normal_inverse_gamma(x):
    """Posterior of the program's `mean` and `variance`: (location, precision factor, shape, rate)."""
    kappa = 0.25 + x.size
    location = (0.25 * 1.0 + x.sum()) / kappa
    rate = 2.0 + 0.5 * (np.square(x).sum() + 0.25 * 1.0 - kappa * location**2)
    return location, kappa, 3.0 + x.size / 2, rate


@pytest.mark.slow
def test_marginals_of_every_family_are_the_textbook_ones(family_posterior):
    model, engine, _, posterior, _ = family_posterior
    with jax.enable_x64(True):
        laws = exact_marginals(model, engine, posterior)
    clicks, counts, values = (ROWS[name][ARM == 1] for name in ("click", "count", "value"))
    location, kappa, shape, rate = normal_inverse_gamma(values)
    concentration = np.array([1.0, 2.0, 0.5]) + np.bincount(ROWS["category"][ARM == 1].astype(int), minlength=3)
    precision = 1 / 4 + ARM.size / 0.49
    expected = {
        "rate": stats.beta(2 + clicks.sum(), 3 + (1 - clicks).sum()),
        "variance": stats.invgamma(shape, scale=rate),
        "mean": stats.t(2 * shape, location, np.sqrt(rate / (shape * kappa))),
        "intensity": stats.gamma(2 + counts.sum(), scale=1 / (1.5 + counts.size)),
    }
    levels = np.array([0.01, 0.3, 0.5, 0.9])
    for name, law in expected.items():
        np.testing.assert_allclose(laws[name].law.ppf(levels[:, None])[:, 1], law.ppf(levels), rtol=1e-9)
        np.testing.assert_allclose([laws[name].mean[1], laws[name].sd[1]], [law.mean(), law.std()], rtol=1e-9)
    share = stats.beta(concentration, concentration.sum() - concentration)
    np.testing.assert_allclose(laws["probs"].law.cdf(0.3)[1], share.cdf(0.3), rtol=1e-9)
    level = stats.norm((0.5 / 4 + ROWS["level"].sum() / 0.49) / precision, precision**-0.5)
    np.testing.assert_allclose(laws["level_mean"].law.ppf(levels), level.ppf(levels), rtol=1e-9)
    np.testing.assert_allclose([laws["level_mean"].mean, laws["level_mean"].sd], [level.mean(), level.std()], rtol=1e-9)


def textbook_log_evidence():
    """The marginal likelihood of each family, from its own formula."""
    total = 0.0
    for arm in range(2):
        click, value, category, count = (ROWS[name][ARM == arm] for name in OUTCOMES[:4])
        total += betaln(2 + click.sum(), 3 + (1 - click).sum()) - betaln(2, 3)
        _, kappa, shape, rate = normal_inverse_gamma(value)
        total += gammaln(shape) - gammaln(3.0) + 3.0 * np.log(2.0) - shape * np.log(rate)
        total += 0.5 * np.log(0.25 / kappa) - value.size / 2 * np.log(2 * np.pi)
        alpha = np.array([1.0, 2.0, 0.5])
        after = alpha + np.bincount(category.astype(int), minlength=3)
        total += gammaln(after).sum() - gammaln(alpha).sum() + gammaln(alpha.sum()) - gammaln(after.sum())
        total += 2 * np.log(1.5) - gammaln(2) + gammaln(2 + count.sum()) - gammaln(count + 1).sum()
        total -= (2 + count.sum()) * np.log(1.5 + count.size)
    covariance = 0.49 * np.eye(ARM.size) + 4.0
    return total + stats.multivariate_normal(np.full(ARM.size, 0.5), covariance).logpdf(ROWS["level"])


@pytest.mark.slow
def test_the_log_evidence_of_every_family_is_the_textbook_one(family_posterior):
    _, engine, _, posterior, _ = family_posterior
    with jax.enable_x64(True):
        found, error = engine.capabilities.log_evidence(posterior)
    # Log densities of some tens of nats, added up in float64.
    assert found == pytest.approx(textbook_log_evidence(), abs=1e-10) and error == 0.0


def sale(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
    sold = numpyro.sample("sold", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Exponential(jnp.full(arm.shape, 0.1)).mask(sold == 1))
    numpyro.deterministic("expected_reward", 10.0 * rate[arm])


def test_an_outcome_that_does_not_count_is_0_when_observed_and_when_replicated():
    model = RewardModel(sale, 2, outcomes=("sold", "spend"))
    rows = Interaction(np.array([0, 1, 1, 0]), {"sold": np.array([1.0, 0, 1, 0]), "spend": np.array([3.0, 7, 5, 9])})
    found = observed_outcomes(model, rows)
    assert found["sold"].dtype.kind == "i" and found["sold"].tolist() == [1, 0, 1, 0]
    assert found["spend"].tolist() == [3.0, 0.0, 5.0, 0.0]
    data = Interaction(jnp.arange(200) % 2, None)
    again = quick_jit(lambda: replicate_outcomes(model, jr.key(1), {"rate": jnp.array([0.3, 0.7])}, data))()
    assert np.all((again["spend"] > 0) == (again["sold"] == 1)) and 0 < again["sold"].sum() < 200
