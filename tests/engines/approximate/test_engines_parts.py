"""The parts of the approximate engines, each against what is known about it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import potential_energy

from ppl_bandit import engines
from ppl_bandit.engines.approximate.blocks import independent_blocks
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.particles.diagnostics import chain_ess, moment_shifts, notable_k_hat, pareto_k_hat
from ppl_bandit.engines.particles.kernels import hamiltonian
from ppl_bandit.engines.particles.log_density import LogDensity, second_derivatives
from ppl_bandit.engines.particles.modes import find_mode
from ppl_bandit.engines.particles.moves import MAX_AUTOCORRELATION, move
from ppl_bandit.engines.particles.weights import (
    finite_log_weights,
    flatten_log_weights,
    normalize_weights,
    resample,
    weight_ess,
)
from ppl_bandit.engines.row_buffer import append_rows, empty_buffer, grow_buffer, has_room_for, read_buffer
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction, InvalidProgram


def regression(arm, context):
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    with numpyro.plate("arms", 2):
        slope = numpyro.sample("slope", dist.Normal(0.0, noise))
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("reward", dist.Normal(slope[arm] * context["x"] + share[arm, 0], noise))


MODEL = RewardModel(regression, 2, context={"x": 1.0})
ROWS = Interaction(jnp.array([0, 1, 1]), jnp.array([0.3, -1.0, 2.0]), {"x": jnp.array([1.0, 2.0, -0.5])})


def test_rows_that_count_are_written_in_order_and_the_others_are_not():
    buffer = append_rows(MODEL, empty_buffer(MODEL, 4), ROWS._replace(mask=jnp.array([True, False, True])))
    buffer = append_rows(MODEL, buffer, ROWS._replace(mask=jnp.array([False, True, False])))
    data = read_buffer(buffer)
    assert int(buffer.num_rows) == 3
    np.testing.assert_array_equal(data.rows.mask, [True, True, True, False])
    np.testing.assert_allclose(data.rows.reward["reward"][:3], [0.3, 2.0, -1.0])
    np.testing.assert_allclose(data.rows.context["x"], [1.0, -0.5, 2.0, 1.0])  # the last is a copy of the first
    np.testing.assert_array_equal(data.weights, [1.0, 1.0, 1.0, 0.0])


def test_equal_rows_are_kept_once_and_counted():
    buffer = append_rows(MODEL, empty_buffer(MODEL, 4), ROWS)
    again = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:2], leaf[:1]]), ROWS)
    buffer = append_rows(MODEL, buffer, again)
    assert int(buffer.num_rows) == 3
    np.testing.assert_array_equal(read_buffer(buffer).weights, [3.0, 2.0, 1.0, 0.0])
    kept_apart = append_rows(MODEL, append_rows(MODEL, empty_buffer(MODEL, 8), ROWS, merges=False), again, merges=False)
    assert int(kept_apart.num_rows) == 6
    # A zero with a sign is equal to one without.
    zeros = Interaction(jnp.zeros(2, int), jnp.array([0.0, -0.0]), {"x": jnp.array([-0.0, 0.0])})
    assert int(append_rows(MODEL, empty_buffer(MODEL, 4), zeros).num_rows) == 1


def test_the_rows_of_some_arms_are_read_alone():
    data = read_buffer(append_rows(MODEL, empty_buffer(MODEL, 4), ROWS), of=jnp.array([False, True]))
    assert int(data.num_rows) == 2
    np.testing.assert_array_equal(data.places[:2], [1, 2])
    np.testing.assert_array_equal(data.weights, [0.0, 1.0, 1.0, 0.0])


def blocks_of(program, num_arms, context=None):
    model = RewardModel(program, num_arms, context=context)
    found = independent_blocks(model, unconstrained_space(model))
    return [
        set(row[row < unconstrained_space(model).size].tolist()) for row in found.coordinates
    ], found.of_arm.tolist()


def test_arms_with_latents_of_their_own_are_independent_blocks():
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


def test_what_rows_or_the_prior_tie_together_is_one_block():
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


def test_latents_that_no_row_speaks_of_are_a_block_of_their_own():
    def program(arm):
        own = numpyro.sample("own", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("idle", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("reward", dist.Exponential(own[arm]))

    assert blocks_of(program, 2) == ([{0}, {1}, {2, 3}], [0, 1])


def test_capacity_doubles_until_the_rows_fit_and_the_data_stay():
    buffer = append_rows(MODEL, empty_buffer(MODEL, 4), ROWS)
    assert not has_room_for(buffer, ROWS)
    assert has_room_for(buffer, ROWS._replace(mask=jnp.array([False, True, False])))
    assert grow_buffer(buffer, 1) is buffer
    larger = grow_buffer(buffer, 14)
    assert larger.arm.shape == (32,)
    np.testing.assert_array_equal(read_buffer(larger).rows.arm[:3], ROWS.arm)
    assert int(larger.num_rows) == 3


def test_an_older_row_counts_for_less_by_the_discount():
    buffer = append_rows(MODEL, empty_buffer(MODEL, 4), ROWS)
    np.testing.assert_allclose(read_buffer(buffer, 0.9).weights, [0.81, 0.9, 1.0, 0.0], rtol=1e-6)


def test_decimals_are_never_cut_to_the_integers_of_the_example_context():
    model = RewardModel(regression, 2, context={"x": 1})
    with pytest.raises(TypeError, match="give an example context with decimals"):
        append_rows(model, empty_buffer(model, 4), ROWS)


def test_the_log_joint_is_minus_the_potential_energy_of_numpyro():
    space = unconstrained_space(MODEL)
    data = read_buffer(append_rows(MODEL, empty_buffer(MODEL, 8), ROWS))
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
    space = unconstrained_space(MODEL)

    @jax.jit
    def there_and_back(key):
        positions, log_weights = space.draw_prior(key, 5)
        return jax.vmap(space.constrain)(positions), MODEL.sample_prior(key, 5), log_weights

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


@pytest.mark.parametrize("shape", [0.3, 0.5, 1.0])
def test_k_hat_finds_the_shape_of_pareto_weights(shape):
    # w = u^(-shape) has the tail index `shape`; with 3 sqrt(M) = 949 of 100,000 weights in the tail, the standard error of
    # the estimate is (1 + shape) / sqrt(949), at most 0.065, and four of them are allowed.
    log_weights = -shape * jnp.log(jr.uniform(jr.key(0), (100_000,), minval=1e-12))
    assert abs(float(pareto_k_hat(log_weights)) - shape) < 4 * (1 + shape) / 949**0.5


def test_a_tail_is_fitted_where_a_weight_stands_out_and_not_where_what_lies_beyond_cannot_matter():
    """Weights 1 + scale X, X of a Pareto tail with k = 0.7, from nearly equal ones to ones of which a few count.

    Where no tail is fitted, the mean of M weights is to be off by no more than that of M independent draws, 1 / sqrt(M)
    relatively, as root of the mean square over the runs. Where one is fitted it is off by more, or nothing was to be found.
    """
    num, num_runs = 1000, 400
    generator = np.random.default_rng(0)
    find = jax.jit(jax.vmap(lambda log_weights: notable_k_hat(log_weights, normalize_weights(log_weights))))
    fit = jax.jit(jax.vmap(pareto_k_hat))
    unfitted, fitted = [], []
    for scale in (0.01, 0.03, 0.1):
        excess = (generator.uniform(size=(num_runs, num)) ** -0.7 - 1.0) / 0.7  # of mean 1 / 0.3
        weights = 1.0 + scale * excess
        means = weights.mean(axis=1)
        stands_out = weights.max(axis=1) > means * num**0.5 / 7
        log_weights = jnp.log(jnp.asarray(weights))
        np.testing.assert_array_equal(find(log_weights), np.where(stands_out, fit(log_weights), 0.0))
        errors = means / (1.0 + scale / 0.3) - 1.0
        unfitted.append(errors[~stands_out])
        fitted.append(errors[stands_out])
    quiet, loud = np.concatenate(unfitted), np.concatenate(fitted)
    assert len(quiet) > 300 and len(loud) > 300
    assert np.sqrt(np.mean(quiet**2)) < 1.0 / np.sqrt(num) < np.sqrt(np.mean(loud**2))


def test_equal_weights_have_no_tail_and_impossible_weights_are_never_trusted():
    assert float(pareto_k_hat(jnp.full(1000, -3.2))) == 0.0
    assert float(pareto_k_hat(-1000.0 + 1e-4 * jr.normal(jr.key(0), (1000,)))) == 0.0  # the rounding of a long sum
    assert float(pareto_k_hat(jnp.full(1000, -jnp.inf))) == jnp.inf
    assert float(pareto_k_hat(jnp.zeros(1000).at[7].set(jnp.nan))) == jnp.inf
    for impossible in (jnp.full(1000, -jnp.inf), jnp.zeros(1000).at[7].set(jnp.nan)):
        assert float(notable_k_hat(impossible, normalize_weights(impossible))) == jnp.inf
    assert float(weight_ess(jnp.full(50, 2.0))) == pytest.approx(50.0)
    assert float(weight_ess(jnp.zeros(50).at[1:].set(-jnp.inf))) == pytest.approx(1.0)
    assert float(weight_ess(jnp.full(50, -jnp.inf))) == 0.0
    np.testing.assert_array_equal(finite_log_weights(jnp.array([jnp.nan, -jnp.inf])), [0.0, 0.0])
    np.testing.assert_array_equal(finite_log_weights(jnp.array([jnp.nan, 1.0])), [-jnp.inf, 1.0])


def test_the_shifts_of_moments_are_what_the_weights_say():
    # exp(x / 2) makes N(1/2, 1) of N(0, 1). Two means of 100,000 and of exp(-1/4) times as many: 0.005, and four of these.
    positions = jr.normal(jr.key(0), (100_000, 2))
    mean, sd = moment_shifts(positions, positions[:, 1] / 2)
    assert abs(float(mean) - 0.5) < 0.02
    # The weighted sd has an error of 1 / sqrt(2 x 78,000) = 0.0025; the larger of two coordinates, four of it.
    assert float(sd) < 0.01
    # exp(-x^2 / 2) makes N(0, 1/2) of it: sds are too wide by sqrt(2) - 1.
    mean, sd = moment_shifts(positions, -0.5 * positions[:, 0] ** 2)
    assert float(mean) < 0.02 and abs(float(sd) - (2**0.5 - 1)) < 0.02
    # Sums of 100,000 floats of 32 bits, rounded at each of some 17 levels.
    np.testing.assert_allclose(moment_shifts(positions, jnp.zeros(100_000)), 0.0, atol=1e-4)


@pytest.mark.parametrize(
    "log_weights", [[0.0, -1e4, -jnp.inf, -jnp.inf], [0.0, 0.0, 0.0, 0.0], [-jnp.inf, 3.0, 0.0, 1.0]]
)
def test_weights_that_cannot_be_as_even_as_is_asked_are_flattened_as_far_as_they_go(log_weights):
    flat = np.asarray(flatten_log_weights(jnp.array(log_weights), 4.0 + 1e-6))
    is_possible = np.isfinite(log_weights)
    assert np.all(flat[is_possible] == 0.0) and np.all(flat[~is_possible] == -np.inf)


def test_resampling_uses_each_draw_in_proportion_to_its_weight():
    taken = jax.jit(resample, static_argnums=2)
    probs = np.array([0.1, 0.0, 0.25, 0.65])
    counts = np.bincount(taken(jnp.array(0.3), jnp.log(probs), 1000), minlength=4)
    assert np.all(np.abs(counts - 1000 * probs) <= 1)
    equal = taken(jnp.array(0.7), jnp.zeros(100), 100)
    np.testing.assert_array_equal(np.sort(equal), np.arange(100))
    assert not np.array_equal(equal, np.arange(100))
    assert np.bincount(taken(jnp.array(0.5), jnp.zeros(10), 25)).min() >= 2
    # Over all offsets the expected number is exact: here 40 of them stand for the uniform law.
    few = jax.vmap(lambda offset: taken(offset, jnp.log(probs), 2))((jnp.arange(40) + 0.5) / 40)
    np.testing.assert_allclose(np.bincount(np.ravel(few), minlength=4) / 80, probs, atol=1 / 40)


def test_chains_count_for_their_autocorrelation():
    # An AR(1) chain has ESS = M (1 - r) / (1 + r). Autocorrelations of 10,000 draws are off by 0.01 each, a sum of some ten
    # by 0.03, so the sum 1/3 that belongs to r = -0.5 by a tenth; three of these are allowed.
    correlation = np.array([0.0, 0.7, -0.5])
    noise = np.random.default_rng(0).normal(size=(501, 20, 3))
    path = np.empty((501, 20, 3))
    path[0] = noise[0]
    for t in range(1, 501):
        path[t] = correlation * path[t - 1] + np.sqrt(1 - correlation**2) * noise[t]
    ess = jax.jit(chain_ess)(jnp.swapaxes(jnp.asarray(path[1:]), 0, 1))
    np.testing.assert_allclose(ess, 10_000 * (1 - correlation) / (1 + correlation), rtol=0.3)


def test_chains_that_disagree_or_stand_still_count_for_little():
    apart = 0.01 * np.random.default_rng(0).normal(size=(10, 100)) + np.arange(10.0)[:, None]
    ess = jax.jit(chain_ess)(jnp.stack([jnp.asarray(apart), jnp.ones((10, 100))], axis=-1))
    assert 0.0 < float(ess[0]) < 20.0
    assert float(ess[1]) < 20.0


def density_of(log_density):
    """A target from its log density; all of it counts as prior."""

    def curvature(x):
        return log_density(x), jax.grad(log_density)(x), jax.hessian(log_density)(x)

    return LogDensity(
        lambda x: (log_density(x), jnp.zeros(())), log_density, jax.value_and_grad(log_density), curvature
    )


GAUSSIAN = density_of(lambda x: -0.5 * jnp.sum(x**2))
# Two modes, 12 standard deviations apart, along a direction that is no coordinate.
TWO_MODES = density_of(
    lambda x: jnp.logaddexp(*(-0.5 * jnp.sum((x - s * jnp.array([4.0, 3.0, -3.0])) ** 2) for s in (1, -1)))
)


def moved(target, starts, kernel=hamiltonian, step_size=0.5):
    """What the kernel's transitions alone do: sweeps would make up for a kernel that does not move."""
    ess, unit = jnp.asarray(1.0 * len(starts)), jnp.eye(starts.shape[1])
    moves = jax.jit(
        lambda key: move(key, target, starts, ess, unit, jnp.array(step_size), kernel, first_coordinate_moves=0)
    )
    return moves(jr.key(1))


