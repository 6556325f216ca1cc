"""Linear forms of one Gaussian block: whether the arms' are independent is proved, and then P(best) has a closed form."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from ppl_bandit import Interaction, RewardModel, engines
from ppl_bandit.engines.exact.marginals import are_apart


def weights_of(arms=3):
    with numpyro.plate("arms", arms):
        return numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def own_weights(arm, context):
    numpyro.sample("reward", dist.Normal(jnp.sum(weights_of()[arm] * context, axis=-1), 1.0))


def shared_level(arm, context):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(level + jnp.sum(weights_of()[arm] * context, axis=-1), 1.0))


def common_mean(arm, context):
    centre = numpyro.sample("centre", dist.Normal(0.0, 1.0))
    with numpyro.plate("arms", 3):
        weights = numpyro.sample("weights", dist.Normal(centre, 1.0).expand([2]).to_event(1))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context, axis=-1), 1.0))


def spills_over(arm, context):
    """A reward of one arm speaks of the next one too, though no expected reward reads another arm's weights."""
    means = jnp.sum(weights_of()[None] * context[:, None], axis=-1)
    own, beside = (jnp.take_along_axis(means, (arm + k)[:, None] % 3, axis=1)[:, 0] for k in (0, 1))
    numpyro.sample("reward", dist.Normal(own + 0.1 * beside, 1.0))
    numpyro.deterministic("expected_reward", own)


def tied(arm, context):
    weights = weights_of()
    numpyro.factor("alike", -jnp.sum((weights[0] - weights[1]) ** 2))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context, axis=-1), 1.0))


@pytest.mark.parametrize(
    ("program", "num_before", "expected"),
    [
        (own_weights, 0, True),
        (shared_level, 1, False),
        (common_mean, 1, False),
        (spills_over, 0, False),
        (tied, 0, False),
    ],
)
def test_armsare_apart_only_where_no_datum_and_no_prior_ties_them(program, num_before, expected):
    model = RewardModel(program, 3, jnp.ones(2))
    reads = [num_before + 2 * arm + np.arange(2) for arm in range(3)]
    assert are_apart(model, reads, num_before + 6) == expected


def test_the_probability_of_being_best_is_that_of_independent_normals():
    """Two arms: the difference of their forms is normal, with the sum of their variances, by the textbook's regression."""

    def program(arm, context):
        numpyro.sample("reward", dist.Normal(jnp.sum(weights_of(2)[arm] * context, axis=-1), 0.5))

    rng = np.random.default_rng(0)
    arms, contexts = rng.integers(0, 2, 12), rng.normal(size=(12, 2))
    rewards, here = rng.normal(size=12), np.array([0.7, -0.4])
    means, variances = [], []
    for arm in range(2):
        x, y = contexts[arms == arm], rewards[arms == arm]
        covariance = np.linalg.inv(np.eye(2) + x.T @ x / 0.25)
        means.append(here @ covariance @ x.T @ y / 0.25)
        variances.append(here @ covariance @ here)
    exact = stats.norm.cdf((means[0] - means[1]) / np.sqrt(sum(variances)))
    with jax.enable_x64(True):
        engine = engines.conjugate(RewardModel(program, 2, jnp.zeros(2)))
        rows = Interaction(jnp.asarray(arms), jnp.asarray(rewards), jnp.asarray(contexts))

        @jax.jit
        def found():
            state, _ = engine.update(jr.key(0), engine.init(jr.key(0)), rows)
            return engine.marginals(state, jnp.asarray(here)).best_arm_probs()

        np.testing.assert_allclose(found(), [exact, 1.0 - exact], atol=1e-4)
