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
from ppl_bandit.engines.refusals import CONJUGATE
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


def latents(name: str, prior: Any) -> Any:
    return numpyro.sample(name, prior.expand([A]))


def reward(law: Any) -> None:
    numpyro.sample("reward", law)


def logits_of_three() -> Any:
    return numpyro.sample("logits", dist.Normal(0.0, 1.0).expand([A, 3]).to_event(2))


def below(prior: Any, step: float) -> Any:
    """Return means around a parent."""
    return latents("mean", dist.Normal(numpyro.sample("parent", prior), step))


def bernoulli(probs: Any) -> None:
    reward(dist.Bernoulli(probs))


def normal(location: Any, scale: Any = 1.0) -> None:
    reward(dist.Normal(location, scale))


# Links that bend


@near_miss("real latents reach the logits", is_slow=True, context=np.array([1.0, -0.5]))
def logistic_regression(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([A, 2]).to_event(2))
    reward(dist.Bernoulli(logits=(weight[arm] * context).sum(-1)))


@near_miss("leaves its domain", error=InvalidProgram)
def probability_that_exceeds_one(arm):
    bernoulli(2.0 * rates()[arm])


# Kinks, branches and roundings


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


@near_miss("not affine|prove", is_slow=True)
def mixture_likelihood(arm):
    weights = dist.Categorical(jnp.array([0.5, 0.5]))
    means = jnp.stack([reals("first")[arm], reals("second")[arm]], axis=-1)
    reward(dist.MixtureSameFamily(weights, dist.Normal(means, 1.0)))


@near_miss("not affine|inside", is_slow=True)
def merged_categories(arm):
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones((A, 3))).to_event(1))[arm]
    merged = jnp.stack([probs[:, 0] + probs[:, 1], probs[:, 2]], axis=-1)
    reward(dist.Categorical(merged))


@near_miss("scale", is_slow=True)
def likelihood_weighted_by_a_latent(arm):
    weight, rate = numpyro.sample("weight", dist.Gamma(2.0, 1.0)), gammas()[arm]
    with handlers.scale(scale=weight):
        reward(dist.Poisson(rate))


# Priors of another family


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
    reward(dist.Poisson(rate[arm]))


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


@near_miss("not proved to be a polynomial", is_slow=True)
def a_polynomial_bump(arm):
    mean = reals()
    numpyro.factor("bump", 1e-12 * (1.0 - (mean[0] / 80.0) ** 2) ** 7)
    normal(mean[arm])


@near_miss("division")
def a_bump_of_a_positive_latent(arm):
    rate = gammas()
    numpyro.factor("bump", 12.0 / (1.0 + ((rate[0] - 3.7) / 0.002) ** 12))
    reward(dist.Poisson(rate[arm]))


@near_miss("division", is_slow=True)
def a_bump_of_a_positive_latent_by_squares(arm):
    rate = gammas()
    eighth = jnp.square(jnp.square(jnp.square((rate[0] - 3.7) / 0.0005)))
    numpyro.factor("bump", 12.0 / (1.0 + eighth))
    reward(dist.Poisson(rate[arm]))


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


@near_miss("not affine|couples", is_slow=True, outcomes=("many", "few"))
def bent_below_a_far_larger_outcome(arm):
    rate, other = rates()[arm], rates("other")[arm]
    numpyro.sample("many", dist.Binomial(10**15, rate))
    numpyro.sample("few", dist.Bernoulli(other**2))
    numpyro.deterministic("expected_reward", other)


@near_miss("`sin`", is_slow=True)
def a_wave_above_the_tightest_hierarchy(arm):
    parent = numpyro.sample("parent", dist.Normal(0.0, 1.0))
    numpyro.factor("wave", 3.0 * jnp.sin(parent))
    normal(numpyro.sample("mean", dist.Normal(parent, 1e-7).expand([A]))[arm])


@near_miss("sum to 1", error=InvalidProgram)
def probabilities_that_do_not_sum_to_one(arm):
    weight = numpyro.sample("weight", dist.Gamma(2.0, 1.0).expand([A, 3]).to_event(2))
    reward(dist.Categorical(probs=weight[arm]))


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
    reward(outcome)


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
    reward(dist.Bernoulli(logits=jnp.sum(weights[arm] * context, axis=-1)))


@near_miss("an exponential", context=np.array([1.0, 0.0]), is_slow=True)
def an_exponential_that_the_example_multiplies_by_zero(arm, context):
    normal(reals("a")[arm] * context[:, 0] + jnp.exp(reals("b")[arm]) * context[:, 1])


