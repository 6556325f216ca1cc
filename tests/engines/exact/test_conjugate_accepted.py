"""Conjugate programs in varied spellings: each is accepted, and its posterior is the one that a textbook gives.

Every case states its posterior by a closed form of its own, in NumPy. Batch and sequential updates must both agree with it.
Tolerance: a relative 1e-9 leaves seven digits above float64's rounding for a handful of rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions.transforms import PowerTransform
from numpyro.infer.reparam import LocScaleReparam

from ppl_bandit.engines import conjugate
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction

A = 3
ARM = np.array([0, 2, 1, 1, 0, 2, 0])
CLICKS = np.array([1, 0, 1, 1, 0, 0, 1])
COUNTS = np.array([3, 0, 1, 4, 2, 7, 0])
AMOUNTS = np.array([0.8, 2.1, 0.3, 1.4, 3.9, 0.6, 1.1])
REALS = np.array([1.3, -0.4, 0.2, 2.2, -1.7, 0.9, 0.6])
EXPOSURE = np.array([1.0, 0.5, 2.0, 0.7, 1.2, 3.0, 0.9])
FEATURES = np.random.default_rng(0).normal(size=(7, 2))


class Case(NamedTuple):
    """A program, seven rows of data, and the posterior that they must lead to."""

    program: Callable
    reward: Any
    expected: dict[str, dict[str, Any]]
    context: Any = None
    outcomes: tuple[str, ...] = ("reward",)
    arm: np.ndarray = ARM
    num_arms: int = A


CASES: list[Any] = []


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a case of the default run: one for every family and structure of latents; other spellings are slow."""
    CASES.append(pytest.param(make, id=make.__name__))
    return make


def slow_case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES.append(pytest.param(make, id=make.__name__, marks=pytest.mark.slow))
    return make


@pytest.mark.parametrize("make", CASES)
def test_a_conjugate_program_is_accepted_and_its_posterior_is_the_textbook_one(make):
    given = make()
    example = None if given.context is None else jax.tree.map(lambda leaf: leaf[0], given.context)
    engine = conjugate(RewardModel(given.program, given.num_arms, example, given.outcomes))
    assert engine.explanation.is_exact
    with jax.enable_x64(True):
        rows = Interaction(*jax.tree.map(jnp.asarray, (given.arm, given.reward, given.context)))
        update = quick_jit(engine.update)
        together, info = update(jr.key(0), engine.init(jr.key(0)), rows._replace(mask=jnp.ones(7, bool)))
        in_turn, infos = engine.init(jr.key(0)), []
        for row in range(7):  # one row at a time, the others masked: the same shape compiles once
            in_turn, each = update(jr.key(0), in_turn, rows._replace(mask=jnp.arange(7) == row))
            infos.append(each)
    assert all(each.is_trusted for each in [info, *infos])
    for state in (together, in_turn):
        found = engine.capabilities.parameters(state)
        assert set(found) == set(given.expected)
        for site, parameters in given.expected.items():
            for name, value in parameters.items():
                np.testing.assert_allclose(found[site][name], value, rtol=1e-9, atol=1e-12, err_msg=f"{site} {name}")


def per_arm(weights: Any, arm: np.ndarray = ARM, num_arms: int = A) -> np.ndarray:
    """Sum over the rows of each arm."""
    return np.bincount(arm, np.broadcast_to(weights, arm.shape), num_arms)


