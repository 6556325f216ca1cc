"""What particles are moved in: rows, unconstrained coordinates and their blocks, hierarchies partially centred."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy

from ppl_bandit import engines
from ppl_bandit.engines.particles.blocks import block_posterior, independent_blocks
from ppl_bandit.engines.particles.refresh_blocks import _estimate_centredness, _space_at
from ppl_bandit.engines.particles.space import unconstrained_space
from ppl_bandit.engines.rows import append_rows, empty_buffer, grow_buffer, read_buffer, rows_that_fit
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, InvalidProgram

# The row buffer keeps the data in order, counts equal rows and grows by doubling


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


append = jax.jit(append_rows, static_argnames=("model", "merges"))  # one compilation for each form of rows


def test_rows_that_count_are_written_in_order_and_the_others_are_not():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS._replace(mask=jnp.array([True, False, True])))
    buffer = append(reward_model(), buffer, ROWS._replace(mask=jnp.array([False, True, False])))
    data = read_buffer(buffer)
    assert int(buffer.num_rows) == 3
    np.testing.assert_array_equal(data.rows.mask, [True, True, True, False])
    np.testing.assert_allclose(data.rows.reward["reward"][:3], [0.3, 2.0, -1.0])
    np.testing.assert_allclose(data.rows.context["x"], [1.0, -0.5, 2.0, 1.0])  # the last is a copy of the first
    np.testing.assert_array_equal(data.weights, [1.0, 1.0, 1.0, 0.0])


def test_equal_rows_are_kept_once_and_counted():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS)
    again = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:2], leaf[:1]]), ROWS)
    buffer = append(reward_model(), buffer, again)
    assert int(buffer.num_rows) == 3
    np.testing.assert_array_equal(read_buffer(buffer).weights, [3.0, 2.0, 1.0, 0.0])
    kept_apart = append(
        reward_model(), append(reward_model(), empty_buffer(reward_model(), 8), ROWS, merges=False), again, merges=False
    )
    assert int(kept_apart.num_rows) == 6
    # A zero with a sign is equal to one without.
    zeros = Interaction(jnp.zeros(2, int), jnp.array([0.0, -0.0]), {"x": jnp.array([-0.0, 0.0])})
    assert int(append(reward_model(), empty_buffer(reward_model(), 4), zeros).num_rows) == 1


def test_the_rows_of_some_arms_are_read_alone():
    data = read_buffer(append(reward_model(), empty_buffer(reward_model(), 4), ROWS), of=jnp.array([False, True]))
    assert int(data.num_rows) == 2
    np.testing.assert_array_equal(data.places[:2], [1, 2])
    np.testing.assert_array_equal(data.weights, [0.0, 1.0, 1.0, 0.0])


def test_capacity_doubles_until_the_rows_fit_and_the_data_stay():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS)
    masked, has_room = rows_that_fit(buffer, ROWS)
    assert not has_room and not np.any(masked.mask)
    one, has_room = rows_that_fit(buffer, ROWS._replace(mask=jnp.array([False, True, False])))
    assert has_room and one.mask.tolist() == [False, True, False]
    assert grow_buffer(buffer, 1) is buffer
    larger = grow_buffer(buffer, 14)
    assert larger.arm.shape == (32,)
    np.testing.assert_array_equal(read_buffer(larger).rows.arm[:3], ROWS.arm)
    assert int(larger.num_rows) == 3


def test_an_older_row_counts_for_less_by_the_discount():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS)
    np.testing.assert_allclose(read_buffer(buffer, 0.9).weights, [0.81, 0.9, 1.0, 0.0], rtol=1e-6)


def test_floats_are_refused_where_the_example_context_has_integers():
    model = RewardModel(regression, 2, context={"x": 1})
    with pytest.raises(TypeError, match="give an example context with decimals"):
        append(model, empty_buffer(model, 4), ROWS)


# The unconstrained density of a program agrees with NumPyro


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


# Blocks of latents are independent given any data


def blocks_of(program, num_arms, context=None):
    model = RewardModel(program, num_arms, context=context)
    found = independent_blocks(model, unconstrained_space(model))
    return [
        set(row[row < unconstrained_space(model).size].tolist()) for row in found.coordinates
    ], found.of_arm.tolist()


def test_arms_with_separate_latents_are_independent_blocks():
    def by_index(arm, context):
        weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
        numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weights[arm] * context, axis=-1)))

    def by_case(arm, context):
        weights = [numpyro.sample(f"w{a}", dist.Normal(0.0, 1.0).expand([2]).to_event(1)) for a in range(3)]
        cases = [jnp.where(arm == a, context @ weights[a], 0.0) for a in range(3)]
        numpyro.sample("reward", dist.Bernoulli(logits=sum(cases)))

    apart = ([{0, 1}, {2, 3}, {4, 5}], [0, 1, 2])
    assert blocks_of(by_index, 3, np.ones(2)) == apart
    assert blocks_of(by_case, 3, np.ones(2)) == apart


def test_latents_that_share_a_term_of_the_prior_or_a_row_are_one_block():
    def through_the_rows(arm, context):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.sample(
            "reward", dist.Normal(weights[arm] + weights[context.astype(int)], 1.0)
        )  # an index that data choose

    def through_the_prior(arm):
        common = numpyro.sample("common", dist.Normal(0.0, 1.0))
        own = numpyro.sample("own", dist.Normal(common, 1.0).expand([3]).to_event(1))
        numpyro.sample("reward", dist.Normal(own[arm], 1.0))

    def through_a_factor(arm):
        own = numpyro.sample("own", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.factor("tie", -jnp.square(own[0] - own[1]))
        numpyro.sample("reward", dist.Normal(own[arm], 1.0))

    assert blocks_of(through_the_rows, 3, np.array(1.0))[0] == [{0, 1, 2}]
    assert blocks_of(through_the_prior, 3)[0] == [{0, 1, 2, 3}]
    assert blocks_of(through_a_factor, 3) == ([{0, 1}, {2}], [0, 0, 1])


def test_latents_that_no_row_informs_are_one_block():
    def program(arm):
        own = numpyro.sample("own", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("idle", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("reward", dist.Exponential(own[arm]))

    assert blocks_of(program, 2) == ([{0}, {1}, {2, 3}], [0, 1])


# Partially non-centred coordinates of hierarchies have the same posterior


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
