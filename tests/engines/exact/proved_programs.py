"""Programs, the verdict of the exact engine on each, and the reference: a posterior in closed form, or a reason to refuse.

Accepted programs state the posterior after seven rows in NumPy. Refused ones look conjugate and are not, or cannot be proved to
be. The default run has one program for every family and structure of latents and for every kind of reason; other spellings, and
further primitives that are not analytic, are slow.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform, PowerTransform
from numpyro.infer.reparam import LocScaleReparam
from programs import (
    bernoulli,
    gammas,
    latents,
    logistic,
    normal,
    of_one_latent,
    per_arm,
    poisson,
    rates,
    reals,
    reward,
    with_term,
)

from ppl_bandit.types import InvalidProgram, NotConjugate

A = 3  # arms of the accepted programs; the refused ones have two
ARM = np.array([0, 2, 1, 1, 0, 2, 0])
CLICKS = np.array([1, 0, 1, 1, 0, 0, 1])
COUNTS = np.array([3, 0, 1, 4, 2, 7, 0])
AMOUNTS = np.array([0.8, 2.1, 0.3, 1.4, 3.9, 0.6, 1.1])
REALS = np.array([1.3, -0.4, 0.2, 2.2, -1.7, 0.9, 0.6])
EXPOSURE = np.array([1.0, 0.5, 2.0, 0.7, 1.2, 3.0, 0.9])
FEATURES = np.random.default_rng(0).normal(size=(7, 2))


class Accepted(NamedTuple):
    """A program, seven rows of data, and the posterior that they must lead to; None of a program that is only proved."""

    program: Callable
    rewards: Any = None
    posterior: dict[str, dict[str, Any]] | None = None
    contexts: Any = None
    settings: dict[str, Any] = {}  # of the reward model


class Refused(NamedTuple):
    """A program, and a word of the reason for which it must be refused."""

    program: Callable
    reason: str
    error: type[ValueError]
    settings: dict[str, Any]


ACCEPTED: dict[str, Accepted] = {}
REFUSED: dict[str, Refused] = {}
DEFAULT: set[str] = set()


def exact(rewards: Any, posterior: Any, contexts: Any = None, *, is_slow: bool = True, **settings: Any) -> Callable:
    """Register a program that is accepted."""

    def register(program: Callable, name: str | None = None) -> Callable:
        name = name or program.__name__
        ACCEPTED[name] = Accepted(program, rewards, posterior, contexts, {"num_arms": A, **settings})
        DEFAULT.update([] if is_slow else [name])
        return program

    return register


def near_miss(
    reason: str, *, is_slow: bool = False, error: type[ValueError] = NotConjugate, **settings: Any
) -> Callable:
    """Register a program that is refused."""

    def register(program: Callable, name: str | None = None) -> Callable:
        name = name or program.__name__
        REFUSED[name] = Refused(program, reason, error, {"num_arms": 2, **settings})
        DEFAULT.update([] if is_slow else [name])
        return program

    return register


def cases(table: dict[str, Any]) -> list[Any]:
    """Return the parameters of a test of every program of a table."""
    return [
        pytest.param(own, id=name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name, own in table.items()
    ]


# Closed forms


def by_arm(weights: Any, arm: np.ndarray = ARM, num_arms: int = A) -> np.ndarray:
    """Sum over the rows of each arm."""
    return np.bincount(arm, np.broadcast_to(weights, arm.shape), num_arms)


def beta(successes: Any, failures: Any, prior: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    return {"concentration1": prior[0] + successes, "concentration0": prior[1] + failures}


def gamma(concentration: Any, rate: Any, power: float) -> dict[str, Any]:
    return {"concentration": concentration, "rate": rate, "power": np.full(np.shape(rate), power)}


def gaussian(mean: Any, covariance: Any, design: np.ndarray, y: np.ndarray, noise: Any) -> tuple[Any, Any]:
    """Return the posterior of a linear regression with known noise, in information form."""
    weight = 1.0 / np.broadcast_to(noise, y.shape) ** 2
    prior = np.linalg.inv(covariance)
    posterior = np.linalg.inv(prior + (design.T * weight) @ design)
    return posterior @ (prior @ mean + design.T @ (weight * y)), posterior


def sites_of(law: tuple[Any, Any], **shapes: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters of sites, of these shapes, whose entries in order have a mean and a covariance."""
    mean, covariance = law
    found, start = {}, 0
    for name, shape in shapes.items():
        own = slice(start, start := start + int(np.prod(shape)))
        found[name] = {"mean": mean[own].reshape(shape), "covariance": covariance[own, own]}
    return found


def normal_inverse_gamma(mean: Any, unit_covariance: Any, shape: float, rate: float, design: np.ndarray, y: np.ndarray):
    """Return mean, covariance / variance, shape and rate of a regression with unknown noise."""
    prior = np.linalg.inv(unit_covariance)
    precision = prior + design.T @ design
    spread = np.linalg.inv(precision)
    m = spread @ (prior @ mean + design.T @ y)
    return m, spread, shape + y.size / 2, rate + 0.5 * (y @ y + mean @ prior @ mean - m @ precision @ m)


def unknown_noise(name: str, power: float, m: Any, v: Any, a: Any, b: Any, mean: str = "mean") -> dict[str, Any]:
    """Return the parameters of a site whose power is the noise's precision, and of the means above it."""
    return {name: gamma(a, b, power), mean: {"mean": m, "covariance_times_precision": v}}


def for_each_arm(closed_form: Callable) -> tuple[np.ndarray, ...]:
    """Stack the results of a closed form that is applied to each arm's rows."""
    return tuple(np.array(parts) for parts in zip(*(closed_form(ARM == a) for a in range(A)), strict=True))


HOT = np.eye(A)[ARM]
CLICKED, NOT_CLICKED = by_arm(CLICKS), by_arm(1 - CLICKS)
FLAT = beta(CLICKED, NOT_CLICKED)


# Probabilities and rates


@exact(CLICKS, {"rate": beta(CLICKED, NOT_CLICKED, (1.5, 2.0))})  # tests/live/test_bandit.py has it in the default run
def bernoulli_in_a_plate(arm):
    bernoulli(per_arm("rate", dist.Beta(1.5, 2.0), A)[arm])