def beta(successes: Any, failures: Any, prior: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    return {"concentration1": prior[0] + successes, "concentration0": prior[1] + failures}


def gamma(concentration: Any, rate: Any, power: float) -> dict[str, Any]:
    return {"concentration": concentration, "rate": rate, "power": np.full(np.shape(rate), power)}


def gaussian(
    mean: Any, covariance: Any, design: np.ndarray, y: np.ndarray, noise: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior of a linear regression with known noise, in information form."""
    weight = 1.0 / np.broadcast_to(noise, y.shape) ** 2
    prior = np.linalg.inv(covariance)
    posterior = np.linalg.inv(prior + (design.T * weight) @ design)
    return posterior @ (prior @ mean + design.T @ (weight * y)), posterior


def normal_inverse_gamma(mean: Any, unit_covariance: Any, shape: float, rate: float, design: np.ndarray, y: np.ndarray):
    """Return mean, covariance / variance, shape and rate of a regression with unknown noise."""
    prior = np.linalg.inv(unit_covariance)
    precision = prior + design.T @ design
    spread = np.linalg.inv(precision)
    m = spread @ (prior @ mean + design.T @ y)
    return m, spread, shape + y.size / 2, rate + 0.5 * (y @ y + mean @ prior @ mean - m @ precision @ m)


def one_hot(index: np.ndarray, size: int) -> np.ndarray:
    return np.eye(size)[index]


def by_arm(make: Callable, arm: np.ndarray = ARM) -> tuple[np.ndarray, ...]:
    """Stack the results of a closed form that is applied to each arm's rows."""
    return tuple(np.array(parts) for parts in zip(*(make(arm == a) for a in range(A)), strict=True))


CLICKED, NOT_CLICKED = per_arm(CLICKS), per_arm(1 - CLICKS)


@slow_case  # tests/live/test_bandit.py has it
def bernoulli_in_a_plate():
    def program(arm):
        with numpyro.plate("arms", A):
            rate = numpyro.sample("rate", dist.Beta(1.5, 2.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return Case(program, CLICKS, {"rate": beta(CLICKED, NOT_CLICKED, (1.5, 2.0))})


@slow_case
def bernoulli_by_where_over_separate_sites():
    def program(arm):
        rates = [numpyro.sample(f"rate_{a}", dist.Beta(1.0 + a, 1.0)) for a in range(A)]
        chosen = jnp.where(arm == 0, rates[0], jnp.where(arm == 1, rates[1], rates[2]))
        numpyro.sample("reward", dist.Bernoulli(chosen))

    return Case(program, CLICKS, {f"rate_{a}": beta(CLICKED[a], NOT_CLICKED[a], (1.0 + a, 1.0)) for a in range(A)})


@slow_case
def bernoulli_by_a_python_loop_over_arms():
    def program(arm):
        chosen = 0.0
        for a in range(A):
            chosen = chosen + (arm == a) * numpyro.sample(f"rate_{a}", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(chosen))

    return Case(program, CLICKS, {f"rate_{a}": beta(CLICKED[a], NOT_CLICKED[a]) for a in range(A)})


@slow_case
def bernoulli_by_stacked_sites():
    def program(arm):
        rates = jnp.stack([numpyro.sample(f"rate_{a}", dist.Beta(1.0, 1.0)) for a in range(A)])
        numpyro.sample("reward", dist.Bernoulli(jnp.take(rates, arm)))

    return Case(program, CLICKS, {f"rate_{a}": beta(CLICKED[a], NOT_CLICKED[a]) for a in range(A)})


@slow_case
def bernoulli_with_the_second_arm_known():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(jnp.where(arm == 1, 0.5, rate)))

    unknown = ARM != 1
    return Case(program, CLICKS, {"rate": beta(CLICKS[unknown].sum(), (1 - CLICKS)[unknown].sum())})


@slow_case
def binomial_with_trials_from_the_context():
    trials = np.array([10, 3, 5, 4, 2, 9, 8])

    def program(arm, context):
        with numpyro.plate("arms", A):
            rate = numpyro.sample("rate", dist.Beta(2.0, 1.0))
        numpyro.sample("reward", dist.Binomial(context, rate[arm]))

    expected = {"rate": beta(per_arm(COUNTS), per_arm(trials - COUNTS), (2.0, 1.0))}
    return Case(program, COUNTS, expected, trials)


@case
def poisson_with_exposure():
    def program(arm, context):
        with numpyro.plate("arms", A):
            rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5))
        numpyro.sample("reward", dist.Poisson(context["exposure"] * rate[arm]))

    expected = {"rate": gamma(2.0 + per_arm(COUNTS), 1.5 + per_arm(EXPOSURE), 1.0)}
    return Case(program, COUNTS, expected, {"exposure": EXPOSURE})


@slow_case
def poisson_under_an_exponential_prior_shared_by_arms():
    def program(arm):
        rate = numpyro.sample("rate", dist.Exponential(0.5))
        numpyro.sample("reward", dist.Poisson(rate * jnp.array([1.0, 2.0, 3.0])[arm]))

    return Case(program, COUNTS, {"rate": gamma(1.0 + COUNTS.sum(), 0.5 + (1.0 + ARM).sum(), 1.0)})


@slow_case
def pareto_with_a_latent_tail():
    def program(arm):
        tail = numpyro.sample("tail", dist.Gamma(2.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.Pareto(0.25, tail[arm]))
        numpyro.deterministic(
            "expected_reward", 0.25 * 2.0 ** (1.0 / tail[arm])
        )  # the median: the mean may be infinite

    return Case(program, AMOUNTS, {"tail": gamma(2.0 + per_arm(1.0), 1.0 + per_arm(np.log(AMOUNTS / 0.25)), 1.0)})


@slow_case
def normal_with_known_noise():
    def program(arm):
        with numpyro.plate("arms", A):
            mean = numpyro.sample("mean", dist.Normal(0.5, 2.0, validate_args=True))
        numpyro.sample("reward", dist.Normal(mean[arm], 0.7))

    m, v = gaussian(np.full(A, 0.5), 4.0 * np.eye(A), one_hot(ARM, A), REALS, 0.7)
    return Case(program, REALS, {"mean": {"mean": m, "covariance": v}})


@slow_case
def normal_with_a_shared_level_and_an_offset_per_arm():
    def program(arm):
        level = numpyro.sample("level", dist.Normal(1.0, 2.0))
        with numpyro.plate("arms", A):
            offset = numpyro.sample("offset", dist.Normal(0.0, 0.5))
        numpyro.sample("reward", dist.Normal(level + offset[arm], jnp.array([0.7, 1.0, 1.5])[arm]))

    design = np.column_stack([np.ones(7), one_hot(ARM, A)])
    noise = np.array([0.7, 1.0, 1.5])[ARM]
    m, v = gaussian(np.array([1.0, 0, 0, 0]), np.diag([4.0, 0.25, 0.25, 0.25]), design, REALS, noise)
    expected = {
        "level": {"mean": m[0], "covariance": v[:1, :1]},
        "offset": {"mean": m[1:], "covariance": v[1:, 1:]},
    }
    return Case(program, REALS, expected)


def hierarchical(arm):
    level = numpyro.sample("level", dist.Normal(1.0, 2.0))
    with numpyro.plate("arms", A):
        mean = numpyro.sample("mean", dist.Normal(level, 0.5))
    numpyro.sample("reward", dist.Normal(mean[arm], 0.7))


def hierarchical_posterior() -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior of (level, means): each mean is the level plus an independent deviation."""
    build = np.column_stack([np.ones(A + 1), np.vstack([np.zeros(A), np.eye(A)])])
    covariance = build @ np.diag([4.0, *[0.25] * A]) @ build.T
    design = np.column_stack([np.zeros(7), one_hot(ARM, A)])
    return gaussian(np.ones(A + 1), covariance, design, REALS, 0.7)


@case
def hierarchical_normal_centred():
    m, v = hierarchical_posterior()
    expected = {"level": {"mean": m[0], "covariance": v[:1, :1]}, "mean": {"mean": m[1:], "covariance": v[1:, 1:]}}
    return Case(hierarchical, REALS, expected)


@slow_case
def hierarchical_normal_non_centred():
    m, v = hierarchical_posterior()
    # The standardised deviations are (mean - level) / 0.5, a linear image of the centred posterior.
    standardise = np.column_stack([-np.ones(A), np.eye(A)]) / 0.5
    expected = {
        "level": {"mean": m[0], "covariance": v[:1, :1]},
        "mean_decentered": {"mean": standardise @ m, "covariance": standardise @ v @ standardise.T},
    }
    return Case(handlers.reparam(hierarchical, config={"mean": LocScaleReparam(0.0)}), REALS, expected)


@slow_case
def gaussian_random_walk_over_arms():
    def program(arm):
        level = numpyro.sample("level", dist.GaussianRandomWalk(0.5, num_steps=A))
        numpyro.sample("reward", dist.Normal(level[arm], 0.7))

    covariance = 0.25 * np.minimum.outer(np.arange(1, A + 1), np.arange(1, A + 1))
    m, v = gaussian(np.zeros(A), covariance, one_hot(ARM, A), REALS, 0.7)
    return Case(program, REALS, {"level": {"mean": m, "covariance": v}})


PER_ARM_FEATURES = (one_hot(ARM, A)[:, :, None] * FEATURES[:, None, :]).reshape(7, 2 * A)
LOADING = np.array([[1.0, 0.3], [0.3, 0.5]])


@case
def regression_by_sum():
    def program(arm, context):
        with numpyro.plate("arms", A):
            weight = numpyro.sample("weight", dist.Normal(0.2, 1.5).expand([2]).to_event(1))
        numpyro.sample("reward", dist.Normal((weight[arm] * context).sum(-1), 0.8))

    m, v = gaussian(np.full(2 * A, 0.2), 2.25 * np.eye(2 * A), PER_ARM_FEATURES, REALS, 0.8)
    return Case(program, REALS, {"weight": {"mean": m.reshape(A, 2), "covariance": v}}, FEATURES)


@slow_case
def regression_by_einsum_with_a_matrix_normal_prior():
    def program(arm, context):
        prior = dist.MatrixNormal(jnp.zeros((A, 2)), jnp.eye(A), jnp.linalg.cholesky(jnp.asarray(LOADING)))
        weight = numpyro.sample("weight", prior)
        numpyro.sample("reward", dist.Normal(jnp.einsum("nd,nd->n", weight[arm], context), 0.8))

    m, v = gaussian(np.zeros(2 * A), np.kron(np.eye(A), LOADING), PER_ARM_FEATURES, REALS, 0.8)
    return Case(program, REALS, {"weight": {"mean": m.reshape(A, 2), "covariance": v}}, FEATURES)


def regression_case(**spread: Any) -> Case:
    def program(arm, context):
        weight = numpyro.sample("weight", dist.MultivariateNormal(jnp.array([0.5, -0.2]), **spread))
        numpyro.sample("reward", dist.Normal(jnp.dot(context, weight), 0.8))

    m, v = gaussian(np.array([0.5, -0.2]), LOADING, FEATURES, REALS, 0.8)
    return Case(program, REALS, {"weight": {"mean": m, "covariance": v}}, FEATURES)


@slow_case
def regression_with_a_prior_covariance():
    return regression_case(covariance_matrix=LOADING)


@slow_case
def regression_with_a_prior_precision():
    return regression_case(precision_matrix=np.linalg.inv(LOADING))


@slow_case
def regression_with_a_prior_factor():
    return regression_case(scale_tril=np.linalg.cholesky(LOADING))


@slow_case
def regression_with_an_intercept_by_concatenation():
    def program(arm, context):
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0).expand([A]))
        slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        both = jnp.concatenate([intercept[arm][:, None], jnp.broadcast_to(slope, context.shape)], axis=-1)
        design = jnp.concatenate([jnp.ones((arm.shape[0], 1)), context], axis=-1)
        numpyro.sample("reward", dist.Normal(jax.vmap(jnp.vdot)(both, design), 0.8))

    covariance = np.diag([4.0, 4.0, 4.0, 1.0, 1.0])
    m, v = gaussian(np.zeros(5), covariance, np.column_stack([one_hot(ARM, A), FEATURES]), REALS, 0.8)
    expected = {
        "intercept": {"mean": m[:3], "covariance": v[:3, :3]},
        "slope": {"mean": m[3:], "covariance": v[3:, 3:]},
    }
    return Case(program, REALS, expected, FEATURES)


@slow_case
def log_normal_with_known_spread():
    def program(arm):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.LogNormal(level[arm], 0.6))

    m, v = gaussian(np.zeros(A), np.eye(A), one_hot(ARM, A), np.log(AMOUNTS), 0.6)
    return Case(program, AMOUNTS, {"level": {"mean": m, "covariance": v}})


def nig_per_arm(shape: float, rate: float) -> tuple[np.ndarray, ...]:
    """Return the posterior of a mean, with prior mean 0.3 and one quarter of an observation's weight, for each arm."""

    def one(rows):
        ones = np.ones((rows.sum(), 1))
        m, v, a, b = normal_inverse_gamma(np.array([0.3]), 4.0 * np.eye(1), shape, rate, ones, REALS[rows])
        return m[0], v[0, 0], a, b

    return by_arm(one)


@case
def normal_with_unknown_variance_per_arm():
    def program(arm):
        with numpyro.plate("arms", A):
            variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
            mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * jnp.sqrt(variance)))
        numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))

    m, v, a, b = nig_per_arm(2.0, 1.5)
    expected = {
        "variance": gamma(a, b, -1.0),
        "mean": {"mean": m, "covariance_times_precision": np.diag(v)},
    }
    return Case(program, REALS, expected)


