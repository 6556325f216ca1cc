"""Which split is found, into outer sites, leaves and a core; what is refused and why; and that a wrong claim is not made."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import assert_not_learnt, latents, learnt, logistic, normal, per_arm, reward, rows_of, slow_but

from ppl_bandit import engines
from ppl_bandit.engines.inner.layout import Layout
from ppl_bandit.engines.proof import assignment
from ppl_bandit.engines.proof.assignment import find_scales, read_supports
from ppl_bandit.engines.proof.outer import given
from ppl_bandit.engines.proof.split import find_split
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, NotConjugate


def half_normal(name="spread"):
    return numpyro.sample(name, dist.HalfNormal(1.0))


def clicks(arm):
    level = per_arm("level", dist.Normal(0.0, 1.0))
    logistic((level + numpyro.sample("offset", dist.Normal(0.0, 1.0)))[arm])


def branching(arm):
    """Conjugate given `spread` on one side of 3 only: the noise's law changes there."""
    spread = half_normal()
    mean = per_arm("mean", dist.Normal(0.0, spread))
    normal(mean[arm], jnp.where(spread < 3.0, 1.0, 1.0 + mean[arm] ** 2))


def branching_far_out(arm):
    """Conjugate given `shift` above -3 only, where hardly any value is tried."""
    shift, mean = numpyro.sample("shift", dist.Normal(0.0, 1.0)), per_arm("mean", dist.Normal(0.0, 1.0))
    normal(mean[arm] + jnp.where(shift < -3.0, mean[arm] ** 2, shift))


def changing_power(arm):
    """A Weibull of unknown shape: given it, the scale is Gamma in a power that depends on it."""
    shape = numpyro.sample("shape", dist.LogNormal(0.0, 0.5))
    reward(dist.Weibull(per_arm("scale", dist.InverseGamma(3.0, 2.0))[arm], shape))


def hidden_by_underflow(arm):
    length, mean = numpyro.sample("length", dist.LogNormal(0.0, 0.5)), per_arm("mean", dist.Normal(0.0, 1.0))
    bend = jnp.exp(-1e6 / length**2)  # 0 in float64 at every length below 35, which no draw of the prior comes near
    normal(mean[arm] + bend * mean[arm] ** 2)


def curve_of(jitter, position, arm):
    length, amplitude = numpyro.sample("length", dist.LogNormal(-1.0, 0.5)), half_normal("amplitude")
    distance = (position[:, None] - position) / length
    covariance = amplitude**2 * (jnp.exp(-0.5 * distance**2) + jitter * np.eye(len(position)))
    normal(numpyro.sample("values", dist.MultivariateNormal(0.0, covariance))[arm], 0.3)


def hidden_layer(arm, context):
    """Units of a hidden layer: what a row says about the last layer is no sum of products."""
    first = numpyro.sample("first", dist.Normal(0.0, 1.0).expand([3, 5]).to_event(2))
    last = per_arm("last", dist.Normal(0.0, 1.0).expand([5]).to_event(1), 3)
    normal(jnp.sum(jnp.tanh(context @ first) * last[arm], axis=-1))


PLACES = np.linspace(0.0, 0.3, 12)
SINGULAR = "larger multiple of the identity"
REFUSED = {  # {name: (program, number of arms, outer sites, words)}
    "logits": (clicks, 2, None, r"'level' \(not quadratic\)"),
    "a branch far out": (branching_far_out, 2, ("shift",), "a comparison with a latent|a choice"),
    "a branch": (branching, 2, ("spread",), "comparison|choice|polynomial"),
    "a power that changes": (
        changing_power,
        2,
        ("shape",),
        "not conjugate given shape|not affine|not proved to be a sum of powers",
    ),
    "an exponential that underflows": (hidden_by_underflow, 2, ("length",), "floating point flattens far out"),
    "float64 positions": (functools.partial(curve_of, 0.0, PLACES), 12, ("length", "amplitude"), SINGULAR),
    "float32 positions": (
        functools.partial(curve_of, 0.0, jnp.linspace(0.0, 0.3, 12)),
        12,
        ("length", "amplitude"),
        SINGULAR,
    ),
    "many outer dimensions and rows that must be read again": (
        hidden_layer,
        3,
        None,
        "15 outer dimensions, first, and rows that must be read again",
    ),
}