@exact(CLICKS, {f"rate_{a}": beta(CLICKED[a], NOT_CLICKED[a], (1.0 + a, 1.0)) for a in range(A)})
def bernoulli_by_where_over_separate_sites(arm):
    own = [numpyro.sample(f"rate_{a}", dist.Beta(1.0 + a, 1.0)) for a in range(A)]
    bernoulli(jnp.where(arm == 0, own[0], jnp.where(arm == 1, own[1], own[2])))


SEPARATE = {f"rate_{a}": beta(CLICKED[a], NOT_CLICKED[a]) for a in range(A)}


@exact(CLICKS, SEPARATE)
def bernoulli_by_a_python_loop_over_arms(arm):
    chosen = 0.0
    for a in range(A):
        chosen = chosen + (arm == a) * numpyro.sample(f"rate_{a}", dist.Beta(1.0, 1.0))
    bernoulli(chosen)


@exact(CLICKS, SEPARATE)
def bernoulli_by_stacked_sites(arm):
    own = jnp.stack([numpyro.sample(f"rate_{a}", dist.Beta(1.0, 1.0)) for a in range(A)])
    bernoulli(jnp.take(own, arm))


@exact(CLICKS, {"rate": beta(CLICKS[ARM != 1].sum(), (1 - CLICKS)[ARM != 1].sum())})
def bernoulli_with_the_second_arm_known(arm):
    bernoulli(jnp.where(arm == 1, 0.5, numpyro.sample("rate", dist.Beta(1.0, 1.0))))


TRIALS = np.array([10, 3, 5, 4, 2, 9, 8])


@exact(COUNTS, {"rate": beta(by_arm(COUNTS), by_arm(TRIALS - COUNTS), (2.0, 1.0))}, TRIALS)
def binomial_with_trials_from_the_context(arm, context):
    reward(dist.Binomial(context, per_arm("rate", dist.Beta(2.0, 1.0), A)[arm]))


POISSON = {"rate": gamma(2.0 + by_arm(COUNTS), 1.5 + by_arm(EXPOSURE), 1.0)}


@exact(COUNTS, POISSON, {"exposure": EXPOSURE}, is_slow=False)
def poisson_with_exposure(arm, context):
    rate = per_arm("rate", dist.Gamma(2.0, 1.5), A)
    poisson(context["exposure"] * rate[arm])


@exact(COUNTS, {"rate": gamma(1.0 + COUNTS.sum(), 0.5 + (1.0 + ARM).sum(), 1.0)})
def poisson_under_an_exponential_prior_shared_by_arms(arm):
    rate = numpyro.sample("rate", dist.Exponential(0.5))
    poisson(rate * jnp.array([1.0, 2.0, 3.0])[arm])


@exact(AMOUNTS, {"tail": gamma(2.0 + by_arm(1.0), 1.0 + by_arm(np.log(AMOUNTS / 0.25)), 1.0)})
def pareto_with_a_latent_tail(arm):
    tail = gammas("tail", A)
    reward(dist.Pareto(0.25, tail[arm]))
    numpyro.deterministic("expected_reward", 0.25 * 2.0 ** (1.0 / tail[arm]))  # the median: the mean may be infinite


SEGMENT = np.array([0, 1, 1, 0, 1, 0, 1])
CELLS = [by_arm(counted, SEGMENT * A + ARM, 2 * A).reshape(2, A) for counted in (CLICKS, 1 - CLICKS)]


@exact(CLICKS, {"rate": beta(*CELLS)}, {"segment": SEGMENT})
def an_integer_context_that_indexes_a_plate(arm, context):
    with numpyro.plate("segments", 2, dim=-2), numpyro.plate("arms", A, dim=-1):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    bernoulli(rate[context["segment"], arm])


GROUP = np.array([0, 1, 0])
GROUPED = gamma(2.0 + by_arm(1.0, GROUP[ARM], 2), 1.5 + by_arm(AMOUNTS, GROUP[ARM], 2), 1.0)


@exact(AMOUNTS, {"rate": GROUPED})
def arms_that_share_parameters(arm):
    reward(dist.Exponential(latents("rate", dist.Gamma(2.0, 1.5), 2)[jnp.asarray(GROUP)[arm]]))


# Gaussians of known noise


@exact(REALS, sites_of(gaussian(np.full(A, 0.5), 4.0 * np.eye(A), HOT, REALS, 0.7), mean=A))
def normal_with_known_noise(arm):
    normal(per_arm("mean", dist.Normal(0.5, 2.0, validate_args=True), A)[arm], 0.7)


NOISE = np.array([0.7, 1.0, 1.5])
LEVEL_AND_OFFSETS = gaussian(
    np.eye(A + 1)[0], np.diag([4.0, *[0.25] * A]), np.column_stack([np.ones(7), HOT]), REALS, NOISE[ARM]
)


@exact(REALS, sites_of(LEVEL_AND_OFFSETS, level=(), offset=A))
def normal_with_a_shared_level_and_an_offset_per_arm(arm):
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    offset = per_arm("offset", dist.Normal(0.0, 0.5), A)
    normal(level + offset[arm], jnp.asarray(NOISE)[arm])


# (level, means): each mean is the level plus an independent deviation.
BUILD = np.column_stack([np.ones(A + 1), np.vstack([np.zeros(A), np.eye(A)])])
HIERARCHY = gaussian(
    np.ones(A + 1), BUILD @ np.diag([4.0, *[0.25] * A]) @ BUILD.T, np.column_stack([np.zeros(7), HOT]), REALS, 0.7
)


@exact(REALS, sites_of(HIERARCHY, level=(), mean=A), is_slow=False)
def hierarchical_normal_centred(arm):
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    normal(per_arm("mean", dist.Normal(level, 0.5), A)[arm], 0.7)


# The standardised deviations are (mean - level) / 0.5, a linear image of the centred posterior.
IMAGE = np.vstack([np.eye(A + 1)[0], np.column_stack([-np.ones(A), np.eye(A)]) / 0.5])
exact(REALS, sites_of((IMAGE @ HIERARCHY[0], IMAGE @ HIERARCHY[1] @ IMAGE.T), level=(), mean_decentered=A))(
    handlers.reparam(hierarchical_normal_centred, config={"mean": LocScaleReparam(0.0)}),
    "hierarchical_normal_non_centred",
)
WALK = 0.25 * np.minimum.outer(np.arange(1, A + 1), np.arange(1, A + 1))


