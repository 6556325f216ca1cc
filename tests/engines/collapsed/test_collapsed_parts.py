"""Log normalisers against numerical integrals, roots of covariances, and readings that serve until particles move."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import per_arm
from scipy.integrate import dblquad, quad

from ppl_bandit import engines
from ppl_bandit.engines.inner.data_sums import (
    changes_one_element,
    has_only_elements,
    log_normalizer,
    no_rows,
    one_element_change,
)
from ppl_bandit.engines.inner.density import Natural, generic_point, relative_to
from ppl_bandit.engines.inner.layout import Layout, SiteBlock
from ppl_bandit.engines.laws.mixture import representative_particles
from ppl_bandit.engines.updates import collapsed_learning as learning, collapsed_posterior
from ppl_bandit.engines.updates.collapsed_posterior import add_rows, factorize, gaussian_integral, precisions_of
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import as_arrow
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


def layout_of(*sites, power=(), members=((),), owner=-1):
    own = np.array(members, np.int32)
    own = own if own.size else np.zeros((0, 0), np.int32)
    return Layout(sites, np.array(power, float), own, np.ones(own.shape, bool), np.full(len(own), owner))


def point(layout):
    return jax.tree.map(jnp.zeros_like, generic_point(layout))


def natural_of(layout, elements=None, **fields):
    empty = no_rows(layout, point(layout))
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
            SiteBlock("v", "positive", (1,), 0), SiteBlock("x", "real", (1,), 0), power=[-2.0], members=[[0]], owner=0
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


@pytest.mark.parametrize("size", [3, pytest.param(12, marks=pytest.mark.slow)])  # written out, and by the library
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
        moved = relative_to(layout, natural, old, new)
        np.testing.assert_allclose(log_normalizer(layout, moved) + moved.constant, exact, rtol=1e-10)


@pytest.mark.slow
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


def test_representative_particles_are_stratified_over_every_coordinate():
    """64 cells of equal weight, 8 x 8 in two dimensions, one particle of each.

    A particle picked at random from an eighth of a Normal law is off its mean by .2 to .5 standard deviations, so that 64 of
    them leave about .04 in a mean; stratified along one coordinate alone, the other's mean is off by 1 / sqrt(64) = .125. Over
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


@pytest.mark.slow
def test_a_factor_is_part_of_the_prior():
    """Rates a ~ Gamma(2, g), g ~ Gamma(3, 2), weighed by exp(-.3 sum a): integrated over g by quadrature.

    Given g the rates are Gamma(2, g + .3), and g has the density Gamma(3, 2) (g / (g + .3))^4. Of 4,000 draws, at least half of
    them different, a mean is known to sd / sqrt(2,000); four of these are allowed, and without the factor it is off by forty.
    """

    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(3.0, 2.0))
        level = per_arm("level", dist.Gamma(2.0, rate))
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


# Roots of covariances that rows change one after another are those of the sum of their precisions


NUM_BLOCKS, SIZE, NUM_ROOTS = 2, 5, 3


def precisions(seed=0):
    """Return precisions with a condition number of a million, as of close arms, and linear coefficients."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((NUM_ROOTS, NUM_BLOCKS, SIZE, SIZE)))[0]
    scales = 10.0 ** np.linspace(0.0, 6.0, SIZE)
    matrices = np.einsum("mrik,k,mrjk->mrij", axes, scales, axes)
    return matrices, rng.standard_normal((NUM_ROOTS, NUM_BLOCKS, SIZE))


def arrow(matrices):
    """Return precisions of particles with the particles in the last axis."""
    return jax.vmap(lambda own: as_arrow(own, 0, 0), out_axes=-1)(jnp.asarray(matrices))


def row_of(directions, coefficients):
    """Return the natural parameters of rows, the sum over rows of h h' and c h in each block."""
    quadratic = np.einsum("kri,krj->rij", directions, directions)
    linear = jnp.asarray(np.einsum("kri,kr->ri", directions, coefficients))
    return Natural({}, linear, as_arrow(quadratic, 0, 0), jnp.zeros(()))


def rows_of_arms():
    rng = np.random.default_rng(1)
    return [
        (np.eye(SIZE)[rng.integers(0, SIZE, (1, NUM_BLOCKS))] / 0.3, rng.standard_normal((1, NUM_BLOCKS)))
        for _ in range(40)
    ]


def rows_of_features():
    rng = np.random.default_rng(2)
    return [(rng.standard_normal((1, NUM_BLOCKS, SIZE)), rng.standard_normal((1, NUM_BLOCKS))) for _ in range(40)]


def rows_of_one_block():
    return [(h * np.array([1.0, 0.0])[:, None], c) for h, c in rows_of_features()]


def batches():
    rng = np.random.default_rng(3)
    return [(rng.standard_normal((3, NUM_BLOCKS, SIZE)), rng.standard_normal((3, NUM_BLOCKS))) for _ in range(10)]


def nothing():
    return [(np.zeros((1, NUM_BLOCKS, SIZE)), np.zeros((1, NUM_BLOCKS)))]