@slow_case
def normal_with_unknown_precision_per_arm():
    def program(arm):
        precision = numpyro.sample("precision", dist.Gamma(2.0, 1.5).expand([A]))
        mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * precision**-0.5))
        numpyro.sample("reward", dist.Normal(mean[arm], 1.0 / jnp.sqrt(precision)[arm]))

    m, v, a, b = nig_per_arm(2.0, 1.5)
    expected = {
        "precision": gamma(a, b, 1.0),
        "mean": {"mean": m, "covariance_times_precision": np.diag(v)},
    }
    return Case(program, REALS, expected)


@slow_case
def normal_with_unknown_standard_deviation_per_arm():
    def program(arm):
        variance = dist.InverseGamma(2.0, 1.5).expand([A])
        sd = numpyro.sample("sd", dist.TransformedDistribution(variance, PowerTransform(0.5)))
        mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * sd))
        numpyro.sample("reward", dist.Normal(mean[arm], sd[arm]))

    m, v, a, b = nig_per_arm(2.0, 1.5)
    expected = {"sd": gamma(a, b, -2.0), "mean": {"mean": m, "covariance_times_precision": np.diag(v)}}
    return Case(program, REALS, expected)


@slow_case
def normal_with_a_standard_deviation_through_logarithms():
    def program(arm):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5).expand([A]))
        sd = jnp.exp(0.5 * jnp.log(variance))
        mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * sd))
        numpyro.sample("reward", dist.Normal(mean[arm], sd[arm]))

    m, v, a, b = nig_per_arm(2.0, 1.5)
    expected = {"variance": gamma(a, b, -1.0), "mean": {"mean": m, "covariance_times_precision": np.diag(v)}}
    return Case(program, REALS, expected)