@exact(REALS, sites_of(gaussian(np.zeros(A), WALK, HOT, REALS, 0.7), level=A))
def gaussian_random_walk_over_arms(arm):
    normal(numpyro.sample("level", dist.GaussianRandomWalk(0.5, num_steps=A))[arm], 0.7)


PER_ARM_FEATURES = (HOT[:, :, None] * FEATURES[:, None, :]).reshape(7, 2 * A)
LOADING = np.array([[1.0, 0.3], [0.3, 0.5]])
BY_SUM = gaussian(np.full(2 * A, 0.2), 2.25 * np.eye(2 * A), PER_ARM_FEATURES, REALS, 0.8)
BY_EINSUM = gaussian(np.zeros(2 * A), np.kron(np.eye(A), LOADING), PER_ARM_FEATURES, REALS, 0.8)


@exact(REALS, sites_of(BY_SUM, weight=(A, 2)), FEATURES, is_slow=False)
def regression_by_sum(arm, context):
    weight = per_arm("weight", dist.Normal(0.2, 1.5).expand([2]).to_event(1), A)
    normal((weight[arm] * context).sum(-1), 0.8)


@exact(REALS, sites_of(BY_EINSUM, weight=(A, 2)), FEATURES)
def regression_by_einsum_with_a_matrix_normal_prior(arm, context):
    prior = dist.MatrixNormal(jnp.zeros((A, 2)), jnp.eye(A), jnp.linalg.cholesky(jnp.asarray(LOADING)))
    normal(jnp.einsum("nd,nd->n", numpyro.sample("weight", prior)[arm], context), 0.8)


def regression_with(spread: dict[str, Any], arm: Any, context: Any) -> None:
    weight = numpyro.sample("weight", dist.MultivariateNormal(jnp.array([0.5, -0.2]), **spread))
    normal(jnp.dot(context, weight), 0.8)


for own, spread in (
    ("covariance", {"covariance_matrix": LOADING}),
    ("precision", {"precision_matrix": np.linalg.inv(LOADING)}),
    ("factor", {"scale_tril": np.linalg.cholesky(LOADING)}),
):
    law = gaussian(np.array([0.5, -0.2]), LOADING, FEATURES, REALS, 0.8)
    exact(REALS, sites_of(law, weight=2), FEATURES)(
        functools.partial(regression_with, spread), f"regression_with_a_prior_{own}"
    )
INTERCEPT = gaussian(np.zeros(5), np.diag([4.0, 4.0, 4.0, 1.0, 1.0]), np.column_stack([HOT, FEATURES]), REALS, 0.8)


@exact(REALS, sites_of(INTERCEPT, intercept=3, slope=2), FEATURES)
def regression_with_an_intercept_by_concatenation(arm, context):
    intercept = latents("intercept", dist.Normal(0.0, 2.0), A)
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    both = jnp.concatenate([intercept[arm][:, None], jnp.broadcast_to(slope, context.shape)], axis=-1)
    design = jnp.concatenate([jnp.ones((arm.shape[0], 1)), context], axis=-1)
    normal(jax.vmap(jnp.vdot)(both, design), 0.8)


@exact(AMOUNTS, sites_of(gaussian(np.zeros(A), np.eye(A), HOT, np.log(AMOUNTS), 0.6), level=A))
def log_normal_with_known_spread(arm):
    reward(dist.LogNormal(reals("level", A)[arm], 0.6))


FAR = EXPOSURE > 1.0
BRANCH = gaussian(
    np.zeros(A + 1), np.eye(A + 1), np.column_stack([HOT, EXPOSURE * FAR]), REALS, np.where(FAR, 2.0, 0.5)
)


@exact(REALS, sites_of(BRANCH, mean=A, slope=()), EXPOSURE)
def a_branch_on_the_context(arm, context):
    mean, slope = reals(num=A), numpyro.sample("slope", dist.Normal(0.0, 1.0))
    location = jax.vmap(lambda mean, x: jax.lax.cond(x > 1.0, lambda: mean + slope * x, lambda: mean))(
        mean[arm], context
    )
    normal(location, jnp.where(context > 1.0, 2.0, 0.5))


@exact(REALS, sites_of(gaussian(np.zeros(2), np.eye(2), HOT[:, [0, 2]], REALS, 0.7), mean=2))
def means_scattered_into_place(arm):
    mean = reals(num=2)
    placed = jnp.zeros(A, mean.dtype).at[jnp.array([0, 2])].add(mean).at[1].set(0.5)
    normal(placed[arm], 0.7)


def of_noise(noise: float, arm: Any) -> None:
    normal(reals(num=A)[arm], noise)


exact(REALS, sites_of(gaussian(np.zeros(A), np.eye(A), HOT, REALS, 0.3), mean=A))(
    functools.partial(of_noise, 0.3), "a_program_with_bound_settings"
)


# Unknown noise


def of_one_arm(rows: np.ndarray) -> tuple[Any, ...]:
    """Return the posterior of a mean, with prior mean 0.3 and one quarter of an observation's weight."""
    ones = np.ones((rows.sum(), 1))
    m, v, a, b = normal_inverse_gamma(np.array([0.3]), 4.0 * np.eye(1), 2.0, 1.5, ones, REALS[rows])
    return m[0], v[0, 0], a, b


M, V, SHAPES, SCALES = for_each_arm(of_one_arm)
OWN_NOISE = M, np.diag(V), SHAPES, SCALES


@exact(REALS, unknown_noise("variance", -1.0, *OWN_NOISE), is_slow=False)
def normal_with_unknown_variance_per_arm(arm):
    with numpyro.plate("arms", A):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
        mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * jnp.sqrt(variance)))
    normal(mean[arm], jnp.sqrt(variance[arm]))


@exact(REALS, unknown_noise("precision", 1.0, *OWN_NOISE))
def normal_with_unknown_precision_per_arm(arm):
    precision = latents("precision", dist.Gamma(2.0, 1.5), A)
    mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * precision**-0.5))
    normal(mean[arm], 1.0 / jnp.sqrt(precision)[arm])


