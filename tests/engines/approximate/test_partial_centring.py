"""Partially non-centred coordinates of hierarchies have the same posterior."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import engines
from ppl_bandit.engines.particles.blocks import block_posterior, independent_blocks
from ppl_bandit.engines.particles.refresh_blocks import _estimate_centredness, _space_at
from ppl_bandit.engines.particles.space import unconstrained_space
from ppl_bandit.engines.rows import empty_buffer
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


def hierarchies(arm):
    """Latent scales in a plate, with an event, of a positive latent, of a nested location; and two sites without."""
    common = numpyro.sample("common", dist.Normal(1.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("arms", 2):
        slope = numpyro.sample("slope", dist.StudentT(5.0, common, spread).expand([2, 3]).to_event(1))
        level = numpyro.sample("level", dist.LogNormal(common, jnp.exp(slope[:, 0])))
        shift = numpyro.sample("shift", dist.Normal(slope[:, 1], 0.5))
    numpyro.sample("reward", dist.Normal(level[arm] * slope[arm, 2] + shift[arm], 1.0))


@pytest.mark.slow
def test_partially_centred_coordinates_have_the_density_of_the_latents_with_the_jacobian():
    """The Jacobian is that of the whole map, by forward differentiation, in double precision."""
    with jax.enable_x64(True):
        space = unconstrained_space(RewardModel(hierarchies, 2))
        centring = space.partial_centring
        names = ["common", "spread", *["slope"] * 6, *["level"] * 2, *["shift"] * 2]
        np.testing.assert_array_equal(centring.has_latent_scale, [name in ("slope", "level") for name in names])
        coordinates, centredness = jr.normal(jr.key(0), (space.size,)), jr.uniform(jr.key(1), (space.size,))
        centredness = jnp.where(centring.has_latent_scale, centredness, 1.0)
        latents = centring.to_latents(coordinates, centredness)
        jacobian = jnp.linalg.slogdet(jax.jacfwd(centring.to_latents)(coordinates, centredness))[1]
        partial, plain = jnp.sum(centring.log_prior(coordinates, centredness)), jnp.sum(space.log_prior(latents))
        np.testing.assert_allclose(partial, plain + jacobian, rtol=1e-12)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
            centring.constrain(coordinates, centredness),
            space.constrain(latents),
        )
        np.testing.assert_allclose(centring.to_latents(latents, jnp.ones(space.size)), latents, rtol=1e-12)


def test_every_block_has_the_jacobian_of_its_own_coordinates():
    """Two arms that share nothing: the scale of an arm's mean is its own."""

    def program(arm):
        with numpyro.plate("arms", 2):
            spread = numpyro.sample("spread", dist.HalfNormal(1.0))
            mean = numpyro.sample("mean", dist.Normal(1.0, spread))
        numpyro.sample("reward", dist.Laplace(mean[arm], spread[arm]))

    with jax.enable_x64(True):
        model = RewardModel(program, 2)
        space = unconstrained_space(model)
        blocks, buffer = independent_blocks(model, space), empty_buffer(model, 4)
        assert len(blocks.coordinates) == 2
        own, reference = jnp.array([0.7, -1.3]), jnp.array([0.1, 0.2, 0.3, 0.4])
        for number, coordinates in enumerate(blocks.coordinates):
            centredness = jnp.ones(4).at[coordinates].set(jnp.array([1.0, 0.25]))
            latents = space.partial_centring.to_latents(reference.at[coordinates].set(own), centredness)[coordinates]
            partial = block_posterior(
                _space_at(space, space.partial_centring, centredness), blocks, number, buffer, reference, 1.0
            )
            plain = block_posterior(space, blocks, number, buffer, reference, 1.0)
            # mean = 1 + spread^.75 (v - .25), and the log of the spread is the first coordinate.
            np.testing.assert_allclose(latents[1], 1.0 + np.exp(0.75 * own[0]) * (own[1] - 0.25), rtol=1e-12)
            np.testing.assert_allclose(partial.log_prior(own), plain.log_prior(latents) + 0.75 * own[0], rtol=1e-12)


