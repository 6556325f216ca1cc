"""Draws of the exact engine follow the posterior that its parameters state.

Every check is a Kolmogorov-Smirnov test at a fixed seed against the law in scipy, or a moment with its Monte Carlo error. A
correct sampler fails one KS test with probability 1e-4; a deviation of 0.016 in a distribution function is always seen,
since with M = 20,000 draws the critical distance at 1e-4 is 2.2 / sqrt(M).
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions.transforms import PowerTransform
from scipy import stats

from ppl_bandit.engines import conjugate
from ppl_bandit.engines.inner.density import sample, standard_posterior
from ppl_bandit.engines.inner.layout import Layout, SiteBlock
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

A = 2
M = 20_000
LEVEL = 1e-4
ARM = np.array([0, 1, 0, 0, 1])
CLICKS = np.array([1, 0, 0, 1, 1])
AMOUNTS = np.array([0.8, 2.1, 0.3, 1.4, 3.9])
REALS = np.array([1.3, -0.4, 0.2, 2.2, -1.7])


def drawn(program, reward, context=None, seed=0):
    """Return draws (M, ...) and parameters of the posterior after five rows."""
    example = None if context is None else context[0]
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, A, example))
        rows = Interaction(*jax.tree.map(jnp.asarray, (ARM, reward, context)))
        state, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows)
        assert bool(info.is_trusted)
        draws = jax.device_get(jax.jit(engine.sample, static_argnums=2)(jr.key(seed), state, M))
        return draws, engine.capabilities.parameters(state)


def assert_follows(draws, law):
    assert stats.kstest(draws, law.cdf).pvalue > LEVEL


def assert_uncorrelated(x, y):
    # The correlation of M independent pairs has standard deviation 1 / sqrt(M); four of them fail once in 16,000 times.
    assert abs(np.corrcoef(x, y)[0, 1]) < 4 / np.sqrt(M)


@pytest.mark.slow
def test_beta_draws_on_the_unit_interval():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(0.5, 2.0).expand([A]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    draws, known = drawn(program, CLICKS)
    for a in range(A):
        law = stats.beta(known["rate"]["concentration1"][a], known["rate"]["concentration0"][a])
        assert_follows(draws["rate"][:, a], law)
    assert_uncorrelated(draws["rate"][:, 0], draws["rate"][:, 1])


@pytest.mark.slow
def test_beta_draws_on_another_interval():
    def program(arm):
        z = numpyro.sample("z", dist.Uniform(2.0, 4.0).expand([A]))
        numpyro.sample("reward", dist.Bernoulli((z[arm] - 2.0) / 2.0))

    draws, known = drawn(program, CLICKS)
    for a in range(A):
        law = stats.beta(known["z"]["concentration1"][a], known["z"]["concentration0"][a], loc=2.0, scale=2.0)
        assert_follows(draws["z"][:, a], law)


@pytest.mark.slow
def test_gamma_draws():
    def program(arm):
        rate = numpyro.sample("rate", dist.Gamma(0.3, 1.5).expand([A]))
        numpyro.sample("reward", dist.Exponential(rate[arm]))

    draws, known = drawn(program, AMOUNTS)
    for a in range(A):
        law = stats.gamma(known["rate"]["concentration"][a], scale=1.0 / known["rate"]["rate"][a])
        assert_follows(draws["rate"][:, a], law)


@pytest.mark.slow
def test_gamma_draws_above_a_bound():
    def program(arm):
        shifted = dist.transforms.AffineTransform(1.0, 1.0, domain=dist.constraints.positive)
        z = numpyro.sample("z", dist.TransformedDistribution(dist.Gamma(2.0, 1.5).expand([A]), shifted))
        numpyro.sample("reward", dist.Exponential(z[arm] - 1.0))

    draws, known = drawn(program, AMOUNTS)
    for a in range(A):
        law = stats.gamma(known["z"]["concentration"][a], loc=1.0, scale=1.0 / known["z"]["rate"][a])
        assert_follows(draws["z"][:, a], law)


@pytest.mark.slow
def test_inverse_gamma_draws():
    def program(arm):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5).expand([A]))
        numpyro.sample("reward", dist.Normal(0.5, jnp.sqrt(variance[arm])))

    draws, known = drawn(program, REALS)
    for a in range(A):
        law = stats.invgamma(known["variance"]["concentration"][a], scale=known["variance"]["rate"][a])
        assert_follows(draws["variance"][:, a], law)


@pytest.mark.slow
def test_standard_deviation_draws_are_roots_of_an_inverse_gamma():
    def program(arm):
        variance = dist.InverseGamma(2.0, 1.5).expand([A])
        sd = numpyro.sample("sd", dist.TransformedDistribution(variance, PowerTransform(0.5)))
        numpyro.sample("reward", dist.Normal(0.5, sd[arm]))

    draws, known = drawn(program, REALS)
    for a in range(A):
        law = stats.invgamma(known["sd"]["concentration"][a], scale=known["sd"]["rate"][a])
        assert_follows(draws["sd"][:, a] ** 2, law)


@pytest.mark.slow
def test_dirichlet_draws():
    def program(arm):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.array([0.5, 2.0, 1.0])).expand([A]))
        numpyro.sample("reward", dist.Categorical(probs[arm]))

    draws, known = drawn(program, np.array([0, 2, 1, 1, 0]))
    np.testing.assert_allclose(draws["probs"].sum(-1), 1.0, rtol=1e-12)
    for a in range(A):
        alpha = known["probs"]["concentration"][a]
        for k in range(3):
            assert_follows(draws["probs"][:, a, k], stats.beta(alpha[k], alpha.sum() - alpha[k]))
        # The joint law, beyond its margins: p_0 / (p_0 + p_1) is Beta and independent of p_2.
        share = draws["probs"][:, a, 0] / draws["probs"][:, a, :2].sum(-1)
        assert_follows(share, stats.beta(alpha[0], alpha[1]))
        assert_uncorrelated(share, draws["probs"][:, a, 2])


@pytest.mark.slow
def test_dense_gaussian_draws_are_joint():
    def program(arm, context):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.Normal(level + slope[arm] * context, 0.7))

    context = np.array([0.5, 2.0, 1.0, 1.5, -0.3])
    draws, known = drawn(program, REALS, context)
    design = np.column_stack([np.ones(5), np.eye(A)[ARM] * context[:, None]])
    covariance = np.linalg.inv(np.diag([0.25, 1.0, 1.0]) + design.T @ design / 0.49)
    mean = covariance @ design.T @ REALS / 0.49
    joint = np.column_stack([draws["level"], draws["slope"]])
    # Whitened by the covariance, which couples the sites, draws are standard normal in every direction.
    white = np.linalg.solve(np.linalg.cholesky(covariance), (joint - mean).T)
    for direction in np.random.default_rng(0).normal(size=(6, 3)):
        assert_follows(direction / np.linalg.norm(direction) @ white, stats.norm())
    assert_follows((white**2).sum(0), stats.chi2(3))


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True], ids=["variance per arm", "variance shared"])
def test_means_with_an_unknown_variance_are_student(is_shared):
    def program(arm):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5).expand([] if is_shared else [A]))
        mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * jnp.sqrt(variance)).expand([A]))
        spread = variance if is_shared else variance[arm]
        numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(spread)))

    draws, known = drawn(program, REALS)
    shapes, rates = (np.broadcast_to(known["variance"][name], (A,)) for name in ("concentration", "rate"))
    unit_variance = np.diagonal(known["mean"]["covariance_times_precision"])
    for a in range(A):
        scale = np.sqrt(rates[a] / shapes[a] * unit_variance[a])
        assert_follows(draws["mean"][:, a], stats.t(2.0 * shapes[a], known["mean"]["mean"][a], scale))
        # Given its own variance the mean is normal: the draw is joint.
        variance = draws["variance"] if is_shared else draws["variance"][:, a]
        standard = (draws["mean"][:, a] - known["mean"]["mean"][a]) / np.sqrt(variance * unit_variance[a])
        assert_follows(standard, stats.norm())
        assert_uncorrelated(standard**2, variance)


def test_the_same_key_gives_the_same_draws_and_another_key_others():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    engine = conjugate(RewardModel(program, A))
    state = engine.init(jr.key(0))
    first, again, other = (engine.sample(jr.key(seed), state, 100)["rate"] for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


# Two blocks of one precision, of which one is filled up, a block of another precision, and one that nothing scales.
BLOCKS = Layout(
    (SiteBlock("scale", "positive", (2,), 0), SiteBlock("x", "real", (7,), 0)),
    np.ones(2),
    np.array([[0, 1], [2, 0], [5, 6], [4, 3]], np.int32),
    np.array([[True, True], [True, False], [True, True], [True, True]]),
    np.array([0, 0, 1, -1]),
)
draw_blocks = jax.jit(lambda key, law: sample(BLOCKS, key, law, M))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
@pytest.mark.parametrize(("shape", "rate"), [(0.3, 0.1), (1.0, 3.0), (40.0, 1e-3), (1e6, 1e6)])
def test_blocks_of_every_owner_and_size_follow_their_laws(shape, rate, dtype):
    members, is_member = BLOCKS.members, BLOCKS.is_member
    factor = np.array([[2.0, 0.0], [-1.0, 0.5]])
    mean = np.array([[1.0, -2.0], [3.0, 0.0], [0.0, 5.0], [-1.0, 0.5]])
    precision = np.where(is_member[:, :, None] & is_member[:, None, :], factor @ factor.T, np.eye(2))
    with jax.enable_x64(dtype == "float64"):
        parameters = {"positive": jnp.full((2, 2), jnp.array([shape, rate]))}
        law = standard_posterior(BLOCKS)._replace(
            elements=parameters, mean=jnp.asarray(mean), precision=jnp.asarray(precision)
        )
        draws = draw_blocks(jr.key(18), law)
    assert all(leaf.dtype == dtype for leaf in draws.values())
    log_u, x = np.log(np.asarray(draws["scale"], float)), np.asarray(draws["x"], float)
    u = np.exp(np.column_stack([log_u[:, [0, 0, 1]], np.zeros(M)]))  # of each block
    noises = []
    for block, (own, inside) in enumerate(zip(members, is_member, strict=True)):
        own, covariance = own[inside], np.linalg.inv(precision[block])
        degrees, unit = (np.inf, 1.0) if block == 3 else (2 * shape, rate / shape)
        for place, element in enumerate(own):
            sd = np.sqrt(unit * covariance[place, place])
            assert_follows((x[:, element] - mean[block, place]) / sd, stats.t(degrees))
        root = np.linalg.cholesky(precision[block][: own.size, : own.size])
        noises.append((x[:, own] - mean[block, : own.size]) * np.sqrt(u[:, [block]]) @ root)
    # Given the precisions, L'(x - mean) sqrt(u) is standard normal, and independent of them and of other blocks. Where the
    # variance is so large that the mean is lost beside it, or so small beside it, float32 keeps too few digits to tell.
    if dtype == "float64" or rate > 1e-2:
        columns = np.column_stack(noises)
        for column in columns.T:
            assert_follows(column, stats.norm())
        # 36 correlations of M independent pairs: the largest is beyond 4.5 standard deviations once in 4,000 times.
        together = np.column_stack([columns, log_u])
        ranks = stats.spearmanr(together).statistic - np.eye(together.shape[1])
        assert np.max(np.abs(ranks)) < 4.5 / np.sqrt(M)