@exact(REALS, unknown_noise("sd", -2.0, *OWN_NOISE))
def normal_with_unknown_standard_deviation_per_arm(arm):
    variance = dist.InverseGamma(2.0, 1.5).expand([A])
    sd = numpyro.sample("sd", dist.TransformedDistribution(variance, PowerTransform(0.5)))
    normal(numpyro.sample("mean", dist.Normal(0.3, 2.0 * sd))[arm], sd[arm])


@exact(REALS, unknown_noise("variance", -1.0, *OWN_NOISE))
def normal_with_a_standard_deviation_through_logarithms(arm):
    sd = jnp.exp(0.5 * jnp.log(latents("variance", dist.InverseGamma(2.0, 1.5), A)))
    normal(numpyro.sample("mean", dist.Normal(0.3, 2.0 * sd))[arm], sd[arm])


SHARED_NOISE = normal_inverse_gamma(np.zeros(A), 9.0 * np.eye(A), 2.0, 1.5, HOT, REALS)


@exact(REALS, unknown_noise("variance", -1.0, *SHARED_NOISE))
def normal_with_a_variance_shared_by_arms(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
    normal(per_arm("mean", dist.Normal(0.0, 3.0 * jnp.sqrt(variance)), A)[arm], jnp.sqrt(variance))


M, V, SHAPES, SCALES = for_each_arm(
    lambda rows: normal_inverse_gamma(np.zeros(2), LOADING, 2.0, 1.5, FEATURES[rows], REALS[rows])
)
BLOCKS = np.einsum("aij,ab->aibj", V, np.eye(A)).reshape(2 * A, 2 * A)


@exact(REALS, unknown_noise("variance", -1.0, M, BLOCKS, SHAPES, SCALES, "weight"), FEATURES)
def regression_with_unknown_variance_per_arm(arm, context):
    with numpyro.plate("arms", A):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
        covariance = variance[:, None, None] * LOADING
        weight = numpyro.sample("weight", dist.MultivariateNormal(jnp.zeros(2), covariance))
    normal(jnp.sum(weight[arm] * context, -1), jnp.sqrt(variance[arm]))


# Categories


GRADES = np.array([2, 0, 1, 1, 3, 0, 2])
GRADE_COUNTS = np.stack([by_arm(GRADES == k) for k in range(4)], axis=-1)


@exact(GRADES, {"probs": {"concentration": np.array([1.0, 2.0, 0.5, 1.0]) + GRADE_COUNTS}})
def categorical_by_probabilities(arm):
    reward(dist.Categorical(per_arm("probs", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5, 1.0])), A)[arm]))


@exact(GRADES, {"probs": {"concentration": 1.0 + GRADE_COUNTS}})
def categorical_by_logits_with_a_value_per_category(arm):
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones((A, 4))).to_event(1))
    reward(dist.Categorical(logits=jnp.log(probs)[arm]))
    numpyro.deterministic("expected_reward", probs[arm] @ jnp.array([0.0, 1.0, 5.0, 20.0]))


# 1 - p_0 is p_1 on the simplex of two.
OF_TWO = {"concentration": np.array([1.5, 2.0]) + np.stack([CLICKED, NOT_CLICKED], axis=-1)}


@exact(CLICKS, {"probs": OF_TWO}, is_slow=False)
def bernoulli_from_a_dirichlet_of_two(arm):
    bernoulli(latents("probs", dist.Dirichlet(jnp.array([1.5, 2.0])), A)[arm, 0])


KINDS = np.array([0, 2, 1, 1, 0, 2, 2])
CHOSEN, PASSED = (np.stack([by_arm(compare(KINDS, k)) for k in (0, 1)], axis=-1) for compare in (np.equal, np.greater))


@exact(KINDS, {"stick": beta(CHOSEN, PASSED, (1.0, 2.0))})
def stick_breaking_by_a_cumulative_product(arm):
    stick = numpyro.sample("stick", dist.Beta(1.0, 2.0).expand([A, 2]).to_event(1))
    one = jnp.ones((A, 1))
    left = jnp.concatenate([one, jnp.cumprod(1.0 - stick, axis=-1)], axis=-1)
    probs = jnp.concatenate([stick, one], axis=-1) * left
    numpyro.deterministic("expected_reward", stick[arm, 0])
    reward(dist.Categorical(probs[arm]))


