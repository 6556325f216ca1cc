"""The exact engine on every program of the table: the verdict, and draws and parameters of the posterior.

Batch and sequential updates both agree with the closed form. Tolerance: a relative 1e-9 leaves seven digits above float64's
rounding for a handful of rows.

Draws are compared with the same closed form by Kolmogorov-Smirnov tests at a fixed seed, or moments with their Monte Carlo
errors. A correct sampler fails one KS test with probability 1e-4; a deviation of 0.016 in a distribution function is always
seen, since with M = 20,000 draws the critical distance at 1e-4 is 2.2 / sqrt(M).
"""

import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from programs import KEY, bernoulli, drawn, learnt, rates, reals, reward, rows_of, slow
from proved_programs import ACCEPTED, ARM, LEVEL_AND_OFFSETS, REFUSED, REMEDIES, A, cases
from scipy import stats

from ppl_bandit.engines import conjugate
from ppl_bandit.engines.inner.density import sample, standard_posterior
from ppl_bandit.engines.inner.layout import Layout, SiteBlock
from ppl_bandit.engines.refusals import CONJUGATE
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import NotConjugate

M = 20_000
LEVEL = 1e-4


def engine_of(given):
    example = None if given.contexts is None else jax.tree.map(lambda leaf: leaf[0], given.contexts)
    return conjugate(RewardModel(given.program, context=example, **given.settings))


@pytest.mark.parametrize("given", cases(ACCEPTED))
def test_a_conjugate_program_is_accepted_and_its_posterior_is_the_textbook_one(given):
    engine = engine_of(given)
    assert engine.explanation.is_exact
    if given.posterior is None:
        return
    with jax.enable_x64(True):
        rows = rows_of(ARM, given.rewards, given.contexts)
        together, info = learnt(engine, rows._replace(mask=jnp.ones(7, bool)))
        update = jax.jit(engine.update)
        in_turn, infos = engine.init(KEY), []
        for row in range(7):  # one row at a time, the others masked: the same shape compiles once
            in_turn, each = update(KEY, in_turn, rows._replace(mask=jnp.arange(7) == row))
            infos.append(each)
    assert all(each.is_trusted for each in [info, *infos])
    for state in (together, in_turn):
        found = engine.capabilities.parameters(state)
        assert set(found) == set(given.posterior)
        for site, parameters in given.posterior.items():
            for name, value in parameters.items():
                np.testing.assert_allclose(found[site][name], value, rtol=1e-9, atol=1e-12, err_msg=f"{site} {name}")


@pytest.mark.parametrize("given", cases(REFUSED))
def test_a_near_miss_is_refused_with_the_reason(given):
    with pytest.raises(given.error, match=given.reason) as refused:
        conjugate(RewardModel(given.program, **given.settings))
    if given.error is NotConjugate:
        assert refused.value.explanation is not None and not refused.value.explanation.is_exact


def test_there_are_enough_programs_and_one_for_every_remedy():
    assert len(ACCEPTED) >= 50 and len(REFUSED) >= 80
    assert set(REMEDIES) == set(CONJUGATE)


# Words: the user's own line, and remedies that were tried


def clipped(arm):
    bernoulli(rates().clip(0.01, 0.99)[arm])


def exponential_rate(arm):
    reward(dist.Poisson(jnp.exp(reals()[arm])))


def robust_noise(arm):
    reward(dist.StudentT(4.0, reals()[arm], 1.0))


@pytest.mark.parametrize(
    ("program", "reason", "remedy"),
    [
        (
            clipped,
            r"in `clip` \(line \d+ of test_proved_programs.py: `bernoulli\(rates\(\).clip\(0.01, 0.99\)\[arm\]\)`\), which "
            r"reaches the probs of 'reward' \(Bernoulli\); let latents reach the outcome through arithmetic",
            "a Bernoulli outcome is conjugate to a Beta prior on its probability itself; or keep the program",
        ),
        slow(
            exponential_rate,
            r"an exponential of an unbounded quantity.* \(line \d+ of test_proved_programs.py: `reward\(dist.Poisson\(jnp.exp",
            "a Poisson outcome is conjugate to a Gamma prior on its rate",
        ),
        slow(
            robust_noise,
            r"in the log density of 'reward' \(StudentT\), the logarithm of a quantity that is not a product of powers",
            "no prior is known that is conjugate to a StudentT outcome; keep the program",
        ),
    ],
)
def test_a_refusal_names_the_line_and_what_the_outcome_is_conjugate_to(program, reason, remedy):
    with pytest.raises(NotConjugate) as refused:
        conjugate(RewardModel(program, 2))
    assert re.search(reason, str(refused.value))
    assert remedy in str(refused.value)
    assert "formula of the distribution" not in str(refused.value)