@slow_case
def normal_with_a_variance_shared_by_arms():
    def program(arm):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
        with numpyro.plate("arms", A):
            mean = numpyro.sample("mean", dist.Normal(0.0, 3.0 * jnp.sqrt(variance)))
        numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance)))

    m, v, a, b = normal_inverse_gamma(np.zeros(A), 9.0 * np.eye(A), 2.0, 1.5, one_hot(ARM, A), REALS)
    expected = {"variance": gamma(a, b, -1.0), "mean": {"mean": m, "covariance_times_precision": v}}
    return Case(program, REALS, expected)


@slow_case
def regression_with_unknown_variance_per_arm():
    def program(arm, context):
        with numpyro.plate("arms", A):
            variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
            covariance = variance[:, None, None] * LOADING
            weight = numpyro.sample("weight", dist.MultivariateNormal(jnp.zeros(2), covariance))
        numpyro.sample("reward", dist.Normal(jnp.sum(weight[arm] * context, -1), jnp.sqrt(variance[arm])))

    def one(rows):
        return normal_inverse_gamma(np.zeros(2), LOADING, 2.0, 1.5, FEATURES[rows], REALS[rows])

    m, v, a, b = by_arm(one)
    block = np.zeros((2 * A, 2 * A))
    for k in range(A):
        block[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = v[k]
    expected = {"variance": gamma(a, b, -1.0), "weight": {"mean": m, "covariance_times_precision": block}}
    return Case(program, REALS, expected, FEATURES)


GRADES = np.array([2, 0, 1, 1, 3, 0, 2])
GRADE_COUNTS = np.stack([per_arm(GRADES == k) for k in range(4)], axis=-1)


@slow_case
def categorical_by_probabilities():
    def program(arm):
        with numpyro.plate("arms", A):
            probs = numpyro.sample("probs", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5, 1.0])))
        numpyro.sample("reward", dist.Categorical(probs[arm]))

    expected = {"probs": {"concentration": np.array([1.0, 2.0, 0.5, 1.0]) + GRADE_COUNTS}}
    return Case(program, GRADES, expected)