FIRST = np.array([3, 0, 5, 2, 8, 1, 0])
SECOND = np.array([2, 7, 1, 0, 0, 3, 9])
THIRD = np.minimum(np.array([1, 0, 4, 5, 2, 2, 1]), 10 - FIRST - SECOND // 2)


def chain_of(*counts: np.ndarray) -> Callable:
    """Register counts of kinds among 10, where each outcome is a share of what the outcomes before it left."""
    kinds = enumerate([*counts, 10 - sum(counts)])
    alpha = np.stack([1.0 + k + by_arm(count) for k, count in kinds], axis=-1)
    rewards = {f"n{k + 1}": count for k, count in enumerate(counts)}
    return exact(rewards, {"p": {"concentration": alpha}}, outcomes=tuple(rewards))


@chain_of(FIRST, SECOND)
def a_dirichlet_through_a_chain_of_binomials(arm):
    p = per_arm("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])), A)[arm]
    numpyro.deterministic("expected_reward", p[:, 0])
    first = numpyro.sample("n1", dist.Binomial(10, p[:, 0]))
    numpyro.sample("n2", dist.Binomial(10 - first, p[:, 1] / (1.0 - p[:, 0])))


@chain_of(FIRST, SECOND // 2, THIRD)
def a_longer_chain_by_what_is_left(arm):
    p = latents("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0, 4.0])), A)
    numpyro.deterministic("expected_reward", p[arm, 1])
    left, rest = 10, 1.0
    for k in range(3):
        count = numpyro.sample(f"n{k + 1}", dist.Binomial(left, p[arm, k] / rest))
        left, rest = left - count, rest - p[arm, k]


@chain_of(FIRST, SECOND)
def a_chain_by_cumulative_sums(arm):
    p = latents("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])), A)
    tails = jnp.cumsum(p[:, ::-1], axis=-1)[:, ::-1]
    hazard = p / tails
    numpyro.deterministic("expected_reward", p[arm, 0])
    first = numpyro.sample("n1", dist.Binomial(10, hazard[arm, 0]))
    numpyro.sample("n2", dist.Binomial(10 - first, hazard[arm, 1]))


# Several outcomes, and what counts once or in part


SPEND = np.where(CLICKS == 1, AMOUNTS, 0.0)
HURDLE = {"rate": FLAT, "scale": gamma(3.0 + 2.0 * CLICKED, 2.0 + by_arm(SPEND), -1.0)}


@exact({"click": CLICKS, "spend": SPEND}, HURDLE, outcomes=("click", "spend"))
def hurdle_of_conversion_and_amount(arm):
    with numpyro.plate("arms", A):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        scale = numpyro.sample("scale", dist.InverseGamma(3.0, 2.0))
    click = numpyro.sample("click", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Gamma(2.0, 1.0 / scale[arm]).mask(click == 1))
    numpyro.deterministic("expected_reward", rate[arm] * 2.0 * scale[arm])


COUNTS_AND_WAITS = {"rate": gamma(2.0 + by_arm(COUNTS + 1), 1.5 + by_arm(1.0 + AMOUNTS), 1.0)}


@exact({"count": COUNTS, "wait": AMOUNTS}, COUNTS_AND_WAITS, outcomes=("count", "wait"))
def counts_and_waits_with_the_same_rate(arm):
    rate = latents("rate", dist.Gamma(2.0, 1.5), A)
    numpyro.sample("count", dist.Poisson(rate[arm]))
    numpyro.sample("wait", dist.Exponential(rate[arm]))
    numpyro.deterministic("expected_reward", rate[arm])


EFFECT = gaussian(np.zeros(2), np.eye(2), np.column_stack([np.ones(7), CLICKS]), REALS, 0.5)


@exact({"click": CLICKS, "value": REALS}, {"rate": FLAT, **sites_of(EFFECT, effect=2)}, outcomes=("click", "value"))
def an_outcome_that_regresses_on_an_earlier_one(arm):
    rate, effect = latents("rate", dist.Beta(1.0, 1.0), A), reals("effect")
    click = numpyro.sample("click", dist.Bernoulli(rate[arm]))
    numpyro.sample("value", dist.Normal(effect[0] + effect[1] * click, 0.5))
    numpyro.deterministic("expected_reward", effect[0] + effect[1] * rate[arm])


BELIEF = {
    "rate": beta(CLICKED + np.array([3, 0, 0]), NOT_CLICKED + np.array([0, 0, 1])),
    "mean": {"mean": 1.0, "covariance": np.full((1, 1), 0.5)},
}


@exact(CLICKS, BELIEF)
def a_factor_in_the_prior_counts_once(arm):
    rate = latents("rate", dist.Beta(1.0, 1.0), A)
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.factor("belief", 3.0 * jnp.log(rate[0]) + jnp.log1p(-rate[2]) - 0.5 * (mean - 2.0) ** 2.0)
    bernoulli(rate[arm])


PILOT = np.array([1.0, 0, 0])


@exact(COUNTS, {"rate": gamma(2.0 + by_arm(COUNTS) + 10 * PILOT, 1.5 + by_arm(1.0) + 2 * PILOT, 1.0)})
def a_pilot_study_inside_the_program_counts_once(arm):
    rate = latents("rate", dist.Gamma(2.0, 1.5), A)
    with numpyro.plate("pilot rows", 2):
        numpyro.sample("pilot", dist.Poisson(rate[0]), obs=jnp.array([4, 6]))
    poisson(rate[arm])


@exact(CLICKS, {"rate": beta(0.5 * CLICKED, 0.5 * NOT_CLICKED)})
def discounted_outcomes(arm):
    rate = latents("rate", dist.Beta(1.0, 1.0), A)
    with handlers.scale(scale=0.5):
        bernoulli(rate[arm])


@exact(COUNTS, {"rate": gamma(2.0 + by_arm(COUNTS * FAR), 1.5 + by_arm(FAR), 1.0)}, EXPOSURE)
def outcomes_masked_by_context(arm, context):
    rate = latents("rate", dist.Gamma(2.0, 1.5), A)
    with handlers.mask(mask=context > 1.0):
        poisson(rate[arm])


class Zipf(dist.Distribution):
    """P(k) proportional to exp(-s k) on 0, 1, ...: a distribution that no library knows."""

    support = dist.constraints.nonnegative_integer
    pytree_data_fields = ("odds",)

    def __init__(self, odds):
        self.odds = odds
        super().__init__(jnp.shape(odds), ())

    def sample(self, key, sample_shape=()):
        return dist.Geometric(self.odds).sample(key, sample_shape)

    @property
    def mean(self):
        return (1.0 - self.odds) / self.odds

    def log_prob(self, value):
        return value * jnp.log(1.0 - self.odds) + jnp.log(self.odds)


# One latent: its name is z


def one_latent(name: str, rewards: np.ndarray, posterior: dict[str, Any]) -> Callable:
    """Register a program by the prior of its latent and the law of the reward."""
    register = exact(rewards, {"z": posterior})
    return lambda prior, law: register(of_one_latent("z", prior, law), name)


one_latent("bernoulli by logits", CLICKS, FLAT)(
    dist.Beta(1.0, 1.0).expand([A]).to_event(1), lambda z, arm: dist.Bernoulli(logits=(jnp.log(z) - jnp.log1p(-z))[arm])
)
one_latent("bernoulli by one-hot product", CLICKS, beta(CLICKED, NOT_CLICKED, (1.0, 2.0)))(
    dist.Beta(jnp.ones(A), 2.0), lambda z, arm: dist.Bernoulli(jax.nn.one_hot(arm, A) @ z)
)
one_latent("bernoulli of the complement under a uniform prior", CLICKS, beta(NOT_CLICKED, CLICKED))(
    dist.Uniform(0.0, 1.0).expand([A]), lambda z, arm: dist.Bernoulli(1.0 - z[arm])
)
one_latent("bernoulli of twice a uniform on the lower half", CLICKS, FLAT)(
    dist.Uniform(0.0, 0.5).expand([A]), lambda z, arm: dist.Bernoulli(2.0 * z[arm])
)
one_latent("bernoulli of a uniform between 2 and 4", CLICKS, FLAT)(
    dist.Uniform(2.0, 4.0).expand([A]), lambda z, arm: dist.Bernoulli((z[arm] - 2.0) / 2.0)
)
one_latent("bernoulli with a clip that never bites", CLICKS, FLAT)(
    dist.Beta(1.0, 1.0, validate_args=True).expand([A]), lambda z, arm: dist.Bernoulli(jnp.clip(z, 0.0, 1.0)[arm])
)
one_latent("geometric number of failures", COUNTS, beta(by_arm(1.0), by_arm(COUNTS), (2.0, 2.0)))(
    dist.Beta(2.0, 2.0).expand([A]), lambda z, arm: dist.Geometric(z[arm])
)
# NumPyro counts successes until the third failure: p^k (1 - p)^3.
one_latent("negative binomial with a known count", COUNTS, beta(by_arm(COUNTS), by_arm(3.0), (2.0, 2.0)))(
    dist.Beta(2.0, 2.0).expand([A]), lambda z, arm: dist.NegativeBinomialProbs(3.0, z[arm])
)
# z^3 is Exponential with mean 2^3.
one_latent("poisson of a power of a weibull", COUNTS, gamma(1.0 + by_arm(COUNTS), 1.0 / 8.0 + by_arm(1.0), 3.0))(
    dist.Weibull(2.0, 3.0).expand([A]), lambda z, arm: dist.Poisson(z[arm] ** 3)
)
one_latent("exponential waiting time", AMOUNTS, gamma(2.0 + by_arm(1.0), 1.5 + by_arm(AMOUNTS), 1.0))(
    dist.Gamma(2.0, 1.5).expand([A]), lambda z, arm: dist.Exponential(z[arm])
)
one_latent("exponential by its mean", AMOUNTS, gamma(3.0 + by_arm(1.0), 2.0 + by_arm(AMOUNTS), -1.0))(
    dist.InverseGamma(3.0, 2.0).expand([A]), lambda z, arm: dist.Exponential(1.0 / z[arm])
)
one_latent("gamma with a known shape", AMOUNTS, gamma(1.5 + 2.5 * by_arm(1.0), 0.5 + by_arm(AMOUNTS), 1.0))(
    dist.Chi2(3.0).expand([A]), lambda z, arm: dist.Gamma(2.5, z[arm])
)
one_latent("weibull with a known shape", AMOUNTS, gamma(2.0 + by_arm(1.0), 1.5 + by_arm(AMOUNTS**1.5), 1.0))(
    dist.Gamma(2.0, 1.5).expand([A]), lambda z, arm: dist.Weibull(z[arm] ** (-1 / 1.5), 1.5)
)
one_latent("laplace with a latent scale", REALS, gamma(3.0 + by_arm(1.0), 2.0 + by_arm(np.abs(REALS - 0.5)), -1.0))(
    dist.InverseGamma(3.0, 2.0).expand([A]), lambda z, arm: dist.Laplace(0.5, z[arm])
)
one_latent("inverse gamma outcome", AMOUNTS, gamma(2.0 + 3.0 * by_arm(1.0), 1.0 + by_arm(1.0 / AMOUNTS), 1.0))(
    dist.Gamma(2.0, 1.0).expand([A]), lambda z, arm: dist.InverseGamma(3.0, z[arm])
)
# z^2 is Gamma(1/2, 1 / (2 * 2^2)).
one_latent("half-normal root precision", REALS, gamma(0.5 + by_arm(0.5), 0.125 + by_arm((REALS - 0.5) ** 2) / 2, 2.0))(
    dist.HalfNormal(2.0).expand([A]), lambda z, arm: dist.Normal(0.5, 1.0 / z[arm])
)
one_latent(
    "rayleigh with its scale a root of an inverse gamma",
    AMOUNTS,
    gamma(3.0 + by_arm(1.0), 2.0 + by_arm(AMOUNTS**2) / 2, -2.0),
)(
    dist.TransformedDistribution(dist.InverseGamma(3.0, 2.0).expand([A]), PowerTransform(0.5)),
    lambda z, arm: dist.Weibull(z[arm] * jnp.sqrt(2.0), 2.0),
)
one_latent(
    "normal with known mean and unknown variance",
    REALS,
    gamma(2.0 + by_arm(0.5), 1.5 + by_arm((REALS - 0.5) ** 2) / 2, -1.0),
)(dist.InverseGamma(2.0, 1.5).expand([A]), lambda z, arm: dist.Normal(0.5, jnp.sqrt(z[arm])))
one_latent("a distribution of the user's own", COUNTS, beta(by_arm(1.0), by_arm(COUNTS), (2.0, 1.0)))(
    dist.Beta(2.0, 1.0).expand([A]), lambda z, arm: Zipf(z[arm])
)
one_latent(
    "half-normal outcome with a latent scale", AMOUNTS, gamma(2.0 + by_arm(0.5), 1.0 + by_arm(AMOUNTS**2) / 2, 1.0)
)(dist.Gamma(2.0, 1.0).expand([A]), lambda z, arm: dist.HalfNormal(jax.lax.rsqrt(z[arm])))
# Draws above a bound
one_latent("exponential waiting time beyond a bound", AMOUNTS, gamma(2.0 + by_arm(1.0), 1.5 + by_arm(AMOUNTS), 1.0))(
    dist.TransformedDistribution(
        dist.Gamma(2.0, 1.5).expand([A]), AffineTransform(1.0, 1.0, domain=dist.constraints.positive)
    ),
    lambda z, arm: dist.Exponential(z[arm] - 1.0),
)


# Programs that are only proved: rewards in any unit, with natural scales of latents from 1e-6 to 1e8. A variance of 1e-16 is
# refused: its density cannot be told from rounding.


def of_unknown_variance(unit: float, arm: Any) -> None:
    with numpyro.plate("arms", 2):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, unit**2))
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0 * jnp.sqrt(variance)))
    normal(mean[arm], jnp.sqrt(variance[arm]))


def of_unknown_precision(unit: float, arm: Any) -> None:
    with numpyro.plate("arms", 2):
        precision = numpyro.sample("precision", dist.Gamma(2.0, unit**2))
        mean = numpyro.sample("mean", dist.Normal(3.0 * unit, 1.0 / jnp.sqrt(precision)))
    normal(mean[arm], 1.0 / jnp.sqrt(precision[arm]))


def of_waiting_times(unit: float, arm: Any) -> None:
    reward(dist.Exponential(1.0 / per_arm("mean", dist.InverseGamma(3.0, unit))[arm]))


def of_counts_with_exposure(unit: float, arm: Any) -> None:
    poisson(5.0 * unit * per_arm("rate", dist.Gamma(2.0, unit))[arm])


for of_unit in (of_unknown_variance, of_unknown_precision, of_waiting_times, of_counts_with_exposure):
    for unit in (1e-6, 1e8):
        is_slow = (of_unit, unit) != (of_unknown_variance, 1e-6)
        exact(None, None, num_arms=2, is_slow=is_slow)(
            functools.partial(of_unit, unit), f"{of_unit.__name__} in the unit {unit:g}"
        )


def noise_of_two(arm: Any) -> tuple[Any, Any]:
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    mean = latents("mean", dist.Normal(0.0, 2.0 * jnp.sqrt(variance)))
    return mean[arm], jnp.sqrt(variance)


# What the remedy of a refusal says is conjugate to an outcome
REMEDIES = {
    "Bernoulli": lambda arm: dist.Bernoulli(rates()[arm]),
    "Binomial": lambda arm: dist.Binomial(3, rates()[arm]),
    "Geometric": lambda arm: dist.Geometric(rates()[arm]),
    "Categorical": lambda arm: dist.Categorical(latents("p", dist.Dirichlet(jnp.ones(3)))[arm]),
    "Poisson": lambda arm: dist.Poisson(2.5 * gammas()[arm]),
    "Exponential": lambda arm: dist.Exponential(gammas()[arm]),
    "Gamma": lambda arm: dist.Gamma(2.0, gammas()[arm]),
    "Weibull": lambda arm: dist.Weibull(gammas()[arm] ** (-1 / 1.5), 1.5),
    "Normal": lambda arm: dist.Normal(*noise_of_two(arm)),
    "LogNormal": lambda arm: dist.LogNormal(*noise_of_two(arm)),
}


def of_remedy(law: Callable, arm: Any) -> None:
    reward(law(arm))
    numpyro.deterministic("expected_reward", jnp.zeros(arm.shape))


for name, law in REMEDIES.items():
    exact(None, None, num_arms=2)(functools.partial(of_remedy, law), f"the remedy for {name}")


# Refused: programs of two arms


def logits_of_three() -> Any:
    return numpyro.sample("logits", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))