def test_particles_that_move_forget_and_keep_their_law():
    end = moved(GAUSSIAN, jr.normal(jr.key(0), (1000, 3)), step_size=30.0)  # far too large at first
    assert bool(end.evidence.is_sound) and 0.05 < float(end.step_size) < 2.0
    assert float(end.evidence.autocorrelation) < 0.25
    # Four errors of a mean, 1 / sqrt(1,000), and of a standard deviation, 1 / sqrt(2,000).
    np.testing.assert_allclose(end.positions.mean(axis=0), 0.0, atol=0.13)
    np.testing.assert_allclose(end.positions.std(axis=0), 1.0, atol=0.09)
    np.testing.assert_allclose(end.log_prior, -0.5 * jnp.sum(end.positions**2, axis=1), rtol=1e-4, atol=1e-5)


def test_particles_that_stand_still_are_found_out():
    def frozen(key, target, positions, step_size):
        steps = hamiltonian(key, target, positions, step_size)
        return steps._replace(positions=positions, accept_prob=jnp.ones_like(steps.accept_prob))

    evidence = moved(GAUSSIAN, jr.normal(jr.key(0), (1000, 3)), frozen).evidence
    assert not bool(evidence.is_sound) and float(evidence.autocorrelation) > 0.9


def test_particles_that_hardly_move_are_found_out():
    def slow(key, target, positions, step_size):
        return hamiltonian(key, target, positions, jnp.array(1e-3))  # 64 leaps go a fifteenth of a standard deviation

    evidence = moved(GAUSSIAN, jr.normal(jr.key(0), (1000, 3)), slow).evidence
    assert not bool(evidence.is_sound) and float(evidence.autocorrelation) > MAX_AUTOCORRELATION