@near_miss("sigmoid|not affine|prove", context=np.array(0), is_slow=True)
def a_logistic_slope_at_an_integer_zero(arm, context):
    reward(dist.Bernoulli(logits=reals("slope")[arm] * context))


@near_miss("sigmoid|not affine|prove", context=np.array(False), is_slow=True)
def a_logistic_shift_at_an_example_of_false(arm, context):
    reward(dist.Bernoulli(logits=reals("shift")[arm] * context))


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


# Programs of one line: those of the default run, and the others


ONE_LINE = {
    # Links that bend
    "a bump too narrow to meet": (
        "flattens",
        lambda arm: bernoulli((rate := rates()[arm]) - 0.5 * rate * (1.0 - rate) * jnp.exp(-1e8 * (rate - 0.3) ** 2)),
    ),
    # Kinks, branches and roundings
    "gradient stopped": ("not affine", lambda arm: bernoulli(jax.lax.stop_gradient(rates())[arm])),
    # Priors of another family
    "half normal prior on a rate": (
        "not affine",
        lambda arm: reward(dist.Poisson(latents("rate", dist.HalfNormal(1.0))[arm])),
    ),
    "log normal prior on a rate": (
        "not Gamma in any power",
        lambda arm: reward(dist.Poisson(latents("rate", dist.LogNormal(0.0, 1.0))[arm])),
    ),
    # Conjugate one by one, not jointly
    "independent mean and variance": (
        "jointly",
        lambda arm: normal(reals()[arm], jnp.sqrt(latents("variance", dist.InverseGamma(2.0, 1.0))[arm])),
    ),
    # Conjugate here, not there
    "conjugate for one reward alone": ("reward 0", lambda arm: reward(OneSided(rates()[arm]))),
    "a logarithm of a sum for one reward": ("logarithm", lambda arm: reward(Rooted(rates()[arm]))),
}