def below(prior: Any, step: float) -> Any:
    """Return means around a parent."""
    return latents("mean", dist.Normal(numpyro.sample("parent", prior), step))


# Links that bend


@near_miss("real latents reach the logits", is_slow=True, context=np.array([1.0, -0.5]))
def logistic_regression(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    logistic((weight[arm] * context).sum(-1))


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
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones((2, 3))).to_event(1))[arm]
    merged = jnp.stack([probs[:, 0] + probs[:, 1], probs[:, 2]], axis=-1)
    reward(dist.Categorical(merged))


@near_miss("scale", is_slow=True)
def likelihood_weighted_by_a_latent(arm):
    weight, rate = numpyro.sample("weight", dist.Gamma(2.0, 1.0)), gammas()[arm]
    with handlers.scale(scale=weight):
        poisson(rate)


# Priors of another family


@near_miss("handlers.mask", error=InvalidProgram)
def masked_prior(arm):
    with handlers.mask(mask=False):
        mean = reals()
    normal(mean[arm])


@near_miss("observed value")
def observation_that_follows_a_latent(arm):
    rate = rates()
    numpyro.sample("pilot", dist.Poisson(3.0), obs=jnp.where(rate[0] > 0.999, 5.0, 0.0))
    bernoulli(rate[arm])