@slow_case
def categorical_by_logits_with_a_value_per_category():
    def program(arm):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones((A, 4))).to_event(1))
        numpyro.sample("reward", dist.Categorical(logits=jnp.log(probs)[arm]))
        numpyro.deterministic("expected_reward", probs[arm] @ jnp.array([0.0, 1.0, 5.0, 20.0]))

    return Case(program, GRADES, {"probs": {"concentration": 1.0 + GRADE_COUNTS}})


@case
def bernoulli_from_a_dirichlet_of_two():
    def program(arm):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.array([1.5, 2.0])).expand([A]))
        numpyro.sample("reward", dist.Bernoulli(probs[arm, 0]))

    # 1 - p_0 is p_1 on the simplex of two.
    expected = {"probs": {"concentration": np.array([1.5, 2.0]) + np.stack([CLICKED, NOT_CLICKED], axis=-1)}}
    return Case(program, CLICKS, expected)


@slow_case
def hurdle_of_conversion_and_amount():
    def program(arm):
        with numpyro.plate("arms", A):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
            scale = numpyro.sample("scale", dist.InverseGamma(3.0, 2.0))
        click = numpyro.sample("click", dist.Bernoulli(rate[arm]))
        numpyro.sample("spend", dist.Gamma(2.0, 1.0 / scale[arm]).mask(click == 1))
        numpyro.deterministic("expected_reward", rate[arm] * 2.0 * scale[arm])

    spend = np.where(CLICKS == 1, AMOUNTS, 0.0)
    expected = {
        "rate": beta(CLICKED, NOT_CLICKED),
        "scale": gamma(3.0 + 2.0 * CLICKED, 2.0 + per_arm(spend), -1.0),
    }
    return Case(program, {"click": CLICKS, "spend": spend}, expected, outcomes=("click", "spend"))


@slow_case
def counts_and_waits_with_the_same_rate():
    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5).expand([A]))
        numpyro.sample("count", dist.Poisson(rate[arm]))
        numpyro.sample("wait", dist.Exponential(rate[arm]))
        numpyro.deterministic("expected_reward", rate[arm])

    expected = {"rate": gamma(2.0 + per_arm(COUNTS + 1), 1.5 + per_arm(1.0 + AMOUNTS), 1.0)}
    return Case(program, {"count": COUNTS, "wait": AMOUNTS}, expected, outcomes=("count", "wait"))


@slow_case
def an_outcome_that_regresses_on_an_earlier_one():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([A]))
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0).expand([2]))
        click = numpyro.sample("click", dist.Bernoulli(rate[arm]))
        numpyro.sample("value", dist.Normal(effect[0] + effect[1] * click, 0.5))
        numpyro.deterministic("expected_reward", effect[0] + effect[1] * rate[arm])

    m, v = gaussian(np.zeros(2), np.eye(2), np.column_stack([np.ones(7), CLICKS]), REALS, 0.5)
    expected = {"rate": beta(CLICKED, NOT_CLICKED), "effect": {"mean": m, "covariance": v}}
    return Case(program, {"click": CLICKS, "value": REALS}, expected, outcomes=("click", "value"))