ONE_LINE_SLOW = {
    # Links that bend
    "squared link": ("not affine", lambda arm: bernoulli(rates()[arm] ** 2)),
    "square root link": ("not affine", lambda arm: bernoulli(jnp.sqrt(rates())[arm])),
    "link with a power close to one": ("not affine", lambda arm: bernoulli(rates()[arm] ** 1.0001)),
    "a tiny perturbation": ("`sin`", lambda arm: normal((mean := reals()[arm]) * (1.0 + 1e-7 * jnp.sin(mean)))),
    "logits that are gaussian": (
        "real latents reach the logits",
        lambda arm: reward(dist.Bernoulli(logits=reals()[arm])),
    ),
    "multinomial logits": (
        "real latents reach the logits",
        lambda arm: reward(dist.Categorical(logits=logits_of_three()[arm])),
    ),
    "softmax of gaussians": (
        "largest",
        lambda arm: reward(dist.Categorical(jax.nn.softmax(logits_of_three())[arm])),
    ),
    "probit link": ("abs", lambda arm: bernoulli(jax.scipy.special.ndtr(reals())[arm])),
    "exponential link": ("flattens|inside", lambda arm: reward(dist.Poisson(jnp.exp(reals()[arm])))),
    "odds that are gamma": ("division", lambda arm: bernoulli((odds := gammas()[arm]) / (1.0 + odds))),
    "noisy channel": ("not affine", lambda arm: bernoulli(0.9 * rates()[arm] + 0.05)),
    "product of gaussians": ("not affine|couples", lambda arm: normal(reals("first")[arm] * reals("second")[arm])),
    "a gate made of a high power": (
        "division",
        lambda arm: reward(dist.Poisson((rate := gammas()[arm]) * (1.0 + 1.0 / (1.0 + (rate / 50.0) ** 100)))),
    ),
    "saturation far out": (
        "flattens",
        lambda arm: normal((mean := reals()[arm]) + mean * jax.nn.sigmoid(50.0 * (mean - 8.0))),
    ),
    # Kinks, branches and roundings
    "rounded rate": ("rounding", lambda arm: bernoulli(0.05 + 0.9 * jnp.round(rates()[arm], 3))),
    "floored rate": ("rounding", lambda arm: reward(dist.Poisson(1.0 + jnp.floor(gammas()[arm])))),
    "rate cast to an integer": ("conversion.*int", lambda arm: reward(dist.Poisson(1.0 + gammas()[arm].astype(int)))),
    "rate cast to half precision": ("float16", lambda arm: bernoulli(rates()[arm].astype(jnp.float16))),
    "mean cast to single precision": ("float32", lambda arm: normal(reals()[arm].astype(jnp.float32))),
    # below, with its line and its remedy
    "rate clipped where nobody looks": ("clip", lambda arm: bernoulli(jnp.clip(rates()[arm], 1e-6, 1.0 - 1e-6))),
    "mean bounded below": ("maximum", lambda arm: normal(jnp.maximum(reals()[arm], -20.0))),
    "mean bounded above": ("minimum", lambda arm: normal(jnp.minimum(reals()[arm], 20.0))),
    "rectified mean": ("maximum", lambda arm: normal(jax.nn.relu(reals()[arm]))),
    "absolute mean": ("abs", lambda arm: normal(jnp.abs(reals()[arm]))),
    "absolute mean by a root": ("square root", lambda arm: normal(jnp.sqrt(reals()[arm] ** 2))),
    "rate that differs near one": (
        "comparison|where",
        lambda arm: bernoulli(jnp.where((rate := rates()[arm]) > 0.999, rate**2, rate)),
    ),
    "branch on a latent": (
        "comparison|branch",
        lambda arm: normal(
            jax.lax.cond(
                (mean := numpyro.sample("mean", dist.Normal(0.0, 1.0))) > 5.0, lambda z: z**2, lambda z: z, mean
            )
            + 0.0 * arm
        ),
    ),
    "branch by a test for nan": (
        "logarithm|comparison",
        lambda arm: bernoulli(jnp.where(jnp.isnan(jnp.log(0.999 - (rate := rates()[arm]))), rate**2, rate)),
    ),
    "branch by overflow": (
        "finite|flattens",
        lambda arm: bernoulli(jnp.where(jnp.isfinite(jnp.exp(1e6 * ((rate := rates()[arm]) - 0.999))), rate, rate**2)),
    ),
    "branch by underflow": (
        "comparison|flattens",
        lambda arm: bernoulli(jnp.where(jnp.exp(1e6 * ((rate := rates()[arm]) - 0.9999)) > 0.0, rate**2, rate)),
    ),
    # Derivatives that lie
    "conjugate value with a wrong slope": ("not affine", lambda arm: normal(scaled_slope(reals()[arm]))),
    "bent value with a conjugate slope": (
        "not affine",
        lambda arm: normal(square_with_the_slope_of_a_line(reals()[arm])),
    ),
    "conjugate value with no slope": ("not affine", lambda arm: bernoulli(flat(rates()[arm]))),
    # Latents that choose
    "arm chosen by argmax": ("argmax", lambda arm: normal((mean := reals())[(arm + jnp.argmax(mean)) % A])),
    "table indexed by a latent": (
        "conversion|indexing",
        lambda arm: bernoulli(jnp.linspace(0.05, 0.95, 10)[(10.0 * rates()[arm]).astype(int)]),
    ),
    "table searched by a latent": (
        "searchsorted",
        lambda arm: bernoulli(jnp.linspace(0.05, 0.95, 11)[jnp.searchsorted(jnp.linspace(0.1, 0.9, 10), rates()[arm])]),
    ),
    "sorted means": ("sort", lambda arm: normal(jnp.sort(reals())[arm])),
    "best of the means": ("largest", lambda arm: normal(reals().max() + 0.0 * arm)),
    # Likelihoods of another family
    "zero inflated by hand": ("an exponential", lambda arm: reward(ZeroInflated(0.3, gammas()[arm]))),
    "zero inflated poisson": ("not affine|prove", lambda arm: reward(dist.ZeroInflatedPoisson(0.3, gammas()[arm]))),
    "student noise with many degrees of freedom": (
        "logarithm",
        lambda arm: reward(dist.StudentT(1e6, reals()[arm], 1.0)),
    ),
    "student noise with very many degrees of freedom": (
        "logarithm",
        lambda arm: reward(dist.StudentT(1e9, reals()[arm], 1.0)),
    ),
    "student noise": ("logarithm", lambda arm: reward(dist.StudentT(1e3, reals()[arm], 1.0))),
    "logistic noise": ("not affine|prove", lambda arm: reward(dist.Logistic(reals()[arm], 1.0))),
    "laplace with a latent location": (
        "no prior is known that is conjugate to a Laplace",
        lambda arm: reward(dist.Laplace(reals()[arm], 1.0)),
    ),
    "uniform up to a latent": (
        "support|Pareto",
        lambda arm: reward(dist.Uniform(0.0, latents("limit", dist.Pareto(1.0, 3.0))[arm])),
    ),
    "pareto with a latent minimum": ("support", lambda arm: reward(dist.Pareto(gammas()[arm], 3.0))),
    "exponential with a latent start": (
        "support",
        lambda arm: reward(
            dist.TransformedDistribution(
                dist.Exponential(1.0),
                dist.transforms.AffineTransform(gammas()[arm], 1.0, domain=dist.constraints.positive),
            )
        ),
    ),
    "gamma with a latent shape": ("not affine", lambda arm: reward(dist.Gamma(gammas()[arm], 1.0))),
    "weibull with a latent shape": ("power that can overflow", lambda arm: reward(dist.Weibull(1.0, gammas()[arm]))),
    "truncated outcome": ("not affine|prove", lambda arm: reward(dist.TruncatedNormal(reals()[arm], 1.0, low=-30.0))),
    "standard deviation under an inverse gamma": (
        "not affine",
        lambda arm: normal(0.0, latents("sd", dist.InverseGamma(3.0, 2.0))[arm]),
    ),
    "outcome masked by a latent": ("mask", lambda arm: reward(dist.Bernoulli(rate := rates()[arm]).mask(rate < 0.999))),
    # Priors of another family
    "truncated normal prior": (
        "not affine",
        lambda arm: normal(latents("mean", dist.TruncatedNormal(0.0, 1.0, low=-9.0))[arm]),
    ),
    "uniform prior on a mean": ("not affine", lambda arm: normal(latents("mean", dist.Uniform(-1.0, 1.0))[arm])),
    "beta prior on a poisson rate": ("not affine", lambda arm: reward(dist.Poisson(rates()[arm]))),
    "kumaraswamy prior": ("minimum", lambda arm: bernoulli(latents("rate", dist.Kumaraswamy(2.0, 3.0))[arm])),
    "cauchy prior": ("logarithm", lambda arm: normal(latents("mean", dist.Cauchy(0.0, 1.0))[arm])),
    "student prior with many degrees of freedom": (
        "logarithm",
        lambda arm: normal(latents("mean", dist.StudentT(1e6, 0.0, 1.0))[arm]),
    ),
    "laplace prior": ("abs", lambda arm: normal(latents("mean", dist.Laplace(0.0, 1.0))[arm])),
    # Bumps between the points of a certificate
    "a bump in the likelihood": ("division", lambda arm: normal((mean := reals()[arm]) + 0.01 * bump(mean))),
    # Conjugate here, not there
    "not analytic for one reward": ("comparison|where", lambda arm: reward(Kinked(rates()[arm]))),
    "bent below a large constant": ("not affine", lambda arm: reward(Offset(rates()[arm]))),
    "conjugate on all arms but one": (
        "arm 1",
        lambda arm: bernoulli(jnp.where(arm == 1, (rate := rates()[arm]) ** 2, rate)),
    ),
    "bent beyond a narrow prior": (
        "`sin`",
        lambda arm: normal(jnp.sin(latents("mean", dist.Normal(0.0, 1e-6))[arm]), 1e-9),
    ),
    "squared beyond a narrow prior": (
        "not affine",
        lambda arm: normal((mean := latents("mean", dist.Normal(0.0, 1e-6))[arm]) + 1e3 * mean**2, 1e-9),
    ),
    "student above a tight hierarchy": (
        "logarithm",
        lambda arm: normal(below(dist.StudentT(3.0, 0.0, 1.0), 1e-5)[arm]),
    ),
    "cauchy in large units": (
        "logarithm",
        lambda arm: normal(below(dist.Cauchy(0.0, 1e6), 1.0)[arm], 1e6),
    ),
    "a hierarchy tighter than float64": (
        "parent plus a small step",
        lambda arm: normal(below(dist.Normal(0.0, 1.0), 1e-8)[arm]),
    ),
    "a bend at a distant place": ("square root", lambda arm: normal(jnp.sqrt((reals()[arm] - 500.0) ** 2 + 1e-6), 0.7)),
    # Chains of outcomes: only the right share of what is left adds up to a conjugate form
    "half of a chain": (
        "not affine",
        lambda arm: bernoulli(
            (p := latents("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))[arm])[:, 1] / (1.0 - p[:, 0])
        ),
    ),
}

for rows, is_slow in ((ONE_LINE, False), (ONE_LINE_SLOW, True)):
    for name, (reason, program) in rows.items():
        program.__name__ = name
        near_miss(reason, is_slow=is_slow)(program)


def test_there_are_enough_programs():
    assert len(CASES) >= 80


# Words: the user's own line, and remedies that were tried


def clipped(arm):
    bernoulli(rates().clip(0.01, 0.99)[arm])


def exponential_rate(arm):
    reward(dist.Poisson(jnp.exp(reals()[arm])))


def robust_noise(arm):
    reward(dist.StudentT(4.0, reals()[arm], 1.0))


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
        reward(REMEDIED[name](arm))
        numpyro.deterministic("expected_reward", jnp.zeros(arm.shape))

    assert conjugate(RewardModel(program, A)).explanation.is_exact
