"""What the certificate sees: bends where data take the posterior, matrices that cancel, expectations that are infinite."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit.engines import conjugate
from ppl_bandit.engines.proof.certificate import is_affine
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction

KEY = jr.key(0)


def bend(x):
    """Return a cube of which rounding hides everything near 1, where the prior has its mass, but not at 400,000."""
    return -1e-19 * x**3


def prior_bends_far_away(arm):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.factor("bend", bend(rate))
    numpyro.sample("reward", dist.Poisson(rate + 0.0 * arm))


def test_a_bend_of_the_prior_is_seen_where_the_data_take_the_posterior():
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(prior_bends_far_away, 1))
        update, state = quick_jit(engine.update), engine.init(KEY)
        _, info = update(KEY, state, Interaction(jnp.array([0]), jnp.array([30])))
        assert bool(info.is_trusted)
        _, info = update(KEY, state, Interaction(jnp.array([0]), jnp.array([400_000])))
    # The likelihood is conjugate everywhere: it is the prior that is not.
    assert not bool(info.is_trusted) and not bool(is_affine(info.prior_residual)) and bool(info.is_certified.all())


def test_an_update_is_not_traced_again_after_the_examination():
    runs = []

    def program(arm):
        runs.append(1)
        numpyro.sample("reward", dist.Bernoulli(numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))[arm]))

    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, 2))
        num_runs = len(runs)
        jax.jit(engine.update).trace(KEY, engine.init(KEY), Interaction(jnp.zeros(1, int), jnp.ones(1)))
    assert len(runs) == num_runs


def line(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 100.0).expand([2]).to_event(1))
    numpyro.sample("reward", dist.Normal(context @ weight + 0.0 * arm, 1.0))


@pytest.mark.slow
def test_single_precision_is_not_trusted_with_features_that_nearly_repeat_each_other():
    engine, rng = conjugate(RewardModel(line, 1, np.ones(2))), np.random.default_rng(0)
    assert not jax.config.jax_enable_x64
    # The intercept's variance is offset^2 / 512, so terms of 4 offset^2 nats cancel, times 1.2e-7 sqrt(512).
    update = quick_jit(engine.update)
    for offset, is_trusted in ((0.0, True), (1000.0, False)):
        feature = offset + rng.normal(size=512)
        rows = np.column_stack([np.ones(512), feature])
        reward = rows @ [0.3, 0.5] + rng.normal(size=512)
        interaction = Interaction(*(jnp.asarray(x, jnp.float32) for x in (np.zeros(512), reward, rows)))
        _, info = update(KEY, engine.init(KEY), interaction._replace(arm=jnp.zeros(512, int)))
        assert bool(info.is_trusted) == is_trusted, (offset, info.checks)


def coin(arm, context):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Binomial(context, rate + 0.0 * arm))


@pytest.mark.slow
def test_a_count_that_stops_growing_is_not_trusted():
    engine = conjugate(RewardModel(coin, 1, 1))
    update, state = quick_jit(engine.update), engine.init(KEY)
    # In float32 the next number after 2^25 is 4 larger.
    for count, is_trusted in ((2.0**20, True), (2.0**25, False)):
        state = state._replace(elements={"unit": jnp.full((1, 2), count)})
        _, info = update(KEY, state, Interaction(jnp.array([0]), jnp.array([1]), jnp.array([1])))
        assert bool(info.is_trusted) == is_trusted


def spend(arm):
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    level = numpyro.sample("level", dist.Normal(0.0, jnp.sqrt(variance)))
    numpyro.sample("reward", dist.LogNormal(level + 0.0 * arm, jnp.sqrt(variance)))


def waiting_time(shape):
    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(shape, 1.0))
        numpyro.sample("reward", dist.Exponential(rate + 0.0 * arm))

    return program


@pytest.mark.parametrize(
    ("program", "is_infinite"),
    [
        pytest.param(spend, True, marks=pytest.mark.slow),
        (waiting_time(0.9), True),
        (waiting_time(1.1), False),
    ],
)
def test_an_expected_reward_without_an_expectation_is_named(program, is_infinite):
    # E exp(m + v / 2) under a power tail of v; E 1 / rate under Gamma(a, 1) is 1 / (a - 1), infinite for a up to 1.
    report = conjugate(RewardModel(program, 1)).explanation.report
    assert ("expectation over the latents is infinite" in report) == is_infinite