def test_particles_that_cannot_leave_their_mode_are_found_out():
    signs = jnp.where(jnp.arange(1000) < 300, 1.0, -1.0)[:, None]
    starts = signs * jnp.array([4.0, 3.0, -3.0]) + jr.normal(jr.key(0), (1000, 3))
    evidence = moved(TWO_MODES, starts).evidence
    assert not bool(evidence.is_sound) and float(evidence.autocorrelation) > MAX_AUTOCORRELATION


def test_particles_that_have_not_arrived_are_found_out():
    # All start at one point 30 standard deviations off: what they forget there says nothing, and they drift.
    def slow(key, target, positions, step_size):
        return hamiltonian(key, target, positions, jnp.array(2e-3))

    assert not bool(moved(GAUSSIAN, 30.0 + 1e-3 * jr.normal(jr.key(0), (1000, 3)), slow).evidence.is_sound)


def test_newton_finds_a_far_mode_through_a_region_that_is_not_concave():
    # The log density of a Student-t with 3 degrees of freedom, scale 0.1, at 50: flat and convex from afar.
    target = density_of(lambda z: -2.0 * jnp.sum(jnp.log1p(jnp.square((z - 50.0) / 0.1) / 3.0)))
    mode = jax.jit(lambda start: find_mode(target, start))(jnp.zeros(2))
    assert bool(mode.is_converged)
    np.testing.assert_allclose(mode.position, 50.0, atol=1e-3)
    # The second derivative of 2 log(1 + u^2 / 3) at 0 is 4 / 3, in units of the scale.
    np.testing.assert_allclose(mode.root @ mode.root.T, np.eye(2) * 0.01 * 3 / 4, rtol=1e-3, atol=1e-6)


