"""The readings of one program agree with each other and with formulas written by hand."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.integrate
import scipy.stats as st
from programs import of_one_latent, per_arm, slow_but

from ppl_bandit import Interaction, RewardModel


def conversion(arm):
    rate = per_arm("rate", dist.Beta(2.0, 3.0), 3)
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def revenue(arm, context):
    """Two outcomes, the second masked where the first is 0, with a nested context."""
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        inverse_value = numpyro.sample("inverse_value", dist.Gamma(2.0, 2.0))
    click = numpyro.sample("click", dist.Bernoulli(rate[arm]))
    with numpyro.handlers.mask(mask=click == 1):
        numpyro.sample("spend", dist.Gamma(2.0, inverse_value[arm] / context["price"]))
    numpyro.deterministic("expected_reward", rate[arm] * 2.0 * context["price"] / inverse_value[arm])


@pytest.fixture(scope="module")
def conversion_model():
    return RewardModel(conversion, 3)


@pytest.fixture(scope="module")
def revenue_model():
    return RewardModel(revenue, 2, context={"price": np.array(3.0)}, outcomes=("click", "spend"))


def test_the_prior_is_the_density_of_the_latents(conversion_model):
    rate = np.array([0.2, 0.5, 0.7])
    expected = st.beta(2, 3).logpdf(rate).sum()
    # float32: sums of a few terms of order 1, each good to 1e-6.
    np.testing.assert_allclose(conversion_model.log_prior({"rate": jnp.asarray(rate)}), expected, rtol=1e-5)


def test_the_likelihood_is_the_density_of_each_row(conversion_model):
    rate = jnp.array([0.2, 0.5, 0.7])
    rows = Interaction(jnp.array([0, 2, 2]), jnp.array([1.0, 0.0, 1.0]))
    expected = np.log([0.2, 0.3, 0.7])
    np.testing.assert_allclose(conversion_model.log_likelihood({"rate": rate}, rows), expected, rtol=1e-5)


def test_masked_rows_count_nothing_and_pass_no_gradient(conversion_model):
    rows = Interaction(jnp.array([0, 1]), jnp.array([1.0, 99.0]), None, jnp.array([True, False]))

    def total(rate):
        return conversion_model.log_likelihood({"rate": rate}, rows).sum()

    value, slope = jax.value_and_grad(total)(jnp.array([0.2, 0.5, 0.7]))
    np.testing.assert_allclose(value, np.log(0.2), rtol=1e-5)
    np.testing.assert_allclose(slope, [5.0, 0.0, 0.0], rtol=1e-5)


def test_the_table_has_a_row_per_draw_and_a_column_per_arm(conversion_model):
    draws = {"rate": jr.uniform(jr.key(0), (7, 3))}
    np.testing.assert_allclose(conversion_model.expected_rewards(draws), draws["rate"])


def test_outcomes_depend_on_each_other_and_on_a_nested_context(revenue_model):
    latents = {"rate": jnp.array([0.3, 0.6]), "inverse_value": jnp.array([0.5, 2.0])}
    context = {"price": jnp.array([3.0, 4.0, 5.0])}
    rows = Interaction(
        jnp.array([0, 1, 1]), {"click": jnp.array([1, 0, 1]), "spend": jnp.array([2.5, 0.0, 1.5])}, context
    )
    expected = [
        np.log(0.3) + st.gamma(2, scale=3.0 / 0.5).logpdf(2.5),
        np.log(0.4),
        np.log(0.6) + st.gamma(2, scale=5.0 / 2.0).logpdf(1.5),
    ]
    np.testing.assert_allclose(revenue_model.log_likelihood(latents, rows), expected, rtol=1e-5)
    draws = jax.tree.map(lambda leaf: leaf[None], latents)
    table = revenue_model.expected_rewards(draws, {"price": 4.0})
    np.testing.assert_allclose(table, [[0.3 * 8 / 0.5, 0.6 * 8 / 2.0]], rtol=1e-5)


def test_the_world_draws_what_the_likelihood_expects(revenue_model):
    latents = {"rate": jnp.array([0.3, 0.6]), "inverse_value": jnp.array([0.5, 2.0])}
    num = 20_000
    drawn = revenue_model.draw_reward(jr.key(1), latents, jnp.ones(num, int), {"price": jnp.full(num, 4.0)})
    # 4 standard errors of a Bernoulli mean; a false alarm has probability 6e-5.
    assert abs(drawn["click"].mean() - 0.6) < 4 * np.sqrt(0.6 * 0.4 / num)
    one = revenue_model.draw_reward(jr.key(1), latents, 1, {"price": 4.0})
    assert one["click"].shape == ()


def test_support_is_judged_per_outcome_and_not_where_masked(revenue_model):
    latents = {"rate": jnp.array([0.3, 0.6]), "inverse_value": jnp.array([0.5, 2.0])}
    rows = Interaction(
        jnp.array([0, 0, 0, 0]),
        {"click": jnp.array([1.0, 0.0, 1.0, 0.5]), "spend": jnp.array([2.5, 0.0, -1.0, 1.0])},
        {"price": jnp.ones(4)},
    )
    possible = revenue_model.in_support(latents, rows)
    np.testing.assert_array_equal(possible["click"], [True, True, True, False])
    np.testing.assert_array_equal(possible["spend"], [True, True, False, True])


def test_factors_and_observed_constants_belong_to_the_prior_once():
    def pilot(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
        numpyro.sample("pilot", dist.Binomial(10, rate[0]), obs=7)
        numpyro.factor("tilt", 2.0 * jnp.log(rate[1]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    model = RewardModel(pilot, 2)
    expected = st.binom(10, 0.2).logpmf(7) + 2 * np.log(0.4)
    np.testing.assert_allclose(model.log_prior({"rate": jnp.array([0.2, 0.4])}), expected, rtol=1e-4)
    rows = Interaction(jnp.array([0, 1, 1]), jnp.array([1.0, 1.0, 0.0]))
    likelihood = model.log_likelihood({"rate": jnp.array([0.2, 0.4])}, rows)
    np.testing.assert_allclose(likelihood, np.log([0.2, 0.4, 0.6]), rtol=1e-5)


def angle_mean(centre):
    def weighted(angle, power):
        return angle**power * np.exp(1.5 * np.cos(angle - centre))

    moments = [scipy.integrate.quad(weighted, -np.pi, np.pi, args=(power,))[0] for power in (0, 1)]
    return moments[1] / moments[0]


STANDARD, BY_DENSITY = dist.Normal(0.0, 1.0), "quadrature of its density"
SQUARE, EXP = dist.transforms.PowerTransform(2.0), dist.transforms.ExpTransform()
MEANS = {  # {name: (prior of two latents, law of the outcome, latents, way, expected, tolerance)}
    # Quadrature of a smooth quantile function with 128 nodes; the tails beyond float32 weigh 1e-6.
    "graded": (
        *(dist.Dirichlet(jnp.ones(3)), dist.Categorical, [[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]),
        *("finite support", [1.3, 1.7], 1e-5),
    ),
    "log normal by transform": (
        *(STANDARD, lambda z: dist.TransformedDistribution(dist.Normal(z, 0.5), EXP), [0.0, 1.0]),
        *("quadrature", np.exp([0.125, 1.125]), 1e-4),
    ),
    # Mean of a logistic law cut off below 0: (1 + exp(-m)) log(1 + exp(m)) for scale 1.
    "truncated": (
        *(dist.Gamma(2.0, 1.0), lambda z: dist.LeftTruncatedDistribution(dist.Logistic(z, 1.0), low=0.0), [1.0, 2.0]),
        *("quadrature", (1 + np.exp([-1.0, -2])) * np.log1p(np.exp([1.0, 2])), 1e-3),
    ),
    # Quadrature of the density with 8 nodes in each panel; what is left is the rounding of single precision.
    # Below, two folded arms are compared by it.
    "folded": (
        *(STANDARD, lambda z: dist.FoldedDistribution(dist.Normal(z, 1.0)), [0.0, 2.0]),
        *(BY_DENSITY, st.foldnorm([0.0, 2.0]).mean(), 1e-4),
    ),
    # An affine map of a Gamma variable, whose mean is 4, has a mean in closed form.
    "cost": (
        STANDARD,
        lambda z: dist.TransformedDistribution(dist.Gamma(2.0, 0.5), dist.transforms.AffineTransform(z, -3.0)),
        *([1.0, 2.0], "own formula", [-11.0, -10.0], 1e-5),
    ),
    # NumPyro needs TensorFlow Probability for the quantiles of a Gamma; the density serves. E x^2 = k (k + 1), k = 3, 5.
    "squared gamma": (
        *(dist.Gamma(4.0, 1.0), lambda z: dist.TransformedDistribution(dist.Gamma(z, 1.0), SQUARE), [3.0, 5.0]),
        *(BY_DENSITY, [12.0, 30.0], 1e-3),
    ),
    # 100 standard deviations below the support: its end, and .01 / 100 above it.
    "share": (
        *(STANDARD, lambda z: dist.TruncatedNormal(z, 0.01, low=0.0, high=1.0), [-1.0, 0.5]),
        *("own formula", [1e-4, 0.5], 1e-6),
    ),
    # The mean of the angle, by SciPy's quadrature of its density; NumPyro's `.mean` is the direction, 2 and 0.5.
    "direction": (
        *(STANDARD, lambda z: dist.VonMises(z, 1.5), [2.0, 0.5]),
        *(BY_DENSITY, [angle_mean(2.0), angle_mean(0.5)], 1e-4),
    ),
}


@pytest.mark.parametrize("name", slow_but(MEANS, "graded", "cost"))
def test_a_missing_mean_is_computed_another_way_and_says_so(name):
    prior, law, latents, way, expected, tolerance = MEANS[name]
    model = RewardModel(of_one_latent("z", prior.expand([2]), lambda z, arm: law(z[arm])), 2)
    assert way in model.expected_reward_method and not model.expected_reward_note
    found = model.expected_rewards({"z": jnp.asarray(latents)[None]})[0]
    np.testing.assert_allclose(found, expected, atol=tolerance)


def sometimes_nothing(base, arm):
    parts = [dist.FoldedDistribution(dist.Normal(base[arm], 1.0)), dist.Delta(jnp.zeros(arm.shape))]
    kind = dist.Categorical(jnp.broadcast_to(jnp.array([0.7, 0.3]), (*arm.shape, 2)))
    return dist.MixtureGeneral(kind, parts, support=dist.constraints.nonnegative)


@pytest.mark.slow
def test_monte_carlo_means_use_the_same_random_numbers_for_every_arm_and_say_that_they_are_rough():
    model = RewardModel(
        of_one_latent("base", STANDARD.expand([2]), sometimes_nothing), 2
    )  # a law with a point mass has no density to integrate
    assert "Monte Carlo" in model.expected_reward_method and "does not fall with data" in model.expected_reward_note
    table = model.expected_rewards({"base": jnp.array([[0.7, 0.7], [1.5, 1.5]])})
    np.testing.assert_array_equal(table[:, 0], table[:, 1])
    # 1,024 draws of a reward with standard deviation 1: four standard errors.
    np.testing.assert_allclose(table[:, 0], 0.7 * st.foldnorm([0.7, 1.5]).mean(), atol=4 / 32)


@pytest.mark.slow
def test_the_best_of_two_folded_arms_is_found_as_by_quadrature():
    # Noise of 1 and 0.2, unequal sharpness: 1,024 fixed draws were off by 1.55 posterior standard deviations here.
    noise = np.array([1.0, 0.2])

    def folded(base, arm):
        return dist.FoldedDistribution(dist.Normal(base[arm], jnp.asarray(noise)[arm]))

    with jax.enable_x64(True):
        model = RewardModel(of_one_latent("base", STANDARD.expand([2]), folded), 2)
        centre, sd = np.array([0.9, 1.07]), np.array([0.02, 0.005])
        base = centre + sd * np.random.default_rng(0).standard_normal((400, 2))
        table = np.asarray(jax.jit(model.expected_rewards)({"base": jnp.asarray(base)}))
    exact = st.foldnorm(base / noise, scale=noise).mean()
    assert np.abs(table - exact).max() < 0.05 * exact.std(axis=0).min()
    assert np.mean(table[:, 0] > table[:, 1]) == np.mean(exact[:, 0] > exact[:, 1])


def test_a_single_precision_example_context_costs_no_accuracy():
    def scaled(arm, context):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0).expand([2]))
        numpyro.sample("reward", dist.Poisson(rate[arm] * context))

    model = RewardModel(scaled, 2, context=np.float32(1.5))
    assert model.context.dtype == np.float64
    with jax.enable_x64(True):
        rows = Interaction(jnp.array([0]), jnp.array([3]), model.context_rows(1))
        found = model.log_likelihood({"rate": jnp.array([0.7, 0.1])}, rows)
        np.testing.assert_allclose(found, st.poisson(0.7 * 1.5).logpmf([3]), rtol=1e-12)


def test_contexts_about_an_example_of_zeros_stay_within_what_they_index():
    def program(arm, context):
        by_kind = numpyro.sample("by_kind", dist.Normal(0.0, 1.0).expand([2]))
        alone = numpyro.sample("alone", dist.Normal(0.0, 1.0).expand([1]))
        mean = by_kind[context["kind"]] + alone[context["alone"]] * context["count"].sum(-1) + context["flag"] * arm
        numpyro.sample("reward", dist.Normal(mean, 1.0))

    example = {"kind": 0, "alone": 0, "count": np.array([0, 7], np.uint8), "flag": False}
    model = RewardModel(program, 2, jax.tree.map(np.asarray, example))
    is_kept = np.arange(60) < 10
    rows = jax.device_get(model.varied_context_rows(np.random.default_rng(0), is_kept))
    assert set(rows["kind"][~is_kept]) == {1}
    assert set(rows["alone"]) == {0}  # its axis has one entry
    assert set(rows["count"][~is_kept, 0]) == {1, 2, 3} and set(rows["count"][:, 1]) == {7}
    assert rows["count"].dtype == np.uint8
    assert rows["flag"][~is_kept].all()
    for name, value in example.items():
        np.testing.assert_array_equal(rows[name][is_kept], np.broadcast_to(value, rows[name][is_kept].shape))


@pytest.mark.slow
def test_threads_that_read_programs_at_once_do_not_meet():
    def program_of(number):
        def program(arm):
            rate = per_arm("rate", dist.Beta(1.0 + number, 1.0), 2 + number)
            shift = numpyro.sample(f"shift{number}", dist.Normal(0.0, 1.0))
            numpyro.sample("reward", dist.Normal(rate[arm] + shift, 1.0))

        return program

    def read(number):
        model = RewardModel(program_of(number), 2 + number)
        latents = {"rate": jnp.full(2 + number, 0.5), f"shift{number}": jnp.array(0.3)}
        return model.latent_shapes, float(model.log_prior(latents))

    numbers = range(6)
    with ThreadPoolExecutor(len(numbers)) as pool:
        found = list(pool.map(read, numbers))
    for number, (shapes, log_prior) in zip(numbers, found, strict=True):
        assert shapes == {"rate": (2 + number,), f"shift{number}": ()}
        expected = (2 + number) * st.beta.logpdf(0.5, 1 + number, 1) + st.norm.logpdf(0.3)
        np.testing.assert_allclose(log_prior, expected, rtol=1e-5)  # float32