# Conjugate one by one, not jointly


@near_miss("prior|couples")
def hierarchy_with_a_latent_spread(arm):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.InverseGamma(2.0, 1.0))
    mean = numpyro.sample("mean", dist.Normal(level, jnp.sqrt(spread)).expand([2]))
    normal(mean[arm])


# Bumps between the points of a certificate


def bump(x):
    """Return a hill of 20 nats about 2.5 that is below the last digit at a distance of 0.5."""
    return 20.0 / (1.0 + ((x - 2.5) / 0.05) ** 14)


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
    normal(numpyro.sample("mean", dist.Normal(parent, 1e-7).expand([2]))[arm])


@near_miss("sum to 1", error=InvalidProgram)
def probabilities_that_do_not_sum_to_one(arm):
    weight = numpyro.sample("weight", dist.Gamma(2.0, 1.0).expand([2, 3]).to_event(2))
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
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros((2, 2)), 1.0).to_event(2))
    logistic(jnp.sum(weights[arm] * context, axis=-1))


@near_miss("an exponential", context=np.array([1.0, 0.0]), is_slow=True)
def an_exponential_that_the_example_multiplies_by_zero(arm, context):
    normal(reals("a")[arm] * context[:, 0] + jnp.exp(reals("b")[arm]) * context[:, 1])


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
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])).expand([2]))[arm]
    numpyro.deterministic("expected_reward", p[:, 0])
    first = numpyro.sample("n1", dist.Binomial(10, p[:, 0]))
    left = 10 - first if is_second_kept else 10
    numpyro.sample("n2", dist.Binomial(left, share(p)))


# Programs of one line: those of the default run, and the others


def of_variance(scale: Callable, choose: Callable) -> Callable:
    """Return means whose prior has a scale of the variance, and rewards with some entry of the variance."""

    def program(arm: Any) -> None:
        variance = latents("variance", dist.InverseGamma(2.0, 1.0))
        mean = numpyro.sample("mean", dist.Normal(0.0, scale(variance)))
        normal(mean[arm], jnp.sqrt(choose(variance, arm)))

    return program


