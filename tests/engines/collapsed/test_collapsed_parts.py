"""Log normalisers against numerical integrals, and particles on a target whose moments are known."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.integrate import dblquad, quad

from ppl_bandit import engines
from ppl_bandit.engines.collapsed.mixture import representative_particles
from ppl_bandit.engines.collapsed.statistics import (
    Statistics,
    changes_one_element,
    has_only_elements,
    log_normalizer,
    one_element_change,
    recentre_statistics,
    zero_statistics,
)
from ppl_bandit.engines.exact.families.layout import Layout, SiteBlock
from ppl_bandit.engines.exact.families.posterior import generic_point
from ppl_bandit.engines.particles import tempering
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT, pareto_k_hat
from ppl_bandit.engines.particles.tempering import TemperingResult, follow_path, max_autocorrelation
from ppl_bandit.numerics.arrow_matrices import as_arrow
from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto
from ppl_bandit.program.model.reward_model import RewardModel


def layout_of(*sites, power=(), members=((),), owner=-1):
    own = np.array(members, np.int32)
    own = own if own.size else np.zeros((0, 0), np.int32)
    return Layout(sites, np.array(power, float), own, np.ones(own.shape, bool), np.full(len(own), owner))


def point(layout):
    return jax.tree.map(jnp.zeros_like, generic_point(layout))


def natural_of(layout, elements=None, **fields):
    empty = zero_statistics(layout, point(layout)).natural
    given = {name: jnp.asarray(value, float) for name, value in fields.items()}
    if "quadratic" in given:
        given["quadratic"] = as_arrow(given["quadratic"], *layout.leaves)
    own = {group: jnp.asarray(value, float) for group, value in (elements or {}).items()}
    return empty._replace(elements={**empty.elements, **own}, **given)


def test_the_log_normalizer_is_the_log_integral_for_every_family():
    with jax.enable_x64(True):
        unit = layout_of(SiteBlock("w", "unit", (1,), 0, 1.0, 3.0))
        found = log_normalizer(unit, natural_of(unit, {"unit": [[1.3, 0.4]]}))
        exact = quad(lambda z: ((z - 1) / 2) ** 1.3 * (1 - (z - 1) / 2) ** 0.4, 1, 3)[0]
        np.testing.assert_allclose(found, np.log(exact), rtol=1e-7)

        scale = layout_of(SiteBlock("v", "positive", (1,), 0), power=[-1.0])
        found = log_normalizer(scale, natural_of(scale, {"positive": [[3.5, -0.7]]}))
        exact = quad(lambda z: z**-3.5 * np.exp(-0.7 / z), 0, np.inf)[0]
        np.testing.assert_allclose(found, np.log(exact), rtol=1e-7)

        simplex = layout_of(SiteBlock("p", "simplex", (3,), 0, num_event_dims=1))
        found = log_normalizer(simplex, natural_of(simplex, {"simplex 3": [[0.5, 1.0, 0.2]]}))
        exact = dblquad(lambda y, x: x**0.5 * y * (1 - x - y) ** 0.2, 0, 1, 0, lambda x: 1 - x)[0]
        np.testing.assert_allclose(found, np.log(exact), rtol=1e-6)

        joint = layout_of(
            SiteBlock("v", "positive", (1,), 0),
            SiteBlock("x", "real", (1,), 0),
            power=[-2.0],
            members=[[0]],
            owner=0,
        )
        natural = natural_of(joint, {"positive": [[2.5, -1.1]]}, linear=[[0.4]], quadratic=[[[1.7]]])
        found = log_normalizer(joint, natural)

        def density(x, z):
            u = z**-2.0
            return u**2.5 * np.exp(-1.1 * u + 0.4 * u * x - 0.5 * 1.7 * u * x * x)

        exact = dblquad(density, 0.02, 60.0, lambda z: -12 * z, lambda z: 12 * z)[0]
        np.testing.assert_allclose(found, np.log(exact), atol=1e-5)  # the integral ends at 60


def test_rows_of_one_probability_and_one_rate_change_the_normalizer_by_theirs_alone():
    with jax.enable_x64(True):
        sites = SiteBlock("w", "unit", (3,), 0, 1.0, 3.0), SiteBlock("v", "positive", (2,), 0)
        layout = layout_of(*sites, power=[-1.0, 1.0])
        assert has_only_elements(layout) and not has_only_elements(
            layout_of(SiteBlock("x", "real", (1,), 0), members=[[0]])
        )
        before = natural_of(
            layout, {"unit": [[2.0, 7.5], [0.4, 30.0], [12.0, 0.1]], "positive": [[3.5, -0.7], [1.2, -4.0]]}
        )
        for unit, positive in (
            ([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [2.0, -1.0]]),
            ([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]),  # of no rate
            ([[3.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]),  # several trials
            ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.5, -2.0], [0.0, 0.0]]),
        ):
            fresh = natural_of(layout, {"unit": unit, "positive": positive})
            assert changes_one_element(fresh)
            after = jax.tree.map(jnp.add, before, fresh)
            exact = log_normalizer(layout, after) - log_normalizer(layout, before)
            np.testing.assert_allclose(one_element_change(layout, before, fresh), exact, atol=1e-12)
        assert not changes_one_element(natural_of(layout, {"unit": [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]}))
        assert not changes_one_element(natural_of(layout, {"positive": [[0.0, -1.0], [0.0, -1.0]]}))


@pytest.mark.parametrize("size", [3, 12])  # written out, and by the library
def test_gaussians_of_any_size_have_their_normalizer_about_any_centre(size):
    rng = np.random.default_rng(0)
    root = rng.standard_normal((size, size))
    precision, linear = root @ root.T + np.eye(size), rng.standard_normal(size)
    layout = layout_of(SiteBlock("x", "real", (size,), 0), members=[range(size)])
    with jax.enable_x64(True):
        natural = natural_of(layout, quadratic=precision[None], linear=linear[None])
        exact = 0.5 * linear @ np.linalg.solve(precision, linear) - 0.5 * np.linalg.slogdet(precision)[1]
        exact += 0.5 * size * np.log(2 * np.pi)
        np.testing.assert_allclose(log_normalizer(layout, natural), exact, rtol=1e-10)
        old, new = point(layout), point(layout)._replace(real=jnp.asarray(rng.standard_normal(size)))
        moved = recentre_statistics(layout, Statistics(natural, jnp.zeros(())), old, new)
        np.testing.assert_allclose(log_normalizer(layout, moved.natural) + moved.constant, exact, rtol=1e-10)


def test_a_normalizer_that_is_made_of_rounding_is_not_a_number():
    """A common mean of precision 1/4 behind five arms of precision 1e8: single precision has lost the quarter."""
    precision = np.diag([0.25 + 5e8, *[1e8] * 5])
    precision[0, 1:] = precision[1:, 0] = -1e8
    layout = layout_of(SiteBlock("x", "real", (6,), 0), members=[range(6)])
    assert not np.isfinite(log_normalizer(layout, natural_of(layout, quadratic=precision[None])))
    with jax.enable_x64(True):
        exact = 3 * np.log(2 * np.pi) - 0.5 * (np.log(0.25) + 5 * np.log(1e8))
        np.testing.assert_allclose(
            log_normalizer(layout, natural_of(layout, quadratic=precision[None])), exact, rtol=1e-6
        )


def test_particles_that_stand_for_all_are_representative_particles_in_every_coordinate():
    """64 cells of equal weight, 8 x 8 in two dimensions, one particle of each.

    A particle picked at random from an eighth of a Normal law is off its mean by .2 to .5 standard deviations, so that 64 of
    them leave about .04 in a mean; spread out along one coordinate alone, the other's mean is off by 1 / sqrt(64) = .125. Over
    20 means the largest of these is about .08, and .25.
    """
    pick = jax.jit(representative_particles)
    errors = []
    for seed in range(10):
        positions, log_weights = jr.normal(jr.key(seed), (1000, 2)), 0.3 * jr.normal(jr.key(100 + seed), (1000,))
        weights = np.asarray(jax.nn.softmax(log_weights))
        mean = weights @ np.asarray(positions)
        errors.append(np.abs(np.asarray(positions)[pick(positions, log_weights)].mean(axis=0) - mean))
    assert np.max(errors) < 0.15


def test_of_many_clouds_those_that_are_wanted_are_moved_as_each_would_be_alone():
    """40 clouds of 50 particles, of which 7 are wanted: fewer than are moved at once, in an order of their own."""
    positions = jr.normal(jr.key(0), (40, 50, 1))
    centres = jnp.linspace(-1.0, 2.0, 40)
    is_wanted = jnp.isin(jnp.arange(40), jnp.array([3, 4, 11, 17, 25, 26, 39]))

    def targets(centre, x, part):
        return -0.5 * (x[:, 0] - part * centre) ** 2

    def move(key, x, centre, wanted):
        return follow_path(key, targets, centre, start_of(x, targets(centre, x, 0.0)), wanted)

    keys = jr.split(jr.key(1), 40)
    together = jax.jit(jax.vmap(move))(keys, positions, centres, is_wanted)
    alone = jax.jit(lambda *rows: jax.lax.map(lambda row: move(*row), rows))(keys, positions, centres, is_wanted)
    np.testing.assert_array_equal(together.num_stages > 0, is_wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), together, alone)


def start_of(positions, log_targets):
    zero = jnp.zeros((), positions.dtype)
    return TemperingResult(
        positions, log_targets, jnp.zeros_like(log_targets), zero, zero, zero, zero, jnp.zeros((), int)
    )


def test_particles_follow_a_target_that_is_far_away_and_know_the_ratio_of_integrals():
    """From N(0, 1) to N(8, .1^2) in two dimensions, unnormalised: exact moments, and the ratio of integrals .01.

    2,000 particles: a mean is off by 1 / sqrt(2,000) = .022 standard deviations and a standard deviation by .016; four of
    these. The log ratio has the standard error that is reported.
    """
    positions = jr.normal(jr.key(0), (2000, 2))

    def targets(_, x, part):
        near, far = -0.5 * jnp.sum(x**2, axis=1), -0.5 * jnp.sum(((x - 8.0) / 0.1) ** 2, axis=1)
        return near + part * (far - near)

    moved = jax.jit(lambda key, x: follow_path(key, targets, (), start_of(x, targets((), x, 0.0)), jnp.array(True)))(
        jr.key(1), positions
    )
    drawn = (np.asarray(moved.positions) - 8.0) / 0.1
    assert np.max(np.abs(drawn.mean(axis=0))) < 4 * 0.022 and np.max(np.abs(drawn.std(axis=0) - 1)) < 4 * 0.016
    assert int(moved.num_stages) > 1 and float(moved.autocorrelation) <= max_autocorrelation(2000)
    assert abs(float(moved.log_ratio) - np.log(0.01)) < 4 * np.sqrt(float(moved.squared_error)) + 0.02


def test_particles_that_cannot_move_do_not_pass_for_fresh():
    """A target of spikes at the particles themselves: nothing proposed is ever accepted."""
    positions = jr.normal(jr.key(0), (100, 1))

    def targets(_, x, part):
        distance = jnp.min(jnp.abs(x - positions[:, 0]), axis=1)
        return jnp.where(distance < 1e-12, 0.0, -jnp.inf) + part * jnp.where(x[:, 0] > 0, 0.0, -2.0)

    moved = follow_path(jr.key(1), targets, (), start_of(positions, jnp.zeros(100)), jnp.array(True))
    assert float(moved.autocorrelation) > max_autocorrelation(100) and float(moved.acceptance) == 0.0


def test_particles_that_a_path_is_too_long_for_are_weighted_to_its_end(monkeypatch):
    """Stopped on the way from N(0, 1) to N(8, .1^2), they are no sample of it: their weights say so, and make them one."""
    monkeypatch.setattr(tempering, "_MAX_STAGES", 3)
    positions = jr.normal(jr.key(0), (500, 1))

    def targets(_, x, part):
        return -0.5 * (1.0 - part) * x[:, 0] ** 2 - 0.5 * part * ((x[:, 0] - 8.0) / 0.1) ** 2

    moved = follow_path(jr.key(1), targets, (), start_of(positions, targets((), positions, 0.0)), jnp.array(True))
    assert int(moved.num_stages) == 3
    np.testing.assert_allclose(moved.log_targets + moved.log_weights, targets((), moved.positions, 1.0), rtol=1e-4)
    assert float(jnp.std(moved.log_weights)) > 10.0


def test_the_k_hat_of_weights_whose_tail_is_found_in_single_precision_is_that_of_a_sort():
    """Tails that raise the flag and tails that do not, a level far from 0, and weights that single precision cannot tell apart.

    They are the same numbers but for the rounding of exponentials, 1e-16: of exceedances of 1e-10, in the last case, a
    millionth, and so much of their logarithms, of which k-hat is a mean.
    """
    noise = np.random.default_rng(0).standard_normal(1000)
    uniform = np.random.default_rng(1).uniform(size=1000)
    cases = [
        *(-shape * np.log(uniform) for shape in (0.2, 0.6, 0.8, 1.5)),
        0.05 * noise,
        -1e5 - 0.9 * np.log(uniform),
        np.where(uniform > 0.95, 3.0 * uniform, 1e-9 * noise),
    ]
    with jax.enable_x64(True):
        find = jax.jit(pareto_k_hat)
        fires = []
        for log_weights in cases:
            ordered = np.sort(log_weights)[::-1][:96]
            weights = np.exp(ordered - ordered[0])
            shape, _ = fit_generalized_pareto(jnp.asarray(weights[:-1] - weights[-1]))
            expected = (95 * float(shape) + 5.0) / 105.0
            assert abs(float(find(jnp.asarray(log_weights))) - expected) < 1e-6
            fires.append(expected > MAX_K_HAT)
        assert any(fires) and not all(fires)


@pytest.mark.slow
def test_a_factor_is_part_of_the_prior():
    """Rates a ~ Gamma(2, g), g ~ Gamma(3, 2), weighed by exp(-.3 sum a): integrated over g by quadrature.

    Given g the rates are Gamma(2, g + .3), and g has the density Gamma(3, 2) (g / (g + .3))^4. Of 4,000 draws, at least half of
    them different, a mean is known to sd / sqrt(2,000); four of these are allowed, and without the factor it is off by forty.
    """

    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(3.0, 2.0))
        with numpyro.plate("arms", 2):
            level = numpyro.sample("level", dist.Gamma(2.0, rate))
        numpyro.factor("belief", -0.3 * jnp.sum(level))
        numpyro.sample("reward", dist.Poisson(level[arm]))

    with jax.enable_x64(True):
        engine = engines.collapsed(RewardModel(program, 2), num_particles=4000)
        sample = jax.jit(engine.sample, static_argnums=2)
        draws = jax.device_get(sample(jr.key(1), jax.jit(engine.init)(jr.key(0)), 4000))
    g = np.linspace(1e-3, 20.0, 20_000)
    density = g**2 * np.exp(-2.0 * g) * (g / (g + 0.3)) ** 4
    density /= density.sum()
    mean = density @ (2.0 / (g + 0.3))
    sd = np.sqrt(density @ (6.0 / (g + 0.3) ** 2) - mean**2)
    assert np.max(np.abs(np.mean(draws["level"], axis=0) - mean)) < 4.0 * sd / np.sqrt(2000)