@slow_case
def a_factor_in_the_prior_counts_once():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([A]))
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        numpyro.factor("belief", 3.0 * jnp.log(rate[0]) + jnp.log1p(-rate[2]) - 0.5 * (mean - 2.0) ** 2.0)
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    expected = {
        "rate": beta(CLICKED + np.array([3, 0, 0]), NOT_CLICKED + np.array([0, 0, 1])),
        "mean": {"mean": 1.0, "covariance": np.full((1, 1), 0.5)},
    }
    return Case(program, CLICKS, expected)


@slow_case
def a_pilot_study_inside_the_program_counts_once():
    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5).expand([A]))
        with numpyro.plate("pilot rows", 2):
            numpyro.sample("pilot", dist.Poisson(rate[0]), obs=jnp.array([4, 6]))
        numpyro.sample("reward", dist.Poisson(rate[arm]))

    pilot = np.array([1.0, 0, 0])
    expected = {"rate": gamma(2.0 + per_arm(COUNTS) + 10 * pilot, 1.5 + per_arm(1.0) + 2 * pilot, 1.0)}
    return Case(program, COUNTS, expected)


@slow_case
def discounted_outcomes():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([A]))
        with handlers.scale(scale=0.5):
            numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return Case(program, CLICKS, {"rate": beta(0.5 * CLICKED, 0.5 * NOT_CLICKED)})


@slow_case
def outcomes_masked_by_context():
    def program(arm, context):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5).expand([A]))
        with handlers.mask(mask=context > 1.0):
            numpyro.sample("reward", dist.Poisson(rate[arm]))

    seen = EXPOSURE > 1.0
    expected = {"rate": gamma(2.0 + per_arm(COUNTS * seen), 1.5 + per_arm(seen), 1.0)}
    return Case(program, COUNTS, expected, EXPOSURE)


@slow_case
def a_branch_on_the_context():
    def program(arm, context):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([A]))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))

        def one(mean, x):
            return jax.lax.cond(x > 1.0, lambda: mean + slope * x, lambda: mean)

        location = jax.vmap(one)(mean[arm], context)
        numpyro.sample("reward", dist.Normal(location, jnp.where(context > 1.0, 2.0, 0.5)))

    far = EXPOSURE > 1.0
    design = np.column_stack([one_hot(ARM, A), EXPOSURE * far])
    m, v = gaussian(np.zeros(A + 1), np.eye(A + 1), design, REALS, np.where(far, 2.0, 0.5))
    expected = {"mean": {"mean": m[:A], "covariance": v[:A, :A]}, "slope": {"mean": m[A], "covariance": v[A:, A:]}}
    return Case(program, REALS, expected, EXPOSURE)


@slow_case
def an_integer_context_that_indexes_a_plate():
    segment = np.array([0, 1, 1, 0, 1, 0, 1])

    def program(arm, context):
        with numpyro.plate("segments", 2, dim=-2), numpyro.plate("arms", A, dim=-1):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[context["segment"], arm]))

    cells = per_arm(CLICKS, segment * A + ARM, 2 * A), per_arm(1 - CLICKS, segment * A + ARM, 2 * A)
    return Case(program, CLICKS, {"rate": beta(*(c.reshape(2, A) for c in cells))}, {"segment": segment})


@slow_case
def means_scattered_into_place():
    def program(arm):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]))
        placed = jnp.zeros(A, mean.dtype).at[jnp.array([0, 2])].add(mean).at[1].set(0.5)
        numpyro.sample("reward", dist.Normal(placed[arm], 0.7))

    design = one_hot(ARM, A)[:, [0, 2]]
    m, v = gaussian(np.zeros(2), np.eye(2), design, REALS, 0.7)
    return Case(program, REALS, {"mean": {"mean": m, "covariance": v}})


@slow_case
def arms_that_share_parameters():
    group = np.array([0, 1, 0])

    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5).expand([2]))
        numpyro.sample("reward", dist.Exponential(rate[jnp.asarray(group)[arm]]))

    groups = group[ARM]
    expected = {"rate": gamma(2.0 + per_arm(1.0, groups, 2), 1.5 + per_arm(AMOUNTS, groups, 2), 1.0)}
    return Case(program, AMOUNTS, expected)


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


@slow_case
def a_program_with_bound_settings():
    def program(noise, arm):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.Normal(mean[arm], noise))

    m, v = gaussian(np.zeros(A), np.eye(A), one_hot(ARM, A), REALS, 0.3)
    return Case(functools.partial(program, 0.3), REALS, {"mean": {"mean": m, "covariance": v}})


FIRST = np.array([3, 0, 5, 2, 8, 1, 0])
SECOND = np.array([2, 7, 1, 0, 0, 3, 9])
THIRD = np.array([1, 0, 4, 5, 2, 2, 1])


def chain_case(counts: list[np.ndarray], name: str, program: Callable) -> Case:
    """Counts of kinds among 10, where each outcome is a share of what the outcomes before it left."""
    left = 10 - sum(counts)
    alpha = np.stack([1.0 + k + per_arm(count) for k, count in enumerate([*counts, left])], axis=-1)
    rewards = {f"n{k + 1}": count for k, count in enumerate(counts)}
    return Case(program, rewards, {name: {"concentration": alpha}}, outcomes=tuple(rewards))