RARE = dist.MixtureSameFamily(
    dist.Categorical(jnp.array([0.999999, 0.000001])), dist.Normal(jnp.array([0.0, 50.0]), 1.0)
)
ONE_LINE = {
    # Bumps between the points of a certificate
    "a bump in the prior": ("division", with_term(reals, lambda mean, _: bump(mean), normal)),
    "a bump of a positive latent": (
        "division",
        with_term(gammas, lambda rate, _: 12.0 / (1.0 + ((rate - 3.7) / 0.002) ** 12), poisson),
    ),
    # Links that bend
    "a bump too narrow to meet": (
        "flattens",
        lambda arm: bernoulli((rate := rates()[arm]) - 0.5 * rate * (1.0 - rate) * jnp.exp(-1e8 * (rate - 0.3) ** 2)),
    ),
    # Kinks, branches and roundings
    "gradient stopped": ("not affine", lambda arm: bernoulli(jax.lax.stop_gradient(rates())[arm])),
    # Priors of another family
    "half normal prior on a rate": ("not affine", lambda arm: poisson(latents("rate", dist.HalfNormal(1.0))[arm])),
    "log normal prior on a rate": (
        "not Gamma in any power",
        lambda arm: poisson(latents("rate", dist.LogNormal(0.0, 1.0))[arm]),
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
    # Bumps between the points of a certificate
    "a polynomial bump": (
        "not proved to be a polynomial",
        with_term(reals, lambda mean, _: 1e-12 * (1.0 - (mean / 80.0) ** 2) ** 7, normal),
    ),
    "a bump of a positive latent by squares": (
        "division",
        with_term(gammas, lambda z, _: 12.0 / (1.0 + jnp.square(jnp.square(jnp.square((z - 3.7) / 0.0005)))), poisson),
    ),
    # Conjugate one by one, not jointly
    "mean scaled by the variance": ("prior precision|couples", of_variance(lambda v: v, lambda v, arm: v[arm])),
    "variance of the next arm": ("couples", of_variance(jnp.sqrt, lambda v, arm: v[(arm + 1) % 2])),
    "variances in reverse order": ("couples", of_variance(jnp.sqrt, lambda v, arm: v[::-1][arm])),
    "hierarchy of gammas": (
        "prior|couples",
        lambda arm: poisson(latents("rate", dist.Gamma(2.0, numpyro.sample("hyper", dist.Gamma(2.0, 1.0))))[arm]),
    ),
    # Likelihoods and priors of another family
    "mixture prior": ("not affine|prove", lambda arm: normal(numpyro.sample("mean", RARE) + 0.0 * arm)),
    "factor that switches": (
        "comparison|where|observed",
        with_term(rates, lambda rate, _: jnp.where(rate > 0.999, -3.0, 0.0), bernoulli),
    ),
    # Links that bend
    "squared link": ("not affine", lambda arm: bernoulli(rates()[arm] ** 2)),
    "square root link": ("not affine", lambda arm: bernoulli(jnp.sqrt(rates())[arm])),
    "link with a power close to one": ("not affine", lambda arm: bernoulli(rates()[arm] ** 1.0001)),
    "a tiny perturbation": ("`sin`", lambda arm: normal((mean := reals()[arm]) * (1.0 + 1e-7 * jnp.sin(mean)))),
    "logits that are gaussian": ("real latents reach the logits", lambda arm: logistic(reals()[arm])),
    "multinomial logits": (
        "real latents reach the logits",
        lambda arm: reward(dist.Categorical(logits=logits_of_three()[arm])),
    ),
    "softmax of gaussians": ("largest", lambda arm: reward(dist.Categorical(jax.nn.softmax(logits_of_three())[arm]))),
    "probit link": ("abs", lambda arm: bernoulli(jax.scipy.special.ndtr(reals())[arm])),
    "exponential link": ("flattens|inside", lambda arm: poisson(jnp.exp(reals()[arm]))),
    "odds that are gamma": ("division", lambda arm: bernoulli((odds := gammas()[arm]) / (1.0 + odds))),
    "noisy channel": ("not affine", lambda arm: bernoulli(0.9 * rates()[arm] + 0.05)),
    "product of gaussians": ("not affine|couples", lambda arm: normal(reals("first")[arm] * reals("second")[arm])),
    "a gate made of a high power": (
        "division",
        lambda arm: poisson((rate := gammas()[arm]) * (1.0 + 1.0 / (1.0 + (rate / 50.0) ** 100))),
    ),
    "saturation far out": (
        "flattens",
        lambda arm: normal((mean := reals()[arm]) + mean * jax.nn.sigmoid(50.0 * (mean - 8.0))),
    ),
    # Kinks, branches and roundings
    "rounded rate": ("rounding", lambda arm: bernoulli(0.05 + 0.9 * jnp.round(rates()[arm], 3))),
    "floored rate": ("rounding", lambda arm: poisson(1.0 + jnp.floor(gammas()[arm]))),
    "rate cast to an integer": ("conversion.*int", lambda arm: poisson(1.0 + gammas()[arm].astype(int))),
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
    "arm chosen by argmax": ("argmax", lambda arm: normal((mean := reals())[(arm + jnp.argmax(mean)) % 2])),
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
    "beta prior on a poisson rate": ("not affine", lambda arm: poisson(rates()[arm])),
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
    "cauchy in large units": ("logarithm", lambda arm: normal(below(dist.Cauchy(0.0, 1e6), 1.0)[arm], 1e6)),
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
        near_miss(reason, is_slow=is_slow)(program, name)

# Linear predictors whose example context multiplies by zero
BENT = near_miss("sigmoid|not affine|prove", context=np.array(0), is_slow=True)
BENT(lambda arm, context: logistic(reals("slope")[arm] * context), "a logistic slope at an integer zero")
BENT = near_miss("sigmoid|not affine|prove", context=np.array(False), is_slow=True)
BENT(lambda arm, context: logistic(reals("shift")[arm] * context), "a logistic shift at an example of false")
CHAIN = near_miss("not affine", outcomes=("n1", "n2"), is_slow=True)
CHAIN(lambda arm: chain(arm, lambda p: p[:, 1]), "a chain that forgets what is gone")
CHAIN(
    lambda arm: chain(arm, lambda p: p[:, 1] / (1.0 - p[:, 0]), is_second_kept=False), "a chain that counts all again"
)
CHAIN = near_miss("not proved to be a sum of powers", outcomes=("n1", "n2"), is_slow=True)
CHAIN(lambda arm: chain(arm, lambda p: p[:, 1] / (1.0 - p[:, 2]) + p[:, 0] * p[:, 2]), "a chain by the wrong share")