@pytest.mark.parametrize(
    "name", slow_but(REFUSED, "logits", "a branch far out", "float64 positions", "float32 positions")
)
def test_what_is_not_conjugate_for_every_outer_value_is_refused_with_the_reason(name):
    program, num_arms, outer, words = REFUSED[name]
    context = jnp.zeros(3) if program is hidden_layer else None
    with pytest.raises(NotConjugate, match=words):
        engines.collapsed(RewardModel(program, num_arms, context), outer)


def unit_spread(arm):
    """Normal given `variance`, or InverseGamma given `mean`: the means are what decisions need."""
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    normal(mean[arm], jnp.sqrt(variance[arm]))


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        (("nothing",), "outer must name some of the latent sites"),
        ((), "outer must name some"),
        (("mean", "variance"), "outer names every latent site"),
    ],
)
def test_outer_sites_that_cannot_be_are_refused(outer, message):
    with pytest.raises(ValueError, match=message):
        engines.collapsed(RewardModel(unit_spread, 2), outer)


def test_sites_that_are_most_of_a_program_are_outer_only_where_that_is_asked_for():
    """Given the log rates and the spread, their mean alone is Gaussian: particles would hold 5 dimensions of 6."""

    def program(arm):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        log_rate = per_arm("log_rate", dist.Normal(mean, half_normal()), 4)
        reward(dist.Poisson(jnp.exp(log_rate[arm])))

    model = RewardModel(program, 4)
    with pytest.raises(NotConjugate, match="spread, log_rate: 5 of 6 dimensions would be outer"):
        engines.collapsed(model, is_selective=True)
    assert engines.choose(model).explanation.engine == "reweight"


def test_the_length_scale_and_the_amplitude_of_a_curve_are_outer_and_one_sum_is_stored():
    model = RewardModel(functools.partial(curve_of, 1e-6, np.linspace(0.0, 1.0, 6)), 6)
    text = str(engines.collapsed(model).explanation)
    assert "EXACT GIVEN length, amplitude: values is integrated out" in text
    assert "one sum of statistics, shared by all particles" in text


@pytest.mark.slow
def test_a_scale_for_every_weight_of_two_arms_is_outer():
    def program(arm, context):
        overall, noise = numpyro.sample("overall", dist.HalfCauchy(1.0)), half_normal("noise")
        with numpyro.plate("arms", 2, dim=-2), numpyro.plate("features", 6, dim=-1):
            local = numpyro.sample("local", dist.HalfCauchy(1.0))
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        slope = weight * local * overall
        normal(jnp.sum(slope[arm] * context, axis=-1), noise)

    report = engines.collapsed(RewardModel(program, 2, jnp.zeros(6)), is_selective=True).explanation.report
    assert "14 dimensions" in report and "a refresh cost the same after any number of rows" in report


class _Odd(dist.Normal):
    """A Normal law whose density is another for one reward that no examination tries."""

    def log_prob(self, value):
        plain = super().log_prob(value)
        return jnp.where(jnp.abs(value - 31.4159) < 1e-3, plain - self.loc**4, plain)


class _Bent(dist.Normal):
    """A Normal law with one reward that tells of `shift` in another way."""

    def __init__(self, loc, scale, shift):
        self.shift = shift
        super().__init__(loc, scale)

    def log_prob(self, value):
        plain = super().log_prob(value)
        return jnp.where(jnp.abs(value - 31.4159) < 1e-3, plain - self.shift**4, plain)


@pytest.mark.slow
def test_a_datum_that_is_not_conjugate_is_not_absorbed():
    def sometimes(arm):
        reward(_Odd(per_arm("mean", dist.Normal(0.0, half_normal()))[arm], 1.0))

    engine = engines.collapsed(RewardModel(sometimes, 2), ("spread",), num_particles=50)
    assert_not_learnt(engine, rows_of([0, 1], [0.3, 31.4159]), [True, False])