def test_newton_leaves_a_flat_start_whose_full_step_overflows():
    # A weight about 1 with an unknown log variance: at (0, 0) the Hessian is singular, and a Newton step goes for ever.
    target = density_of(lambda z: -1.5 * z[0] - (1.0 + 0.5 * jnp.square(z[1] - 1.0)) * jnp.exp(-z[0]))
    mode = jax.jit(lambda start: find_mode(target, start))(jnp.zeros(2))
    assert bool(mode.is_converged)
    np.testing.assert_allclose(mode.position, [-np.log(1.5), 1.0], atol=1e-2)


def test_newton_says_when_there_is_no_mode():
    assert not bool(find_mode(density_of(lambda z: -jnp.sum(z)), jnp.zeros(2)).is_converged)


@jax.custom_vjp
def cubed(x):
    return x**3


# A slope that is made of the function itself, as a callback's is, has no forward mode.
cubed.defvjp(lambda x: (cubed(x), (x, cubed(x))), lambda kept, outer: (3.0 * outer * kept[1] / kept[0],))


@jax.custom_vjp
def slope_of_cube(x):
    return jax.pure_callback(lambda x: np.asarray(3.0 * np.square(x), np.float32), x, x, vmap_method="broadcast_all")


def no_second(*_):
    raise ValueError("no second derivative")