@pytest.mark.parametrize("rows", [rows_of_arms, rows_of_features, rows_of_one_block, batches, nothing])
def test_rows_change_roots_as_a_factorization_of_all_data_would(rows):
    with jax.enable_x64(True):
        matrices, linear = precisions()
        roots = factorize(arrow(matrices), jnp.moveaxis(jnp.asarray(linear), 0, -1))
        add = jax.jit(add_rows)
        for directions, coefficients in rows():
            fresh = row_of(directions, coefficients)
            roots = add(roots, fresh)
            matrices, linear = matrices + fresh.quadratic.core, linear + fresh.linear
        covariances = np.einsum("mrik,mrjk->mrij", roots.root, roots.root)
        # Rounding, times the condition number
        np.testing.assert_allclose(covariances, np.linalg.inv(matrices), atol=1e-9, rtol=1e-9)
        np.testing.assert_allclose(precisions_of(roots), matrices, rtol=1e-8, atol=1e-8 * np.abs(matrices).max())
        last = jnp.moveaxis(jnp.asarray(linear), 0, -1)
        exact = arrow_matrices.gaussian_integral(arrow(matrices), last)
        for found, value in zip(gaussian_integral(roots, last), exact, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-9)


def test_a_matrix_that_is_not_positive_definite_has_no_log_determinant():
    with jax.enable_x64(True):
        matrices, linear = precisions()
        matrices[0] = -matrices[0]
        roots = factorize(arrow(matrices), jnp.moveaxis(jnp.asarray(linear), 0, -1))
    assert np.all(np.isnan(roots.log_det[0]))
    assert np.all(np.isfinite(roots.log_det[1:]))


# What is read of particles when they move serves until they move again, as if it were read at every row


NUM_ROWS = 12


def shared(arm):
    """One sum for all particles, about a centre that moves with them."""
    spread = numpyro.sample("spread", dist.LogNormal(0.0, 1.0))
    mean = per_arm("mean", dist.Normal(1.0, spread))
    numpyro.sample("reward", dist.Normal(mean[arm], 0.5))


def separable(arm):
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    mean = per_arm("mean", dist.Normal(0.0, 3.0))
    numpyro.sample("reward", dist.Normal(mean[arm], noise))


def by_rows(arm, context):
    power = numpyro.sample("power", dist.Normal(0.0, 1.0))
    rate = per_arm("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("reward", dist.Poisson(rate[arm] * context**power))


def elements(arm):
    """Probabilities and rates alone: a row changes what it is about, and nothing else."""
    mean_rate = numpyro.sample("mean_rate", dist.Beta(1.0, 3.0))
    buys = per_arm("buys", dist.Beta(8.0 * mean_rate, 8.0 * (1.0 - mean_rate)))
    numpyro.sample("reward", dist.Binomial(9, buys[arm]))


CASES = {
    "elements": (elements, None, np.arange(NUM_ROWS) % 5 + 5.0),
    "shared": (shared, None, 2.0 + 3.0 * np.sin(np.arange(NUM_ROWS))),
    "separable": (separable, None, 2.0 + 0.1 * np.sin(np.arange(NUM_ROWS))),
    "by_rows": (by_rows, jnp.array(2.0), np.arange(NUM_ROWS) % 5 + 2.0),
}


def learn(name, *, is_at_once, at_a_time=1):
    """Return states, evidence and readings after rows, in order, for three seeds: each alone, or all at once."""
    program, context, rewards = CASES[name]
    model = RewardModel(program, 2, context)
    contexts = None if context is None else 1.0 + jnp.arange(NUM_ROWS) / 4
    rows = Interaction(jnp.arange(NUM_ROWS) % 2, jnp.asarray(rewards), contexts)
    engine = engines.collapsed(model, num_particles=60)

    def run(key):
        def step(state, new):
            number, row = new
            state, info = engine.update(jr.fold_in(key, number), state, row)
            return state, info

        pieces = jax.tree.map(lambda leaf: leaf.reshape(-1, at_a_time, *leaf.shape[1:]), rows)
        state, infos = jax.lax.scan(step, engine.init(key), (jnp.arange(NUM_ROWS // at_a_time), pieces))
        return state._replace(outer_statistics=None, roots=None), infos, state.outer_statistics

    keys = jr.split(jr.key(3), 3)
    return jax.jit(jax.vmap(run) if is_at_once else lambda own: jax.lax.map(run, own))(keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["separable", "shared", "by_rows"])
def test_a_reading_serves_until_particles_move(name, monkeypatch):
    """The same random numbers: what differs is rounding, some 1e-16 of a log density, over 12 rows and refreshes.

    Many clouds at once read those that moved by a way of their own.
    """
    with jax.enable_x64(True):
        held, evidence, reading = learn(name, is_at_once=name != "separable")
        monkeypatch.setattr(collapsed_posterior, "_MAX_CACHED", 0)
        anew, _, nothing = learn(name, is_at_once=False)
    assert reading is not None and nothing is None
    assert np.all(np.asarray(evidence.num_refreshes[:, -1]) >= 1)
    assert np.all(np.asarray(evidence.num_refreshes[:, -1]) < NUM_ROWS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), held, anew)


@pytest.mark.slow
@pytest.mark.parametrize("at_a_time, is_at_once", [(1, False), (1, True), (3, False), (3, True)])
def test_log_targets_are_carried_on_by_what_rows_change(at_a_time, is_at_once, monkeypatch):
    """As if all elements were integrated at every row; three rows are of both arms, of which one change does not tell."""
    calls, one_element_change = [], learning.one_element_change
    monkeypatch.setattr(
        learning, "one_element_change", lambda *args: (calls.append(args), one_element_change(*args))[1]
    )
    with jax.enable_x64(True):
        carried, evidence, _ = learn("elements", is_at_once=is_at_once, at_a_time=at_a_time)
        assert calls  # it is carried on
        monkeypatch.setattr(learning, "_can_accumulate", lambda *_: False)
        anew, _, _ = learn("elements", is_at_once=False, at_a_time=at_a_time)
    assert np.all(np.asarray(evidence.num_refreshes[:, -1]) < NUM_ROWS // at_a_time)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), carried, anew)