@pytest.mark.slow
def test_a_datum_that_the_exact_engine_refuses_shows_which_site_is_outer():
    """Conjugate in all sites, and sent to the exact engine, but for one reward, whose density bends in `shift`."""

    def program(arm):
        shift, mean = numpyro.sample("shift", dist.Normal(0.0, 1.0)), per_arm("mean", dist.Normal(0.0, 1.0))
        reward(_Bent(mean[arm] + shift, 1.0, shift))

    model = RewardModel(program, 2)
    with jax.enable_x64(True):
        with pytest.raises(NotConjugate, match="use engines.conjugate"):
            find_split(model, None)
        refused = Interaction(np.array([1]), {"reward": np.array([31.4159])})
        assert find_split(model, None, refused).space.names == ("shift",)


# Gaussian blocks that fall into leaves without a core


def hierarchy_of(num_arms, arm):
    spread, common = half_normal(), numpyro.sample("common", dist.Normal(0.0, 2.0))
    normal(per_arm("mean", dist.Normal(common, spread), num_arms)[arm])


def random_slopes(arm, context):
    spread, base = half_normal(), numpyro.sample("base", dist.Normal(0.0, 1.0))
    with numpyro.plate("arms", 5):
        shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
        slope = numpyro.sample("slope", dist.Normal(base, spread))
    normal(shift[arm] + slope[arm] * context["price"])


def three_levels(arm):
    """Nine arms in three groups, whose means have a mean."""
    spread, top = half_normal(), numpyro.sample("top", dist.Normal(0.0, 1.0))
    group = latents("group", dist.Normal(top, 1.0), 3)
    normal(per_arm("mean", dist.Normal(group[jnp.arange(9) // 3], spread), 9)[arm])


def crossed(arm):
    """Twelve arms, each of one of three brands and one of four colours."""
    law = dist.Normal(0.0, half_normal())
    brand, colour = latents("brand", law, 3), latents("colour", law, 4)
    normal(brand[(jnp.arange(12) // 4)[arm]] + colour[(jnp.arange(12) % 4)[arm]])


def shared_weights(arm, context):
    weights = numpyro.sample("weights", dist.Normal(0.0, half_normal("scale")).expand([4]).to_event(1))
    normal(context["x"] @ weights + 0.1 * arm)


WITH_CORES = {  # {name: (program, number of arms, context, number and size of leaves, size of the core)}
    "hierarchy": (functools.partial(hierarchy_of, 6), 6, None, (6, 1), 1),
    "random slopes": (random_slopes, 5, {"price": jnp.array(0.5)}, (5, 2), 1),
    "three levels": (three_levels, 9, None, (10, 1), 3),
    "crossed effects": (crossed, 12, None, (4, 1), 3),
    "weights that every row ties": (shared_weights, 2, {"x": jnp.array([1.0, -0.5, 0.3, 2.0])}, (0, 0), 4),
}


@pytest.mark.parametrize("name", slow_but(WITH_CORES, "random slopes", "three levels"))
def test_what_only_a_core_ties_is_a_leaf(name):
    program, num_arms, context, leaves, num_core = WITH_CORES[name]
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
        spread, common = half_normal(), numpyro.sample("common", dist.Normal(0.0, 2.0))
        mean = per_arm("mean", dist.Normal(common, spread), 4)
        normal(mean[arm] + 0.3 * mean[0])

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
    leaves, is_inside = (part[0, :10].reshape(5, 2) for part in (found.members, found.is_member))
    by_leaf = [set(own[inside]) for own, inside in zip(leaves, is_inside, strict=True)]
    assert by_leaf == [set(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    assert found.members[0, 10] == ends[-1] and found.is_member[0, 10]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "num_arms"), [(functools.partial(hierarchy_of, 5), 5), (three_levels, 9)], ids=["hierarchy", "three"]
)
def test_leaves_change_the_work_and_not_the_posterior(program, num_arms, monkeypatch):
    rows = rows_of(np.arange(30) % num_arms, np.random.default_rng(0).normal(1.0, 1.0, size=30))
    found, firsts = [], []
    for is_plain in (False, True):
        if is_plain:
            monkeypatch.setattr(assignment, "_MAX_LEAF", 0)
        with jax.enable_x64(True):
            engine = engines.collapsed(RewardModel(program, num_arms), num_particles=500)
            start = engine.init(jr.key(0))
            _, early = learnt(engine, rows._replace(mask=jnp.arange(30) < 3), start)
            state, info = learnt(engine, rows._replace(mask=jnp.ones(30, bool)), start)
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