# Draws


def assert_follows(draws, law):
    assert stats.kstest(draws, law.cdf).pvalue > LEVEL


def assert_uncorrelated(x, y):
    # The correlation of M independent pairs has standard deviation 1 / sqrt(M); four of them fail once in 16,000 times.
    assert abs(np.corrcoef(x, y)[0, 1]) < 4 / np.sqrt(M)


def check_probabilities(draws, known):
    for own, one, zero in zip(draws.T, known["concentration1"], known["concentration0"], strict=True):
        assert_follows(own, stats.beta(one, zero))
    assert_uncorrelated(*draws.T[:2])


def check_rates(draws, known):
    for own, shape, rate, power in zip(draws.T, known["concentration"], known["rate"], known["power"], strict=True):
        assert_follows(own**power, stats.gamma(shape, scale=1.0 / rate))


def check_simplices(draws, known):
    np.testing.assert_allclose(draws.sum(-1), 1.0, rtol=1e-12)
    for own, alpha in zip(draws.swapaxes(0, 1), known["concentration"], strict=True):
        for k, each in enumerate(own.T):
            assert_follows(each, stats.beta(alpha[k], alpha.sum() - alpha[k]))
        # The joint law, beyond its margins: p_0 / (p_0 + p_1) is Beta and independent of p_2.
        share = own[:, 0] / own[:, :2].sum(-1)
        assert_follows(share, stats.beta(alpha[0], alpha[1]))
        assert_uncorrelated(share, own[:, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "site", "check", "standard"),
    [
        ("bernoulli_in_a_plate", "rate", check_probabilities, lambda z: z),
        ("bernoulli of a uniform between 2 and 4", "z", check_probabilities, lambda z: z / 2.0 - 1.0),
        ("exponential waiting time", "z", check_rates, lambda z: z),
        ("exponential waiting time beyond a bound", "z", check_rates, lambda z: z - 1.0),
        ("normal with known mean and unknown variance", "z", check_rates, lambda z: z),
        ("normal_with_unknown_standard_deviation_per_arm", "sd", check_rates, lambda z: z),
        ("categorical_by_probabilities", "probs", check_simplices, lambda z: z),
    ],
)
def test_draws_of_one_site_follow_its_law(name, site, check, standard):
    check(standard(draws_of(name)[site]), ACCEPTED[name].posterior[site])


def draws_of(name):
    given = ACCEPTED[name]
    with jax.enable_x64(True):
        engine = engine_of(given)
        state, info = learnt(engine, rows_of(ARM, given.rewards, given.contexts))
        assert bool(info.is_trusted)
        return drawn(engine, state, M, key=0)


@pytest.mark.slow
def test_dense_gaussian_draws_are_joint():
    draws, (mean, covariance) = draws_of("normal_with_a_shared_level_and_an_offset_per_arm"), LEVEL_AND_OFFSETS
    joint = np.column_stack([draws["level"], draws["offset"]])
    # Whitened by the covariance, which couples the sites, draws are standard normal in every direction.
    white = np.linalg.solve(np.linalg.cholesky(covariance), (joint - mean).T)
    for direction in np.random.default_rng(0).normal(size=(6, A + 1)):
        assert_follows(direction / np.linalg.norm(direction) @ white, stats.norm())
    assert_follows((white**2).sum(0), stats.chi2(A + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal_with_unknown_variance_per_arm", "normal_with_a_variance_shared_by_arms"])
def test_means_with_an_unknown_variance_are_student(name):
    draws, known = draws_of(name), ACCEPTED[name].posterior
    shapes, scales = (np.broadcast_to(known["variance"][key], A) for key in ("concentration", "rate"))
    units = np.diagonal(known["mean"]["covariance_times_precision"])
    variances = np.broadcast_to(draws["variance"].T, (A, M))
    for a, unit in enumerate(units):
        centred = draws["mean"][:, a] - known["mean"]["mean"][a]
        assert_follows(centred / np.sqrt(scales[a] / shapes[a] * unit), stats.t(2.0 * shapes[a]))
        # Given its own variance the mean is normal: the draw is joint.
        standard = centred / np.sqrt(variances[a] * unit)
        assert_follows(standard, stats.norm())
        assert_uncorrelated(standard**2, variances[a])


def test_the_same_key_gives_the_same_draws_and_another_key_others():
    engine = engine_of(ACCEPTED["bernoulli_in_a_plate"])
    state = engine.init(KEY)
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


@pytest.mark.parametrize("dtype", [slow("float32"), "float64"])
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
