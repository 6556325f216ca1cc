"""Gaussian blocks that fall into leaves without a core: found in programs, and the same posterior as without."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import engines
from ppl_bandit.engines.inner.layout import Layout
from ppl_bandit.engines.proof import assignment
from ppl_bandit.engines.proof.assignment import find_scales, read_supports
from ppl_bandit.engines.proof.outer import given
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, NotConjugate


def hierarchy_of(num_arms):
    def program(arm):
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        common = numpyro.sample("common", dist.Normal(0.0, 2.0))
        with numpyro.plate("arms", num_arms):
            mean = numpyro.sample("mean", dist.Normal(common, spread))
        numpyro.sample("reward", dist.Normal(mean[arm], 1.0))

    return program


def random_slopes(arm, context):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    base = numpyro.sample("base", dist.Normal(0.0, 1.0))
    with numpyro.plate("arms", 5):
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        slope = numpyro.sample("slope", dist.Normal(base, spread))
    numpyro.sample("reward", dist.Normal(shift[arm] + slope[arm] * context["price"], 1.0))


def three_levels(arm):
    """Nine arms in three groups, whose means have a mean."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    top = numpyro.sample("top", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", 3):
        group = numpyro.sample("group", dist.Normal(top, 1.0))
    with numpyro.plate("arms", 9):
        mean = numpyro.sample("mean", dist.Normal(group[jnp.arange(9) // 3], spread))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


def crossed(arm):
    """Twelve arms, each of one of three brands and one of four colours."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("brands", 3):
        brand = numpyro.sample("brand", dist.Normal(0.0, spread))
    with numpyro.plate("colours", 4):
        colour = numpyro.sample("colour", dist.Normal(0.0, spread))
    numpyro.sample("reward", dist.Normal(brand[(jnp.arange(12) // 4)[arm]] + colour[(jnp.arange(12) % 4)[arm]], 1.0))


def shared_weights(arm, context):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    weights = numpyro.sample("weights", dist.Normal(0.0, scale).expand([4]).to_event(1))
    numpyro.sample("reward", dist.Normal(context["x"] @ weights + 0.1 * arm, 1.0))


PRICE = {"price": jnp.array(0.5)}
CASES = {
    "hierarchy": (hierarchy_of(6), 6, None, (6, 1), 1),
    "random slopes": (random_slopes, 5, PRICE, (5, 2), 1),
    "three levels": (three_levels, 9, None, (10, 1), 3),
    "crossed effects": (crossed, 12, None, (4, 1), 3),
    "weights that every row ties": (shared_weights, 2, {"x": jnp.array([1.0, -0.5, 0.3, 2.0])}, (0, 0), 4),
}


@pytest.mark.parametrize(
    "name", [n if n in ("random slopes", "three levels") else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_what_only_a_core_ties_is_a_leaf(name):
    program, num_arms, context, leaves, num_core = CASES[name]
    model = RewardModel(program, num_arms, context)
    outer = "scale" if "scale" in model.latent_shapes else "spread"
    with jax.enable_x64(True):
        inner = given(model, {outer: jnp.array(0.7)})
        layout = assignment.split_gaussian_blocks(inner, find_scales(inner, read_supports(inner)), around_cores=True)
    assert layout.leaves == leaves
    assert layout.members.shape == (1, leaves[0] * leaves[1] + num_core)
    assert sorted(layout.members[layout.is_member]) == list(range(layout.count("real")))


@pytest.mark.slow
def test_a_tie_that_was_overlooked_is_found_by_the_certificate(monkeypatch):
    """Every reward reads the first arm too; told that it does not, the engine refuses rather than leave the tie out."""

    def program(arm):
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        common = numpyro.sample("common", dist.Normal(0.0, 2.0))
        with numpyro.plate("arms", 4):
            mean = numpyro.sample("mean", dist.Normal(common, spread))
        numpyro.sample("reward", dist.Normal(mean[arm] + 0.3 * mean[0], 1.0))

    read = assignment._terms_of_reals

    def overlooking(model, layout):
        groups = read(model, layout)
        first = next(site for site in layout.sites if site.name == "mean").start
        groups[groups[:, first : first + 4].sum(axis=1) > 1, first] = False
        return groups

    monkeypatch.setattr(assignment, "_terms_of_reals", overlooking)
    with pytest.raises(NotConjugate, match="not conjugate given spread|log likelihood"):
        engines.collapsed(RewardModel(program, 4), ("spread",))


def test_leaves_of_unequal_size_are_filled_up():
    """Arms of one real and of two, around a core that has the most ties: the places between hold no member."""
    sizes = [1, 2, 1, 2, 1]
    ends = np.cumsum(sizes)
    groups = [[*range(end - size, end), ends[-1]] for size, end in zip(sizes, ends, strict=True)]
    reads = np.zeros((len(groups), ends[-1] + 1), bool)
    for row, group in zip(reads, groups, strict=True):
        row[group] = True
    num = reads.shape[1]
    layout = Layout((), np.zeros(0), np.arange(num, dtype=np.int32)[None], np.ones((1, num), bool), np.array([-1]))
    found = assignment._around_cores(layout, reads)
    assert found.leaves == (5, 2) and found.members.shape == (1, 11)
    by_leaf = [
        set(own[inside])
        for own, inside in zip(found.members[0, :10].reshape(5, 2), found.is_member[0, :10].reshape(5, 2), strict=True)
    ]
    assert by_leaf == [set(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    assert found.members[0, 10] == ends[-1] and found.is_member[0, 10]


@pytest.mark.slow
@pytest.mark.parametrize("program", [hierarchy_of(5), three_levels], ids=["hierarchy", "three levels"])
def test_leaves_change_the_work_and_not_the_posterior(program, monkeypatch):
    num_arms = 9 if program is three_levels else 5
    rows = Interaction(jnp.arange(30) % num_arms, jnp.asarray(np.random.default_rng(0).normal(1.0, 1.0, size=30)), None)
    found, firsts = [], []
    for is_plain in (False, True):
        if is_plain:
            monkeypatch.setattr(assignment, "_MAX_LEAF", 0)
        with jax.enable_x64(True):
            engine = engines.collapsed(RewardModel(program, num_arms), num_particles=500)
            start, update = jax.jit(engine.init)(jr.key(0)), jax.jit(engine.update)
            _, early = update(jr.key(1), start, rows._replace(mask=jnp.arange(30) < 3))
            state, info = update(jr.key(1), start, rows._replace(mask=jnp.ones(30, bool)))
            draws = jax.jit(engine.sample, static_argnums=2)(jr.key(2), state, 2000)
        assert info.is_trusted and early.num_refreshes == 0
        found.append((float(info.log_evidence), float(info.log_evidence_error), np.asarray(draws["mean"])))
        firsts.append(float(early.log_evidence))
    # The same particles, and until they move the same integrals to rounding.
    np.testing.assert_allclose(firsts[0], firsts[1], rtol=1e-10)
    (evidence, error, own), (other_evidence, other_error, other) = found
    # Two clouds of the same law, moved by other random numbers where rounding tells them apart.
    assert abs(evidence - other_evidence) <= 4 * np.hypot(error, other_error)
    # Means of 2,000 draws whose particles are shared by some: 4.5 standard errors of the difference of two means of 1,000.
    assert np.all(np.abs(own.mean(0) - other.mean(0)) <= 4.5 * np.sqrt(2 / 1000) * own.std(0))
    assert np.all(np.abs(own.std(0) / other.std(0) - 1.0) <= 4.5 / np.sqrt(1000))


@pytest.mark.slow
def test_a_hierarchy_over_forty_arms_is_that_of_quadrature():
    num_arms, num_draws = 40, 4000
    rng = np.random.default_rng(3)
    arm = rng.integers(0, num_arms, size=300)
    reward = rng.normal(1.0, 0.5, size=num_arms)[arm] + rng.standard_normal(300)
    count, total = np.bincount(arm, minlength=num_arms), np.bincount(arm, reward, minlength=num_arms)
    # Of each spread: means, variances and weight, with the common mean integrated out in closed form, by hand.
    grid = np.linspace(0.002, 2.0, 1000)
    means, variances, logs = [], [], []
    for spread in grid:
        precision = np.diag(count + spread**-2.0)
        precision = np.block(
            [
                [precision, -np.full((num_arms, 1), spread**-2.0)],
                [-np.full((1, num_arms), spread**-2.0), np.array([[0.25 + num_arms * spread**-2.0]])],
            ]
        )
        covariance = np.linalg.inv(precision)
        mean = covariance @ np.append(total, 0.0)
        means.append(mean[:num_arms])
        variances.append(np.diag(covariance)[:num_arms])
        logs.append(
            0.5 * total @ mean[:num_arms]
            - 0.5 * np.linalg.slogdet(precision)[1]
            - num_arms * np.log(spread)
            - 0.5 * spread**2
        )
    weights = np.exp(logs - np.max(logs))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    sd = np.sqrt(weights @ (np.array(variances) + (np.array(means) - mean) ** 2))
    with jax.enable_x64(True):
        engine = engines.collapsed(RewardModel(hierarchy_of(num_arms), num_arms), num_particles=4000)
        rows = Interaction(jnp.asarray(arm), jnp.asarray(reward), None)
        state, info = jax.jit(engine.update)(jr.key(0), jax.jit(engine.init)(jr.key(1)), rows)
        draws = np.asarray(jax.jit(engine.sample, static_argnums=2)(jr.key(2), state, num_draws)["mean"])
    assert info.is_trusted
    # The largest of 40 errors of means of 4,000 draws passes 4.5 standard errors once in 4,000 times; those of the spread's
    # particles, shared by all arms, add less than half of one.
    assert np.max(np.abs(draws.mean(0) - mean) / sd) <= 5.0 / np.sqrt(num_draws)
    assert np.max(np.abs(draws.std(0) / sd - 1.0)) <= 5.0 / np.sqrt(2 * num_draws) + 0.01