@slow_case
def a_dirichlet_through_a_chain_of_binomials():
    def program(arm):
        with numpyro.plate("arms", A):
            p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))
        p = p[arm]
        numpyro.deterministic("expected_reward", p[:, 0])
        first = numpyro.sample("n1", dist.Binomial(10, p[:, 0]))
        numpyro.sample("n2", dist.Binomial(10 - first, p[:, 1] / (1.0 - p[:, 0])))

    return chain_case([FIRST, SECOND], "p", program)


@slow_case
def a_longer_chain_by_what_is_left():
    def program(arm):
        p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0, 4.0])).expand([A]))
        numpyro.deterministic("expected_reward", p[arm, 1])
        left, rest = 10, 1.0
        for k in range(3):
            count = numpyro.sample(f"n{k + 1}", dist.Binomial(left, p[arm, k] / rest))
            left, rest = left - count, rest - p[arm, k]

    return chain_case([FIRST, SECOND // 2, np.minimum(THIRD, 10 - FIRST - SECOND // 2)], "p", program)


@slow_case
def a_chain_by_cumulative_sums():
    def program(arm):
        p = numpyro.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])).expand([A]))
        tails = jnp.cumsum(p[:, ::-1], axis=-1)[:, ::-1]
        hazard = p / tails
        numpyro.deterministic("expected_reward", p[arm, 0])
        first = numpyro.sample("n1", dist.Binomial(10, hazard[arm, 0]))
        numpyro.sample("n2", dist.Binomial(10 - first, hazard[arm, 1]))

    return chain_case([FIRST, SECOND], "p", program)


@slow_case
def stick_breaking_by_a_cumulative_product():
    def program(arm):
        stick = numpyro.sample("stick", dist.Beta(1.0, 2.0).expand([A, 2]).to_event(1))
        one = jnp.ones((A, 1))
        left = jnp.concatenate([one, jnp.cumprod(1.0 - stick, axis=-1)], axis=-1)
        probs = jnp.concatenate([stick, one], axis=-1) * left
        numpyro.deterministic("expected_reward", stick[arm, 0])
        numpyro.sample("reward", dist.Categorical(probs[arm]))

    kinds = np.array([0, 2, 1, 1, 0, 2, 2])
    chosen = np.stack([per_arm(kinds == k) for k in (0, 1)], axis=-1)
    passed = np.stack([per_arm(kinds > k) for k in (0, 1)], axis=-1)
    return Case(program, kinds, {"stick": beta(chosen, passed, (1.0, 2.0))})


# One latent for each arm: its prior, the outcome's law given it, rewards, and the posterior

