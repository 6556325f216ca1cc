"""The unconstrained density of a program agrees with NumPyro."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy

from ppl_bandit.engines.particles.space import unconstrained_space
from ppl_bandit.engines.rows import append_rows, empty_buffer, read_buffer
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, InvalidProgram


def regression(arm, context):
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    with numpyro.plate("arms", 2):
        slope = numpyro.sample("slope", dist.Normal(0.0, noise))
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("reward", dist.Normal(slope[arm] * context["x"] + share[arm, 0], noise))


@functools.cache
def reward_model():
    return RewardModel(regression, 2, context={"x": 1.0})


ROWS = Interaction(jnp.array([0, 1, 1]), jnp.array([0.3, -1.0, 2.0]), {"x": jnp.array([1.0, 2.0, -0.5])})


def test_the_log_joint_is_minus_the_potential_energy_of_numpyro():
    space = unconstrained_space(reward_model())
    data = read_buffer(append_rows(reward_model(), empty_buffer(reward_model(), 8), ROWS))
    assert space.size == 1 + 2 + 2 * 2

    def conditioned(arm, context, reward):
        with numpyro.handlers.condition(data={"reward": reward}):
            regression(arm, context)

    position = jr.normal(jr.key(0), (space.size,))
    sites = {"noise": position[0], "slope": position[1:3], "share": position[3:].reshape(2, 2)}
    energy = jax.jit(lambda: potential_energy(conditioned, (ROWS.arm, ROWS.context, ROWS.reward), {}, sites))()
    value, gradient = jax.jit(jax.value_and_grad(space.log_joint))(position, data)
    np.testing.assert_allclose(value, -energy, rtol=1e-5)
    assert np.all(np.isfinite(gradient))


def test_prior_draws_go_to_the_reals_and_back():
    space = unconstrained_space(reward_model())

    @jax.jit
    def there_and_back(key):
        positions, log_weights = space.draw_prior(key, 5)
        return jax.vmap(space.constrain)(positions), reward_model().sample_prior(key, 5), log_weights

    back, expected, log_weights = there_and_back(jr.key(1))
    for name, values in back.items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(log_weights, 0.0)


def test_a_factor_weighs_the_prior_draws():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.factor("belief", 3.0 * jnp.log(rate))
        numpyro.sample("reward", dist.Bernoulli(jnp.broadcast_to(rate, arm.shape)))

    space = unconstrained_space(RewardModel(program, 2))
    positions, log_weights = jax.jit(space.draw_prior, static_argnums=1)(jr.key(1), 4)
    np.testing.assert_allclose(log_weights.sum(axis=1), 3.0 * jax.nn.log_sigmoid(positions[:, 0]), rtol=1e-4)


def test_a_support_without_a_bijection_is_refused_with_the_remedy():
    def program(arm):
        direction = numpyro.sample("direction", dist.ProjectedNormal(jnp.array([1.0, 0.0])))
        numpyro.sample("reward", dist.Normal(jnp.broadcast_to(direction[0], arm.shape), 1.0))

    with pytest.raises(InvalidProgram, match="'direction' lives on .*write it as a function of latents"):
        RewardModel(program, 2)


def test_latents_at_which_the_constant_of_a_truncated_law_underflows_are_impossible_and_not_certain():
    def share(arm):
        base = numpyro.sample("base", dist.Normal(0.0, 1.0).expand([2]))
        law = dist.TruncatedDistribution(dist.SoftLaplace(base[arm], 0.001), low=0.0, high=1.0)
        numpyro.sample("reward", law)
        numpyro.deterministic("expected_reward", base[arm])

    with jax.enable_x64(True):
        model = RewardModel(share, 2)
        rows = Interaction(jnp.array([0, 1]), jnp.array([0.2, 0.2]))
        # The first is 1,000 scales below the support, where NumPyro's density is infinite.
        latents = {"base": jnp.array([-1.0, 0.3])}
        assert model.log_likelihood(latents, rows)[0] == jnp.inf
        found = np.asarray(unconstrained_space(model).log_likelihood(latents, rows))
    assert found[0] == -np.inf and np.isfinite(found[1])
