"""Near-misses: programs that look conjugate and are not, or cannot be proved to be. Each is refused, with the reason."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from ppl_bandit.engines import conjugate
from ppl_bandit.engines.exact.refusals import CONJUGATE
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import InvalidProgram, NotConjugate

A = 2
CASES: list[Any] = []


def near_miss(
    reason: str, *, is_slow: bool = False, error: type[ValueError] = NotConjugate, **settings: Any
) -> Callable:
    """Register a program with a word of the reason for which it must be refused.

    The default run has a program for every kind of reason; further programs, and further primitives that are not analytic,
    are slow.
    """

    def register(program: Callable) -> Callable:
        marks = [pytest.mark.slow] if is_slow else []
        CASES.append(pytest.param(program, reason, error, settings, id=program.__name__, marks=marks))
        return program

    return register


@pytest.mark.parametrize(("program", "reason", "error", "settings"), CASES)
def test_a_near_miss_is_refused_with_the_reason(program, reason, error, settings):
    with pytest.raises(error, match=reason) as refused:
        conjugate(RewardModel(program, **{"num_arms": A, **settings}))
    if error is NotConjugate:
        assert refused.value.explanation is not None and not refused.value.explanation.is_exact


def rates(name: str = "rate") -> Any:
    with numpyro.plate("arms", A):
        return numpyro.sample(name, dist.Beta(1.0, 1.0))


def gammas(name: str = "scale") -> Any:
    return numpyro.sample(name, dist.Gamma(2.0, 1.0).expand([A]))


def reals(name: str = "mean") -> Any:
    return numpyro.sample(name, dist.Normal(0.0, 1.0).expand([A]))


def bernoulli(probs: Any) -> None:
    numpyro.sample("reward", dist.Bernoulli(probs))


def normal(location: Any, scale: Any = 1.0) -> None:
    numpyro.sample("reward", dist.Normal(location, scale))


# Links that bend


@near_miss("not affine", is_slow=True)
def squared_link(arm):
    bernoulli(rates()[arm] ** 2)


@near_miss("not affine", is_slow=True)
def square_root_link(arm):
    bernoulli(jnp.sqrt(rates())[arm])


@near_miss("not affine", is_slow=True)
def link_with_a_power_close_to_one(arm):
    bernoulli(rates()[arm] ** 1.0001)


@near_miss("`sin`", is_slow=True)
def a_tiny_perturbation(arm):
    mean = reals()[arm]
    normal(mean * (1.0 + 1e-7 * jnp.sin(mean)))


@near_miss("real latents reach the logits", is_slow=True, context=np.array([1.0, -0.5]))
def logistic_regression(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([A, 2]).to_event(2))
    numpyro.sample("reward", dist.Bernoulli(logits=(weight[arm] * context).sum(-1)))


@near_miss("real latents reach the logits", is_slow=True)
def logits_that_are_gaussian(arm):
    numpyro.sample("reward", dist.Bernoulli(logits=reals()[arm]))


@near_miss("real latents reach the logits", is_slow=True)
def multinomial_logits(arm):
    logits = numpyro.sample("logits", dist.Normal(0.0, 1.0).expand([A, 3]).to_event(2))
    numpyro.sample("reward", dist.Categorical(logits=logits[arm]))


@near_miss("largest", is_slow=True)
def softmax_of_gaussians(arm):
    logits = numpyro.sample("logits", dist.Normal(0.0, 1.0).expand([A, 3]).to_event(2))
    numpyro.sample("reward", dist.Categorical(jax.nn.softmax(logits)[arm]))


@near_miss("abs", is_slow=True)
def probit_link(arm):
    bernoulli(jax.scipy.special.ndtr(reals())[arm])


@near_miss("flattens|inside", is_slow=True)
def exponential_link(arm):
    numpyro.sample("reward", dist.Poisson(jnp.exp(reals()[arm])))


@near_miss("division", is_slow=True)
def odds_that_are_gamma(arm):
    odds = gammas()[arm]
    bernoulli(odds / (1.0 + odds))


@near_miss("not affine", is_slow=True)
def noisy_channel(arm):
    bernoulli(0.9 * rates()[arm] + 0.05)


@near_miss("leaves its domain", error=InvalidProgram)
def probability_that_exceeds_one(arm):
    bernoulli(2.0 * rates()[arm])


@near_miss("not affine|couples", is_slow=True)
def product_of_gaussians(arm):
    normal(reals("first")[arm] * reals("second")[arm])


@near_miss("flattens")
def a_bump_too_narrow_to_meet(arm):
    rate = rates()[arm]
    bernoulli(rate - 0.5 * rate * (1.0 - rate) * jnp.exp(-1e8 * (rate - 0.3) ** 2))


@near_miss("division", is_slow=True)
def a_gate_made_of_a_high_power(arm):
    rate = gammas()[arm]
    numpyro.sample("reward", dist.Poisson(rate * (1.0 + 1.0 / (1.0 + (rate / 50.0) ** 100))))


@near_miss("flattens", is_slow=True)
def saturation_far_out(arm):
    mean = reals()[arm]
    normal(mean + mean * jax.nn.sigmoid(50.0 * (mean - 8.0)))


# Kinks, branches and roundings


@near_miss("rounding", is_slow=True)
def rounded_rate(arm):
    bernoulli(0.05 + 0.9 * jnp.round(rates()[arm], 3))


@near_miss("rounding", is_slow=True)
def floored_rate(arm):
    numpyro.sample("reward", dist.Poisson(1.0 + jnp.floor(gammas()[arm])))


@near_miss("conversion.*int", is_slow=True)
def rate_cast_to_an_integer(arm):
    numpyro.sample("reward", dist.Poisson(1.0 + gammas()[arm].astype(int)))


@near_miss("float16", is_slow=True)
def rate_cast_to_half_precision(arm):
    bernoulli(rates()[arm].astype(jnp.float16))


@near_miss("float32", is_slow=True)
def mean_cast_to_single_precision(arm):
    normal(reals()[arm].astype(jnp.float32))


@near_miss("clip", is_slow=True)  # below, with its line and its remedy
def rate_clipped_where_nobody_looks(arm):
    bernoulli(jnp.clip(rates()[arm], 1e-6, 1.0 - 1e-6))


@near_miss("maximum", is_slow=True)
def mean_bounded_below(arm):
    normal(jnp.maximum(reals()[arm], -20.0))


@near_miss("minimum", is_slow=True)
def mean_bounded_above(arm):
    normal(jnp.minimum(reals()[arm], 20.0))


@near_miss("maximum", is_slow=True)
def rectified_mean(arm):
    normal(jax.nn.relu(reals()[arm]))


@near_miss("abs", is_slow=True)
def absolute_mean(arm):
    normal(jnp.abs(reals()[arm]))


@near_miss("square root", is_slow=True)
def absolute_mean_by_a_root(arm):
    normal(jnp.sqrt(reals()[arm] ** 2))


@near_miss("comparison|where", is_slow=True)
def rate_that_differs_near_one(arm):
    rate = rates()[arm]
    bernoulli(jnp.where(rate > 0.999, rate**2, rate))


@near_miss("comparison|branch", is_slow=True)
def branch_on_a_latent(arm):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    normal(jax.lax.cond(mean > 5.0, lambda z: z**2, lambda z: z, mean) + 0.0 * arm)


@near_miss("logarithm|comparison", is_slow=True)
def branch_by_a_test_for_nan(arm):
    rate = rates()[arm]
    bernoulli(jnp.where(jnp.isnan(jnp.log(0.999 - rate)), rate**2, rate))


@near_miss("finite|flattens", is_slow=True)
def branch_by_overflow(arm):
    rate = rates()[arm]
    bernoulli(jnp.where(jnp.isfinite(jnp.exp(1e6 * (rate - 0.999))), rate, rate**2))


@near_miss("comparison|flattens", is_slow=True)
def branch_by_underflow(arm):
    rate = rates()[arm]
    bernoulli(jnp.where(jnp.exp(1e6 * (rate - 0.9999)) > 0.0, rate**2, rate))


@near_miss("not affine")
def gradient_stopped(arm):
    bernoulli(jax.lax.stop_gradient(rates())[arm])


@near_miss("`reduce`", is_slow=True)
def a_reduction_of_the_users_own(arm):
    rate = rates()[arm]
    steps = jnp.stack([rate, rate, rate])
    folded = jax.lax.reduce(steps, jnp.array(0.5, rate.dtype), lambda a, b: jnp.sqrt(b + 1.0 - a), (0,))
    bernoulli(rate * folded / 3.0)


@near_miss("scan", is_slow=True)
def scan_over_latents(arm):
    mean = reals()
    total, _ = jax.lax.scan(lambda carry, z: (carry * 0.5 + z, None), jnp.zeros((), mean.dtype), mean)
    normal(mean[arm] + total)


# Derivatives that lie


@jax.custom_jvp
def scaled_slope(x):
    return x * 1.0


@scaled_slope.defjvp
def _(primals, tangents):
    return scaled_slope(primals[0]), 2.0 * tangents[0]


@jax.custom_jvp
def square_with_the_slope_of_a_line(x):
    return x**2


@square_with_the_slope_of_a_line.defjvp
def _(primals, tangents):
    return square_with_the_slope_of_a_line(primals[0]), tangents[0]


@jax.custom_vjp
def flat(x):
    return x * 1.0


flat.defvjp(lambda x: (flat(x), None), lambda _, g: (jnp.zeros_like(g),))


@near_miss("not affine", is_slow=True)
def conjugate_value_with_a_wrong_slope(arm):
    normal(scaled_slope(reals()[arm]))


@near_miss("not affine", is_slow=True)
def bent_value_with_a_conjugate_slope(arm):
    normal(square_with_the_slope_of_a_line(reals()[arm]))


@near_miss("not affine", is_slow=True)
def conjugate_value_with_no_slope(arm):
    bernoulli(flat(rates()[arm]))


# Latents that choose


@near_miss("argmax", is_slow=True)
def arm_chosen_by_argmax(arm):
    mean = reals()
    normal(mean[(arm + jnp.argmax(mean)) % A])


@near_miss("conversion|indexing", is_slow=True)
def table_indexed_by_a_latent(arm):
    rate = rates()[arm]
    bernoulli(jnp.linspace(0.05, 0.95, 10)[(10.0 * rate).astype(int)])


@near_miss("searchsorted", is_slow=True)
def table_searched_by_a_latent(arm):
    rate = rates()[arm]
    bernoulli(jnp.linspace(0.05, 0.95, 11)[jnp.searchsorted(jnp.linspace(0.1, 0.9, 10), rate)])


@near_miss("sort", is_slow=True)
def sorted_means(arm):
    normal(jnp.sort(reals())[arm])


@near_miss("largest", is_slow=True)
def best_of_the_means(arm):
    normal(reals().max() + 0.0 * arm)


# Likelihoods of another family


class ZeroInflated(dist.Distribution):
    support = dist.constraints.nonnegative_integer
    pytree_data_fields = ("gate", "rate")

    def __init__(self, gate, rate):
        self.gate, self.rate = gate, rate
        super().__init__(jnp.shape(rate), ())

    def sample(self, key, sample_shape=()):
        return dist.Poisson(self.rate).sample(key, sample_shape)

    @property
    def mean(self):
        return (1.0 - self.gate) * self.rate

    def log_prob(self, value):
        count = jnp.log(1.0 - self.gate) + dist.Poisson(self.rate).log_prob(value)
        return jnp.where(value == 0, jnp.log(self.gate + (1.0 - self.gate) * jnp.exp(-self.rate)), count)


@near_miss("an exponential", is_slow=True)
def zero_inflated_by_hand(arm):
    numpyro.sample("reward", ZeroInflated(0.3, gammas()[arm]))


@near_miss("not affine|prove", is_slow=True)
def zero_inflated_poisson(arm):
    numpyro.sample("reward", dist.ZeroInflatedPoisson(0.3, gammas()[arm]))


@near_miss("logarithm", is_slow=True)
def student_noise_with_many_degrees_of_freedom(arm):
    numpyro.sample("reward", dist.StudentT(1e6, reals()[arm], 1.0))


@near_miss("logarithm", is_slow=True)
def student_noise_with_very_many_degrees_of_freedom(arm):
    numpyro.sample("reward", dist.StudentT(1e9, reals()[arm], 1.0))


@near_miss("logarithm", is_slow=True)
def student_noise(arm):
    numpyro.sample("reward", dist.StudentT(1e3, reals()[arm], 1.0))


@near_miss("not affine|prove", is_slow=True)
def logistic_noise(arm):
    numpyro.sample("reward", dist.Logistic(reals()[arm], 1.0))


@near_miss("no prior is known that is conjugate to a Laplace", is_slow=True)
def laplace_with_a_latent_location(arm):
    numpyro.sample("reward", dist.Laplace(reals()[arm], 1.0))


@near_miss("not affine|prove", is_slow=True)
def mixture_likelihood(arm):
    weights = dist.Categorical(jnp.array([0.5, 0.5]))
    means = jnp.stack([reals("first")[arm], reals("second")[arm]], axis=-1)
    numpyro.sample("reward", dist.MixtureSameFamily(weights, dist.Normal(means, 1.0)))


@near_miss("support|Pareto", is_slow=True)
def uniform_up_to_a_latent(arm):
    limit = numpyro.sample("limit", dist.Pareto(1.0, 3.0).expand([A]))
    numpyro.sample("reward", dist.Uniform(0.0, limit[arm]))


@near_miss("support", is_slow=True)
def pareto_with_a_latent_minimum(arm):
    numpyro.sample("reward", dist.Pareto(gammas()[arm], 3.0))


@near_miss("support", is_slow=True)
def exponential_with_a_latent_start(arm):
    shift = dist.transforms.AffineTransform(gammas()[arm], 1.0, domain=dist.constraints.positive)
    numpyro.sample("reward", dist.TransformedDistribution(dist.Exponential(1.0), shift))


@near_miss("not affine", is_slow=True)
def gamma_with_a_latent_shape(arm):
    numpyro.sample("reward", dist.Gamma(gammas()[arm], 1.0))


@near_miss("power that can overflow", is_slow=True)
def weibull_with_a_latent_shape(arm):
    numpyro.sample("reward", dist.Weibull(1.0, gammas()[arm]))


@near_miss("not affine|prove", is_slow=True)
def truncated_outcome(arm):
    numpyro.sample("reward", dist.TruncatedNormal(reals()[arm], 1.0, low=-30.0))


@near_miss("not affine", is_slow=True)
def standard_deviation_under_an_inverse_gamma(arm):
    sd = numpyro.sample("sd", dist.InverseGamma(3.0, 2.0).expand([A]))
    normal(0.0, sd[arm])


@near_miss("not affine|inside", is_slow=True)
def merged_categories(arm):
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones((A, 3))).to_event(1))[arm]
    merged = jnp.stack([probs[:, 0] + probs[:, 1], probs[:, 2]], axis=-1)
    numpyro.sample("reward", dist.Categorical(merged))


@near_miss("scale", is_slow=True)
def likelihood_weighted_by_a_latent(arm):
    weight, rate = numpyro.sample("weight", dist.Gamma(2.0, 1.0)), gammas()[arm]
    with handlers.scale(scale=weight):
        numpyro.sample("reward", dist.Poisson(rate))


@near_miss("mask", is_slow=True)
def outcome_masked_by_a_latent(arm):
    rate = rates()[arm]
    numpyro.sample("reward", dist.Bernoulli(rate).mask(rate < 0.999))


# Priors of another family


@near_miss("not affine", is_slow=True)
def truncated_normal_prior(arm):
    mean = numpyro.sample("mean", dist.TruncatedNormal(0.0, 1.0, low=-9.0).expand([A]))
    normal(mean[arm])


@near_miss("not affine", is_slow=True)
def uniform_prior_on_a_mean(arm):
    mean = numpyro.sample("mean", dist.Uniform(-1.0, 1.0).expand([A]))
    normal(mean[arm])


@near_miss("not affine")
def half_normal_prior_on_a_rate(arm):
    rate = numpyro.sample("rate", dist.HalfNormal(1.0).expand([A]))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


@near_miss("not affine", is_slow=True)
def beta_prior_on_a_poisson_rate(arm):
    numpyro.sample("reward", dist.Poisson(rates()[arm]))


@near_miss("not Gamma in any power")
def log_normal_prior_on_a_rate(arm):
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0).expand([A]))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


@near_miss("minimum", is_slow=True)
def kumaraswamy_prior(arm):
    rate = numpyro.sample("rate", dist.Kumaraswamy(2.0, 3.0).expand([A]))
    bernoulli(rate[arm])


@near_miss("logarithm", is_slow=True)
def cauchy_prior(arm):
    mean = numpyro.sample("mean", dist.Cauchy(0.0, 1.0).expand([A]))
    normal(mean[arm])


@near_miss("logarithm", is_slow=True)
def student_prior_with_many_degrees_of_freedom(arm):
    mean = numpyro.sample("mean", dist.StudentT(1e6, 0.0, 1.0).expand([A]))
    normal(mean[arm])


@near_miss("abs", is_slow=True)
def laplace_prior(arm):
    mean = numpyro.sample("mean", dist.Laplace(0.0, 1.0).expand([A]))
    normal(mean[arm])


@near_miss("not affine|prove", is_slow=True)
def mixture_prior(arm):
    weights = dist.Categorical(jnp.array([0.999999, 0.000001]))
    prior = dist.MixtureSameFamily(weights, dist.Normal(jnp.array([0.0, 50.0]), 1.0))
    mean = numpyro.sample("mean", prior)
    normal(mean + 0.0 * arm)


@near_miss("handlers.mask", error=InvalidProgram)
def masked_prior(arm):
    with handlers.mask(mask=False):
        mean = reals()
    normal(mean[arm])


@near_miss("comparison|where|observed", is_slow=True)
def factor_that_switches(arm):
    rate = rates()
    numpyro.factor("belief", jnp.where(rate[0] > 0.999, -3.0, 0.0))
    bernoulli(rate[arm])


@near_miss("observed value")
def observation_that_follows_a_latent(arm):
    rate = rates()
    numpyro.sample("pilot", dist.Poisson(3.0), obs=jnp.where(rate[0] > 0.999, 5.0, 0.0))
    bernoulli(rate[arm])


# Conjugate one by one, not jointly


@near_miss("jointly")
def independent_mean_and_variance(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0).expand([A]))
    normal(reals()[arm], jnp.sqrt(variance[arm]))


@near_miss("prior precision|couples", is_slow=True)
def mean_scaled_by_the_variance(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0).expand([A]))
    mean = numpyro.sample("mean", dist.Normal(0.0, variance))
    normal(mean[arm], jnp.sqrt(variance[arm]))


@near_miss("couples", is_slow=True)
def variance_of_the_next_arm(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0).expand([A]))
    mean = numpyro.sample("mean", dist.Normal(0.0, jnp.sqrt(variance)))
    normal(mean[arm], jnp.sqrt(variance[(arm + 1) % A]))


@near_miss("couples", is_slow=True)
def variances_in_reverse_order(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0).expand([A]))
    mean = numpyro.sample("mean", dist.Normal(0.0, jnp.sqrt(variance)))
    normal(mean[arm], jnp.sqrt(variance[::-1][arm]))


@near_miss("prior|couples", is_slow=True)
def hierarchy_of_gammas(arm):
    hyper = numpyro.sample("hyper", dist.Gamma(2.0, 1.0))
    rate = numpyro.sample("rate", dist.Gamma(2.0, hyper).expand([A]))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


@near_miss("prior|couples")
def hierarchy_with_a_latent_spread(arm):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.InverseGamma(2.0, 1.0))
    mean = numpyro.sample("mean", dist.Normal(level, jnp.sqrt(spread)).expand([A]))
    normal(mean[arm])


# Bumps between the points of a certificate


def bump(x):
    """Return a hill of 20 nats about 2.5 that is below the last digit at a distance of 0.5."""
    return 20.0 / (1.0 + ((x - 2.5) / 0.05) ** 14)


@near_miss("division")
def a_bump_in_the_prior(arm):
    mean = reals()
    numpyro.factor("bump", bump(mean[0]))
    normal(mean[arm])


@near_miss("division", is_slow=True)
def a_bump_in_the_likelihood(arm):
    mean = reals()[arm]
    normal(mean + 0.01 * bump(mean))


@near_miss("not proved to be a polynomial", is_slow=True)
def a_polynomial_bump(arm):
    mean = reals()
    numpyro.factor("bump", 1e-12 * (1.0 - (mean[0] / 80.0) ** 2) ** 7)
    normal(mean[arm])


@near_miss("division")
def a_bump_of_a_positive_latent(arm):
    rate = gammas()
    numpyro.factor("bump", 12.0 / (1.0 + ((rate[0] - 3.7) / 0.002) ** 12))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


@near_miss("division", is_slow=True)
def a_bump_of_a_positive_latent_by_squares(arm):
    rate = gammas()
    eighth = jnp.square(jnp.square(jnp.square((rate[0] - 3.7) / 0.0005)))
    numpyro.factor("bump", 12.0 / (1.0 + eighth))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


# Conjugate here, not there


class OneSided(dist.Distribution):
    """Conjugate for reward 1 alone."""

    support = dist.constraints.boolean
    pytree_data_fields = ("rate",)

    def __init__(self, rate):
        self.rate = rate
        super().__init__(jnp.shape(rate), ())

    def sample(self, key, sample_shape=()):
        return jax.random.bernoulli(key, self.rate, (*sample_shape, *self.batch_shape)).astype(int)

    @property
    def mean(self):
        return self.rate

    def log_prob(self, value):
        return jnp.where(value == 1, 2.0 * jnp.log(self.rate), jnp.log1p(-self.rate) - self.rate)


class Rooted(OneSided):
    """Two factors for reward 0, one of them 1 + rate."""

    def log_prob(self, value):
        return jnp.where(value == 1, 2.0 * jnp.log(self.rate), jnp.log(1.0 - self.rate**2))


class Kinked(OneSided):
    """Not analytic for reward 0, where few would look."""

    def log_prob(self, value):
        missed = jnp.where(self.rate > 0.999, 2.0, 1.0) * jnp.log1p(-self.rate)
        return jnp.where(value == 1, jnp.log(self.rate), missed)


class Offset(OneSided):
    """Hides a bent likelihood below a large constant."""

    def log_prob(self, value):
        return 1e12 + OneSided.log_prob(self, value)


@near_miss("reward 0")
def conjugate_for_one_reward_alone(arm):
    numpyro.sample("reward", OneSided(rates()[arm]))


@near_miss("logarithm")
def a_logarithm_of_a_sum_for_one_reward(arm):
    numpyro.sample("reward", Rooted(rates()[arm]))


@near_miss("comparison|where", is_slow=True)
def not_analytic_for_one_reward(arm):
    numpyro.sample("reward", Kinked(rates()[arm]))


@near_miss("not affine", is_slow=True)
def bent_below_a_large_constant(arm):
    numpyro.sample("reward", Offset(rates()[arm]))


@near_miss("arm 1", is_slow=True)
def conjugate_on_all_arms_but_one(arm):
    rate = rates()[arm]
    bernoulli(jnp.where(arm == 1, rate**2, rate))


@near_miss("not affine|couples", is_slow=True, outcomes=("many", "few"))
def bent_below_a_far_larger_outcome(arm):
    rate, other = rates()[arm], rates("other")[arm]
    numpyro.sample("many", dist.Binomial(10**15, rate))
    numpyro.sample("few", dist.Bernoulli(other**2))
    numpyro.deterministic("expected_reward", other)


@near_miss("`sin`", is_slow=True)
def bent_beyond_a_narrow_prior(arm):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1e-6).expand([A]))
    normal(jnp.sin(mean[arm]), 1e-9)


@near_miss("not affine", is_slow=True)
def squared_beyond_a_narrow_prior(arm):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1e-6).expand([A]))[arm]
    normal(mean + 1e3 * mean**2, 1e-9)


@near_miss("logarithm", is_slow=True)
def student_above_a_tight_hierarchy(arm):
    parent = numpyro.sample("parent", dist.StudentT(3.0, 0.0, 1.0))
    normal(numpyro.sample("mean", dist.Normal(parent, 1e-5).expand([A]))[arm])


@near_miss("logarithm", is_slow=True)
def cauchy_in_large_units(arm):
    parent = numpyro.sample("parent", dist.Cauchy(0.0, 1e6))
    normal(numpyro.sample("mean", dist.Normal(parent, 1.0).expand([A]))[arm], 1e6)


@near_miss("`sin`", is_slow=True)
def a_wave_above_the_tightest_hierarchy(arm):
    parent = numpyro.sample("parent", dist.Normal(0.0, 1.0))
    numpyro.factor("wave", 3.0 * jnp.sin(parent))
    normal(numpyro.sample("mean", dist.Normal(parent, 1e-7).expand([A]))[arm])


@near_miss("parent plus a small step", is_slow=True)
def a_hierarchy_tighter_than_float64(arm):
    parent = numpyro.sample("parent", dist.Normal(0.0, 1.0))
    normal(numpyro.sample("mean", dist.Normal(parent, 1e-8).expand([A]))[arm])


@near_miss("square root", is_slow=True)
def a_bend_at_a_distant_place(arm):
    normal(jnp.sqrt((reals()[arm] - 500.0) ** 2 + 1e-6), 0.7)


@near_miss("sum to 1", error=InvalidProgram)
def probabilities_that_do_not_sum_to_one(arm):
    weight = numpyro.sample("weight", dist.Gamma(2.0, 1.0).expand([A, 3]).to_event(2))
    numpyro.sample("reward", dist.Categorical(probs=weight[arm]))


# What NumPyro is not told


@near_miss("hidden", error=InvalidProgram)
def draw_behind_a_block(arm):
    with handlers.block():
        hidden = numpyro.sample("hidden", dist.Normal(0.0, 1.0))
    normal(reals()[arm] + hidden)


@near_miss("comparison|where", is_slow=True)
def density_replaced_on_the_instance(arm):
    rate = rates()[arm]
    outcome = dist.Bernoulli(rate)
    outcome.log_prob = lambda value: (
        jnp.where(rate > 0.999, 0.5, 1.0) * jnp.where(value, jnp.log(rate), jnp.log1p(-rate))
    )
    numpyro.sample("reward", outcome)


@near_miss("per row", error=InvalidProgram)
def a_latent_per_row(arm):
    with numpyro.plate("rows", arm.shape[0]):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        bernoulli(rate)


@near_miss("discrete", error=InvalidProgram)
def a_discrete_latent(arm):
    kind = numpyro.sample("kind", dist.Bernoulli(0.5))
    bernoulli(rates()[arm] * kind)


@near_miss("depends on arm", error=InvalidProgram)
def a_prior_that_follows_the_arm(arm):
    mean = numpyro.sample("mean", dist.Normal(1.0 * arm[0], 1.0))
    normal(mean + 0.0 * arm)


# What an example context of zeros would hide


@near_miss("sigmoid|not affine|prove", context=np.zeros(2))
def a_logistic_regression_at_an_example_of_zeros(arm, context):
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros((A, 2)), 1.0).to_event(2))
    numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weights[arm] * context, axis=-1)))


@near_miss("an exponential", context=np.array([1.0, 0.0]), is_slow=True)
def an_exponential_that_the_example_multiplies_by_zero(arm, context):
    normal(reals("a")[arm] * context[:, 0] + jnp.exp(reals("b")[arm]) * context[:, 1])


@near_miss("sigmoid|not affine|prove", context=np.array(0), is_slow=True)
def a_logistic_slope_at_an_integer_zero(arm, context):
    numpyro.sample("reward", dist.Bernoulli(logits=reals("slope")[arm] * context))


@near_miss("sigmoid|not affine|prove", context=np.array(False), is_slow=True)
def a_logistic_shift_at_an_example_of_false(arm, context):
    numpyro.sample("reward", dist.Bernoulli(logits=reals("shift")[arm] * context))


@near_miss("an exponential", context=np.array(False), is_slow=True)
def an_exponential_that_the_example_does_not_choose(arm, context):
    mean = reals("a")[arm]
    normal(jnp.where(context, jnp.exp(mean), mean))


@near_miss("an exponential", context={"kind": np.array(0), "count": np.zeros(2, np.uint8)}, is_slow=True)
def an_exponential_times_a_count_beside_an_index(arm, context):
    by_kind = numpyro.sample("by_kind", dist.Normal(0.0, 1.0).expand([2]))[context["kind"]]
    normal(reals("a")[arm] + by_kind + jnp.exp(reals("b")[arm]) * context["count"][:, 1])


# Chains of outcomes: only the right share of what is left adds up to a conjugate form


def chain(arm: Any, share: Callable[[Any], Any], is_second_kept: bool = True) -> None:
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])).expand([A]))[arm]
    numpyro.deterministic("expected_reward", p[:, 0])
    first = numpyro.sample("n1", dist.Binomial(10, p[:, 0]))
    left = 10 - first if is_second_kept else 10
    numpyro.sample("n2", dist.Binomial(left, share(p)))


@near_miss("not affine", outcomes=("n1", "n2"), is_slow=True)
def a_chain_that_forgets_what_is_gone(arm):
    chain(arm, lambda p: p[:, 1])


@near_miss("not affine", outcomes=("n1", "n2"), is_slow=True)
def a_chain_that_counts_all_again(arm):
    chain(arm, lambda p: p[:, 1] / (1.0 - p[:, 0]), is_second_kept=False)


@near_miss("not proved to be a sum of powers", outcomes=("n1", "n2"), is_slow=True)
def a_chain_by_the_wrong_share(arm):
    chain(arm, lambda p: p[:, 1] / (1.0 - p[:, 2]) + p[:, 0] * p[:, 2])


@near_miss("not affine", is_slow=True)
def half_of_a_chain(arm):
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])).expand([A]))[arm]
    bernoulli(p[:, 1] / (1.0 - p[:, 0]))


def test_there_are_enough_programs():
    assert len(CASES) >= 80


# Words: the user's own line, and remedies that were tried


def clipped(arm):
    bernoulli(rates().clip(0.01, 0.99)[arm])


def exponential_rate(arm):
    numpyro.sample("reward", dist.Poisson(jnp.exp(reals()[arm])))


def robust_noise(arm):
    numpyro.sample("reward", dist.StudentT(4.0, reals()[arm], 1.0))


@pytest.mark.parametrize(
    ("program", "reason", "remedy"),
    [
        (
            clipped,
            r"in `clip` \(line \d+ of test_conjugate_refused.py: `bernoulli\(rates\(\).clip\(0.01, 0.99\)\[arm\]\)`\), which "
            r"reaches the probs of 'reward' \(Bernoulli\); let latents reach the outcome through arithmetic",
            "a Bernoulli outcome is conjugate to a Beta prior on its probability itself; or keep the program",
        ),
        pytest.param(
            exponential_rate,
            r"an exponential of an unbounded quantity.* \(line \d+ of test_conjugate_refused.py: `numpyro.sample",
            "a Poisson outcome is conjugate to a Gamma prior on its rate",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            robust_noise,
            r"in the log density of 'reward' \(StudentT\), the logarithm of a quantity that is not a product of powers",
            "no prior is known that is conjugate to a StudentT outcome; keep the program",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_refusal_names_the_line_and_what_the_outcome_is_conjugate_to(program, reason, remedy):
    with pytest.raises(NotConjugate) as refused:
        conjugate(RewardModel(program, A))
    assert re.search(reason, str(refused.value))
    assert remedy in str(refused.value)
    assert "formula of the distribution" not in str(refused.value)


def noise_of_two(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0 * jnp.sqrt(variance)).expand([A]))
    return mean[arm], jnp.sqrt(variance)


REMEDIED = {
    "Bernoulli": lambda arm: dist.Bernoulli(rates()[arm]),
    "Binomial": lambda arm: dist.Binomial(3, rates()[arm]),
    "Geometric": lambda arm: dist.Geometric(rates()[arm]),
    "Categorical": lambda arm: dist.Categorical(numpyro.sample("p", dist.Dirichlet(jnp.ones(3)).expand([A]))[arm]),
    "Poisson": lambda arm: dist.Poisson(2.5 * gammas()[arm]),
    "Exponential": lambda arm: dist.Exponential(gammas()[arm]),
    "Gamma": lambda arm: dist.Gamma(2.0, gammas()[arm]),
    "Normal": lambda arm: dist.Normal(*noise_of_two(arm)),
    "LogNormal": lambda arm: dist.LogNormal(*noise_of_two(arm)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONJUGATE))
def test_what_a_remedy_says_is_conjugate_is_accepted(name):
    def program(arm):
        numpyro.sample("reward", REMEDIED[name](arm))
        numpyro.deterministic("expected_reward", jnp.zeros(arm.shape))

    assert conjugate(RewardModel(program, A)).explanation.is_exact