ONE_LATENT: dict[str, tuple[dist.Distribution, Callable, np.ndarray, dict[str, Any]]] = {
    "bernoulli by logits": (
        dist.Beta(1.0, 1.0).expand([A]).to_event(1),
        lambda z, arm: dist.Bernoulli(logits=(jnp.log(z) - jnp.log1p(-z))[arm]),
        *(CLICKS, beta(CLICKED, NOT_CLICKED)),
    ),
    "bernoulli by one-hot product": (
        dist.Beta(jnp.ones(A), 2.0),
        lambda z, arm: dist.Bernoulli(jax.nn.one_hot(arm, A) @ z),
        *(CLICKS, beta(CLICKED, NOT_CLICKED, (1.0, 2.0))),
    ),
    "bernoulli of the complement under a uniform prior": (
        dist.Uniform(0.0, 1.0).expand([A]),
        lambda z, arm: dist.Bernoulli(1.0 - z[arm]),
        *(CLICKS, beta(NOT_CLICKED, CLICKED)),
    ),
    "bernoulli of twice a uniform on the lower half": (
        dist.Uniform(0.0, 0.5).expand([A]),
        lambda z, arm: dist.Bernoulli(2.0 * z[arm]),
        *(CLICKS, beta(CLICKED, NOT_CLICKED)),
    ),
    "bernoulli with a clip that never bites": (
        dist.Beta(1.0, 1.0, validate_args=True).expand([A]),
        lambda z, arm: dist.Bernoulli(jnp.clip(z, 0.0, 1.0)[arm]),
        *(CLICKS, beta(CLICKED, NOT_CLICKED)),
    ),
    "geometric number of failures": (
        dist.Beta(2.0, 2.0).expand([A]),
        lambda z, arm: dist.Geometric(z[arm]),
        *(COUNTS, beta(per_arm(1.0), per_arm(COUNTS), (2.0, 2.0))),
    ),
    # NumPyro counts successes until the third failure: p^k (1 - p)^3.
    "negative binomial with a known count": (
        dist.Beta(2.0, 2.0).expand([A]),
        lambda z, arm: dist.NegativeBinomialProbs(3.0, z[arm]),
        *(COUNTS, beta(per_arm(COUNTS), per_arm(3.0), (2.0, 2.0))),
    ),
    # z^3 is Exponential with mean 2^3.
    "poisson of a power of a weibull": (
        dist.Weibull(2.0, 3.0).expand([A]),
        lambda z, arm: dist.Poisson(z[arm] ** 3),
        *(COUNTS, gamma(1.0 + per_arm(COUNTS), 1.0 / 8.0 + per_arm(1.0), 3.0)),
    ),
    "exponential waiting time": (
        dist.Gamma(2.0, 1.5).expand([A]),
        lambda z, arm: dist.Exponential(z[arm]),
        *(AMOUNTS, gamma(2.0 + per_arm(1.0), 1.5 + per_arm(AMOUNTS), 1.0)),
    ),
    "exponential by its mean": (
        dist.InverseGamma(3.0, 2.0).expand([A]),
        lambda z, arm: dist.Exponential(1.0 / z[arm]),
        *(AMOUNTS, gamma(3.0 + per_arm(1.0), 2.0 + per_arm(AMOUNTS), -1.0)),
    ),
    "gamma with a known shape": (
        dist.Chi2(3.0).expand([A]),
        lambda z, arm: dist.Gamma(2.5, z[arm]),
        *(AMOUNTS, gamma(1.5 + 2.5 * per_arm(1.0), 0.5 + per_arm(AMOUNTS), 1.0)),
    ),
    "weibull with a known shape": (
        dist.Gamma(2.0, 1.5).expand([A]),
        lambda z, arm: dist.Weibull(z[arm] ** (-1 / 1.5), 1.5),
        *(AMOUNTS, gamma(2.0 + per_arm(1.0), 1.5 + per_arm(AMOUNTS**1.5), 1.0)),
    ),
    "laplace with a latent scale": (
        dist.InverseGamma(3.0, 2.0).expand([A]),
        lambda z, arm: dist.Laplace(0.5, z[arm]),
        *(REALS, gamma(3.0 + per_arm(1.0), 2.0 + per_arm(np.abs(REALS - 0.5)), -1.0)),
    ),
    "inverse gamma outcome": (
        dist.Gamma(2.0, 1.0).expand([A]),
        lambda z, arm: dist.InverseGamma(3.0, z[arm]),
        *(AMOUNTS, gamma(2.0 + 3.0 * per_arm(1.0), 1.0 + per_arm(1.0 / AMOUNTS), 1.0)),
    ),
    # z^2 is Gamma(1/2, 1 / (2 * 2^2)).
    "half-normal root precision": (
        dist.HalfNormal(2.0).expand([A]),
        lambda z, arm: dist.Normal(0.5, 1.0 / z[arm]),
        *(REALS, gamma(0.5 + per_arm(0.5), 0.125 + per_arm((REALS - 0.5) ** 2) / 2, 2.0)),
    ),
    "rayleigh with its scale a root of an inverse gamma": (
        dist.TransformedDistribution(dist.InverseGamma(3.0, 2.0).expand([A]), PowerTransform(0.5)),
        lambda z, arm: dist.Weibull(z[arm] * jnp.sqrt(2.0), 2.0),
        *(AMOUNTS, gamma(3.0 + per_arm(1.0), 2.0 + per_arm(AMOUNTS**2) / 2, -2.0)),
    ),
    "normal with known mean and unknown variance": (
        dist.InverseGamma(2.0, 1.5).expand([A]),
        lambda z, arm: dist.Normal(0.5, jnp.sqrt(z[arm])),
        *(REALS, gamma(2.0 + per_arm(0.5), 1.5 + per_arm((REALS - 0.5) ** 2) / 2, -1.0)),
    ),
    "a distribution of the user's own": (
        dist.Beta(2.0, 1.0).expand([A]),
        lambda z, arm: Zipf(z[arm]),
        *(COUNTS, beta(per_arm(1.0), per_arm(COUNTS), (2.0, 1.0))),
    ),
    "half-normal outcome with a latent scale": (
        dist.Gamma(2.0, 1.0).expand([A]),
        lambda z, arm: dist.HalfNormal(jax.lax.rsqrt(z[arm])),
        *(AMOUNTS, gamma(2.0 + per_arm(0.5), 1.0 + per_arm(AMOUNTS**2) / 2, 1.0)),
    ),
}


def of_one_latent(name: str) -> Case:
    prior, law, rewards, posterior = ONE_LATENT[name]

    def program(arm):
        z = numpyro.sample("z", prior)
        numpyro.sample("reward", law(z, arm))

    return Case(program, rewards, {"z": posterior})


CASES += [pytest.param(functools.partial(of_one_latent, name), id=name, marks=pytest.mark.slow) for name in ONE_LATENT]


def test_there_are_enough_programs():
    assert len(CASES) >= 50
