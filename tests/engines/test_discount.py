"""Forgetting: an exact posterior under a discount is the posterior of the likelihood so weighted."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_model

from ppl_bandit import Environment, Interaction, RewardModel, engines, selectors, simulate


def mixed(arm, context):
    """Beta, Normal-InverseGamma and a free Gaussian in one program, with two outcomes."""
    rate = numpyro.sample("rate", dist.Beta(2.0, 1.0).expand([2]))
    variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    weights = numpyro.sample("weights", dist.Normal(1.0, jnp.sqrt(variance) * jnp.ones(2)).to_event(1))
    level = numpyro.sample("level", dist.Normal(0.5, 2.0))
    numpyro.sample("click", dist.Bernoulli(rate[arm]))
    numpyro.sample("spend", dist.Normal((weights * context).sum(-1), jnp.sqrt(variance)))
    numpyro.sample("rating", dist.Normal(level, 1.0).expand([arm.shape[0]]))
    numpyro.deterministic("expected_reward", rate[arm] * level)


@pytest.fixture(scope="module")
def model():
    return RewardModel(mixed, 2, context=np.ones(2), outcomes=("click", "spend", "rating"))


def rows(num_rows):
    rng = np.random.default_rng(0)
    rewards = {
        "click": jnp.asarray(rng.integers(0, 2, num_rows)),
        "spend": jnp.asarray(100.0 + rng.standard_normal(num_rows)),
        "rating": jnp.asarray(rng.standard_normal(num_rows)),
    }
    return Interaction(
        jnp.asarray(rng.integers(0, 2, num_rows)), rewards, jnp.asarray(rng.standard_normal((num_rows, 2)))
    )


@pytest.mark.slow
def test_a_discounted_posterior_matches_weighted_sums_by_hand(model):
    discount, num_rows = 0.9, 12
    with jax.enable_x64(True):
        engine = engines.conjugate(model, discount=discount)
        data = rows(num_rows)
        batch, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), data)
        assert bool(info.is_trusted)
        single, step = engine.init(jr.key(0)), jax.jit(engine.update)
        for i in range(num_rows):
            single, _ = step(jr.key(0), single, jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], data))
        found, sequential = engine.capabilities.parameters(batch), engine.capabilities.parameters(single)
    for site in found:
        for name in found[site]:
            np.testing.assert_allclose(found[site][name], sequential[site][name], rtol=1e-9, atol=1e-12)

    weight = discount ** np.arange(num_rows - 1, -1, -1)
    arm, click = np.asarray(data.arm), np.asarray(data.reward["click"])
    for a in range(2):
        np.testing.assert_allclose(
            found["rate"]["concentration1"][a], 2 + (weight * click * (arm == a)).sum(), rtol=1e-10
        )
    precision = 0.25 + weight.sum()
    np.testing.assert_allclose(found["level"]["covariance"], [[1 / precision]], rtol=1e-10)
    level = (0.125 + (weight * np.asarray(data.reward["rating"])).sum()) / precision
    np.testing.assert_allclose(found["level"]["mean"], level, rtol=1e-10)
    x, y = np.asarray(data.context), np.asarray(data.reward["spend"])
    scaled = np.eye(2) + (x * weight[:, None]).T @ x
    mean = np.linalg.solve(scaled, np.ones(2) + x.T @ (weight * y))
    np.testing.assert_allclose(found["weights"]["mean"], mean, rtol=1e-9)
    rate = 2 + 0.5 * (2 + (weight * y**2).sum() - mean @ scaled @ mean)
    np.testing.assert_allclose(found["variance"]["rate"], rate, rtol=1e-9)
    np.testing.assert_allclose(found["variance"]["concentration"], 3 + weight.sum() / 2, rtol=1e-10)


def test_a_discount_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"discount must lie in \(0, 1\], got 1.5"):
        engines.conjugate(bernoulli_model(3), discount=1.5)


@pytest.mark.slow
def test_forgetting_lowers_the_regret_where_the_best_arm_changes_and_costs_some_where_it_does_not():
    # Paired over 40 realizations; both differences are tested at four standard errors.
    model = bernoulli_model(3)
    world = Environment(model, {"rate": [0.6, 0.4, 0.2]}, changes={301: {"rate": [0.2, 0.4, 0.6]}})

    def regret(discount):
        engine = functools.partial(engines.conjugate, discount=discount)
        counts = dict(num_steps=600, num_realizations=40, num_samples=300)
        found = simulate(0, model, engine, selectors.double_sampling(), world, **counts)["regret"].values
        return found[:, :300].sum(axis=1), found[:, 300:].sum(axis=1)

    (kept_before, kept_after), (before, after) = regret(1.0), regret(0.98)

    def standard_errors(difference):
        return difference.mean() / (difference.std(ddof=1) / np.sqrt(len(difference)))

    assert standard_errors(before - kept_before) > 4
    assert standard_errors(kept_before + kept_after - before - after) > 4


def test_a_discounted_beta_posterior_follows_power_discounting_and_its_evidence_adds_up_predictive_densities():
    arms, rewards = np.array([0, 1, 0, 0, 1]), np.array([1, 0, 0, 1, 1])
    expected, log_evidence = np.ones((2, 2)), 0.0
    for arm, reward in zip(arms, rewards, strict=True):
        expected = 1.0 + 0.8 * (expected - 1.0)
        log_evidence += np.log(expected[1 - reward, arm] / expected[:, arm].sum())
        expected[:, arm] += [reward, 1 - reward]
    with jax.enable_x64(True):
        engine = engines.conjugate(bernoulli_model(2), discount=0.8)
        rows, update = Interaction(jnp.asarray(arms), jnp.asarray(rewards)), jax.jit(engine.update)
        together, info = update(jr.key(0), engine.init(jr.key(0)), rows._replace(mask=jnp.ones(5, bool)))
        in_turn = engine.init(jr.key(0))
        for row in range(5):  # the others masked: the same shape compiles once
            in_turn, _ = update(jr.key(0), in_turn, rows._replace(mask=jnp.arange(5) == row))
        assert bool(info.is_trusted)
        assert engine.capabilities.log_evidence(in_turn) == (pytest.approx(log_evidence, abs=1e-10), 0.0)
    for state in (together, in_turn):
        found = engine.capabilities.parameters(state)["rate"]
        for own, name in zip(expected, ("concentration1", "concentration0"), strict=True):
            np.testing.assert_allclose(found[name], own, rtol=1e-10)