def test_a_centredness_of_0_is_the_distance_in_units_of_the_scale():
    with jax.enable_x64(True):
        space = unconstrained_space(RewardModel(hierarchies, 2))
        latents = jr.normal(jr.key(2), (space.size,))
        locations, log_scales = space.partial_centring.location_and_log_scale(latents)
        np.testing.assert_allclose(locations[2:8], latents[0], rtol=1e-12)
        np.testing.assert_allclose(log_scales[2:8], latents[1], rtol=1e-12)  # the bijection of a HalfNormal is exp
        has_latent_scale = space.partial_centring.has_latent_scale
        distances = jnp.where(has_latent_scale, (latents - locations) / jnp.exp(log_scales), latents)
        np.testing.assert_allclose(
            space.partial_centring.to_latents(distances, 1.0 - has_latent_scale), latents, rtol=1e-10
        )


def test_a_program_without_a_latent_scale_has_no_partial_centring():
    def program(arm):
        common = numpyro.sample("common", dist.Normal(1.0, 2.0))
        mean = numpyro.sample("mean", dist.Normal(common, 0.5).expand([2]).to_event(1))
        numpyro.sample("reward", dist.StudentT(4.0, mean[arm], 1.0))

    assert unconstrained_space(RewardModel(program, 2)).partial_centring is None


def test_the_centredness_is_1_minus_the_relative_posterior_variance():
    """Standard deviations of 1, .1 and 3 about a scale of 1; of 4,000 draws a variance has an error of 2%: .1 is five."""
    positions = jr.normal(jr.key(0), (4000, 3)) * jnp.array([1.0, 0.1, 3.0])
    particles = SimpleNamespace(positions=positions, log_weights=jnp.zeros(4000))
    centredness = np.asarray(_estimate_centredness(particles, jnp.zeros((4000, 3))))
    np.testing.assert_allclose(centredness, [0.0, 0.99, 0.0], atol=0.1)


def logits(is_centred):
    def program(arm):
        common = numpyro.sample("common", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("arms", 6):
            if is_centred:
                logit = numpyro.sample("logit", dist.Normal(common, spread))
            else:
                logit = common + spread * numpyro.sample("distance", dist.Normal(0.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(logits=logit[arm]))

    return RewardModel(program, 6)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [4, 40, 1500])
def test_centred_and_non_centred_hierarchies_have_the_same_posterior(num_rows):
    """Half of the rows are of one arm. Draws of either way are worth 400 at least, so that the difference of means has a
    standard error of .07 posterior standard deviations at most, and of standard deviations 5%; six arms, four errors each.
    """
    rng = np.random.default_rng(3)
    arm = np.where(rng.random(num_rows) < 0.5, 2, rng.integers(6, size=num_rows))
    reward = (rng.random(num_rows) < np.array([0.2, 0.3, 0.5, 0.5, 0.6, 0.8])[arm]).astype(float)
    found = []
    with jax.enable_x64(True):
        for is_centred in (True, False):
            model = logits(is_centred)
            assert (unconstrained_space(model).partial_centring is not None) == is_centred
            engine = engines.reweight(model, capacity=2048)
            rows = Interaction(jnp.asarray(arm), jnp.asarray(reward))
            state, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(1)), rows)
            assert bool(info.is_trusted) and float(info.ess) >= 400
            draws = engine.sample(jr.key(2), state, 4000)
            table = np.asarray(model.expected_rewards(draws, None))
            found.append(np.concatenate([table, np.log(np.asarray(draws["spread"]))[:, None]], axis=1))
    centred, distant = found
    sd = distant.std(axis=0)
    assert np.max(np.abs(centred.mean(axis=0) - distant.mean(axis=0)) / sd) < 0.28
    assert np.max(np.abs(centred.std(axis=0) / sd - 1.0)) < 0.2