slope_of_cube.defvjp(no_second, no_second)


@jax.custom_vjp
def cubed_outside(x):
    return x**3


cubed_outside.defvjp(lambda x: (x**3, x), lambda x, outer: (outer * slope_of_cube(x),))


@pytest.mark.parametrize(("cube", "error"), [(lambda x: x**3, 1e-5), (cubed, 1e-5), (cubed_outside, 3e-2)])
def test_second_derivatives_take_the_modes_that_there_are(cube, error):
    # Differences of gradients in float32: a step of 0.005, and gradients rounded to 1e-6 of some 10.
    at = jnp.array([1.0, -2.0, 0.5])
    value, gradient, hessian = second_derivatives(lambda x: jnp.sum(cube(x)) + x[0] * x[1], at)
    np.testing.assert_allclose(value, np.sum(np.asarray(at) ** 3) - 2.0, rtol=1e-5)
    np.testing.assert_allclose(gradient, 3 * np.asarray(at) ** 2 + np.array([-2.0, 1.0, 0.0]), rtol=1e-5)
    expected = np.diag(6 * np.asarray(at)) + np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(hessian, expected, atol=error)


@pytest.mark.slow
def test_particles_moved_without_evidence_are_renewed_once_a_row_that_speaks_of_them_changed_their_weights():
    def program(arm):
        with numpyro.plate("arms", 2):
            score = numpyro.sample("score", dist.Normal(0.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(logits=score[arm]))

    engine = engines.reweight(RewardModel(program, 2), num_particles=64)
    update = quick_jit(engine.update)
    state = engine.init(jr.key(0))
    doubted = state.particles.evidence._replace(is_sound=jnp.array([False, True]))
    state = state._replace(particles=state.particles._replace(evidence=doubted))
    other, info = update(jr.key(1), state, Interaction(jnp.array([1]), jnp.array([1.0])))
    assert int(info.num_refreshes) == 0 and not bool(info.is_trusted)
    own, info = update(jr.key(1), other, Interaction(jnp.array([0]), jnp.array([1.0])))
    # Of these weights 85% count, (E s)^2 / E s^2 for a logistic s of a standard normal: nothing else would have renewed them.
    assert int(info.num_refreshes) == 1 and bool(info.is_trusted)
    _, info = update(jr.key(2), own, Interaction(jnp.array([0]), jnp.array([1.0])))
    assert int(info.num_refreshes) == 1


def test_moves_that_keep_diverging_end_early_and_are_flagged():
    """A funnel: where the log of the scale is low, no step size of the whole cloud suits; all windows would take 124."""
    rng = np.random.default_rng(0)
    log_scale = rng.standard_normal(400)
    starts = jnp.asarray(np.column_stack([log_scale, np.exp(log_scale) * rng.standard_normal(400)]))
    lengths = []

    def counting(key, target, positions, step_size):
        jax.debug.callback(lambda: lengths.append(1))
        return hamiltonian(key, target, positions, step_size)

    target = density_of(lambda x: -0.5 * x[0] ** 2 - 0.5 * (x[1] * jnp.exp(-x[0])) ** 2 - x[0])
    end = moved(target, starts, counting)
    jax.effects_barrier()
    assert not bool(end.evidence.is_sound) and float(end.evidence.autocorrelation) < MAX_AUTOCORRELATION
    assert len(lengths) == 4 + 8 + 16 + 32


def click(arm):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.5).expand([2]).to_event(1))
    numpyro.sample("reward", dist.Bernoulli(logits=2.0 * weight[arm]))


@pytest.mark.slow
def test_a_quick_update_is_the_update_wherever_nothing_is_renewed():
    engine = engines.reweight(RewardModel(click, 2), num_particles=200)
    update, quickly = quick_jit(engine.update), quick_jit(engine.capabilities.quick_update)
    rng = np.random.default_rng(0)
    state, num_quick, num_rows = engine.init(jr.key(0)), 0, 40
    for row in range(num_rows):
        rows = Interaction(jnp.array([row % 2]), jnp.array([float(rng.random() < 0.8)]))
        known, is_enough = quickly(jr.key(row), state, rows)[0::2]
        before, (state, info) = state, update(jr.key(row), state, rows)
        num_renewed = int(info.num_refreshes) - int(jnp.sum(before.particles.num_refreshes))
        assert bool(is_enough) == (num_renewed == 0)
        num_quick += int(is_enough)
        if is_enough:
            # The same operations in two programs: differences are roundings, of weights that are of the size of 1.
            jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4), known, state)
    assert 0 < num_quick < num_rows
