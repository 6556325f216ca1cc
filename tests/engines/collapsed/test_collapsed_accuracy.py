"""The collapsed engine against quadrature over the outer sites, which is exact to any digit.

References are written in NumPy, apart from the library: on a grid of outer values, the density with inner sites integrated out
by textbook formulas, and the law of the arms' expected rewards given each. Tolerances: 4,000 draws leave an error of
1 / sqrt(4,000) = .016 posterior standard deviations in a mean, .011 of a standard deviation in itself, and of about .01 in
total variation for p-hat over five arms (.006 to .018 over eight seeds of the Beta-Binomial hierarchy at n = 5); 4,000
particles of which at least half count add as much again at most.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import betaln, gammaln

from ppl_bandit import engines
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_DRAWS = 4000
CAPACITY = 512
NUM_REFERENCE = 100_000


class Case(NamedTuple):
    """A program, the outer sites that should be found, how to make data and the reference.

    `rows(rng, n)` -> (arm, reward, context); `reference(arm, reward, context)` -> (draws of expected rewards (R, A), log
    evidence or None); `context` is the one of the decision.
    """

    program: object
    num_arms: int
    outer: tuple
    rows: object
    reference: object
    context: object = None
    outcomes: tuple = ("reward",)


def grid(low, high, num=400):
    """Logarithms of a positive number, and their spacing."""
    points = np.linspace(np.log(low), np.log(high), num)
    return np.exp(points), np.log(points[1] - points[0]) + points  # d log s = ds / s: the Jacobian is s


def mixture(log_density, draw, rng):
    """Draws from a mixture over grid points, and the log of the total mass."""
    top = log_density.max()
    weights = np.exp(log_density - top)
    total = weights.sum()
    counts = rng.multinomial(NUM_REFERENCE, weights / total)
    return np.concatenate([draw(k, counts[k]) for k in np.flatnonzero(counts)]), top + np.log(total)


def gaussian(precisions, log_dets, noises, log_prior, design, y, readout):
    """A mixture of Gaussian regressions with zero prior mean: a precision and a noise for each grid point."""
    rng = np.random.default_rng(1)
    cross, moment, square = design.T @ design, design.T @ y, y @ y
    log_density = np.empty(len(noises))
    means, roots = [], []
    for k, (precision, noise) in enumerate(zip(precisions, noises, strict=True)):
        whole = precision + cross / noise**2
        factor = np.linalg.cholesky(whole)
        half = np.linalg.solve(factor, moment / noise**2)
        log_density[k] = (
            log_prior[k]
            + 0.5 * log_dets[k]
            - np.log(np.diag(factor)).sum()
            + 0.5 * half @ half
            - 0.5 * square / noise**2
            - len(y) * np.log(noise * np.sqrt(2 * np.pi))
        )
        means.append(readout @ np.linalg.solve(factor.T, half))
        roots.append(np.linalg.solve(factor, readout.T).T)

    def draw(k, num):
        return means[k] + rng.standard_normal((num, roots[k].shape[1])) @ roots[k].T

    return mixture(log_density, draw, rng)


# Gaussian hierarchies: a common mean, means of arms about it, and a spread that is unknown.


def centred(arm):
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("arms", 5):
        mean = numpyro.sample("mean", dist.Normal(common, spread))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


def non_centred(arm):
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    log_spread = numpyro.sample("log_spread", dist.Normal(-0.5, 0.8))
    with numpyro.plate("arms", 5):
        deviation = numpyro.sample("deviation", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal((common + jnp.exp(log_spread) * deviation)[arm], 1.0))


def unknown_noise(arm):
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 0.7))
    with numpyro.plate("arms", 5):
        mean = numpyro.sample("mean", dist.Normal(common, spread))
    numpyro.sample("reward", dist.Normal(mean[arm], noise))


MEANS = np.array([0.3, 0.8, 1.0, 1.3, 1.8])


def gaussian_rows(rng, n, noise=0.8):
    arm = rng.integers(0, 5, n)
    return arm, MEANS[arm] + noise * rng.standard_normal(n), None


def hierarchy_precision(spread):
    precision = np.zeros((6, 6))
    precision[0, 0] = 0.25 + 5 / spread**2
    precision[0, 1:] = precision[1:, 0] = -1 / spread**2
    precision[range(1, 6), range(1, 6)] = 1 / spread**2
    return precision, -np.log(4.0) - 10 * np.log(spread)


KNOWN_NOISE = (np.ones(1), np.zeros(1))


def hierarchy_reference(spreads, spread_prior, noises=KNOWN_NOISE):
    def reference(arm, reward, context):
        pairs = [(s, a, v, b) for s, a in zip(spreads, spread_prior, strict=True) for v, b in zip(*noises, strict=True)]
        precisions, log_dets = zip(*[hierarchy_precision(pair[0]) for pair in pairs], strict=True)
        design = np.eye(6)[1:][arm]
        prior = np.array([a + b for _, a, _, b in pairs])
        return gaussian(
            precisions, log_dets, np.array([v for _, _, v, _ in pairs]), prior, design, reward, np.eye(6)[1:]
        )

    return reference


SPREADS, SPREAD_STEP = grid(1e-3, 8.0, 400)
HALF_NORMAL = SPREAD_STEP + stats.halfnorm(scale=1.0).logpdf(SPREADS)
SOME, SOME_STEP = grid(5e-3, 6.0, 70)
NOISES, NOISE_STEP = grid(0.1, 8.0, 70)
LOG_NORMAL = SPREAD_STEP - np.log(SPREADS) + stats.norm(-0.5, 0.8).logpdf(np.log(SPREADS))


# Normal rewards with independent priors on mean and variance.


def independent_per_arm(arm):
    with numpyro.plate("arms", 3):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


def independent_shared(arm):
    precision = numpyro.sample("precision", dist.Gamma(3.0, 2.0))
    with numpyro.plate("arms", 3):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0 / jnp.sqrt(precision)))


def three_rows(rng, n):
    arm = rng.integers(0, 3, n)
    return arm, np.array([0.2, 0.6, 1.0])[arm] + np.array([0.6, 1.0, 1.4])[arm] * rng.standard_normal(n), None


VARIANCES, VARIANCE_STEP = grid(0.02, 60.0, 500)


def per_arm_reference(arm, reward, context):
    columns, total = [], 0.0
    prior = VARIANCE_STEP + stats.invgamma(3.0, scale=2.0).logpdf(VARIANCES)
    for a in range(3):
        own = reward[arm == a]
        design, one = np.ones((own.size, 1)), np.full((len(VARIANCES), 1, 1), 0.25)
        drawn, mass = gaussian(
            one, np.full(len(VARIANCES), np.log(0.25)), np.sqrt(VARIANCES), prior, design, own, np.eye(1)
        )
        columns.append(np.random.default_rng(a).permutation(drawn[:, 0]))
        total += mass
    return np.stack(columns, axis=1), total


def shared_reference(arm, reward, context):
    prior = VARIANCE_STEP + stats.invgamma(3.0, scale=2.0).logpdf(VARIANCES)
    precision, log_det = np.broadcast_to(0.25 * np.eye(3), (len(VARIANCES), 3, 3)), 3 * np.log(0.25)
    return gaussian(
        precision, np.full(len(VARIANCES), log_det), np.sqrt(VARIANCES), prior, np.eye(3)[arm], reward, np.eye(3)
    )


# Counts: rates about an unknown mean.


def beta_binomial(arm):
    mean = numpyro.sample("mean", dist.Beta(2.0, 3.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(2.0, 1.0))
    with numpyro.plate("arms", 4):
        rate = numpyro.sample("rate", dist.Beta(mean * concentration, (1.0 - mean) * concentration))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def binary_rows(rng, n):
    arm = rng.integers(0, 4, n)
    return arm, (rng.random(n) < np.array([0.25, 0.3, 0.35, 0.45])[arm]).astype(int), None


def beta_grid():
    levels = (np.arange(90) + 0.5) / 90
    sizes, step = grid(0.15, 400.0, 90)
    m, k = (x.ravel() for x in np.meshgrid(levels, sizes, indexing="ij"))
    prior = stats.beta(2.0, 3.0).logpdf(m) - np.log(90.0) + np.tile(step - np.log(sizes), 90)
    return m, k, prior + stats.norm(2.0, 1.0).logpdf(np.log(k))


def beta_reference(arm, reward, context):
    rng = np.random.default_rng(2)
    m, k, log_density = beta_grid()
    a, b = m * k, (1 - m) * k
    wins, losses = (np.bincount(arm[reward == r], minlength=4) for r in (1, 0))
    for w, f in zip(wins, losses, strict=True):
        log_density = log_density + betaln(a + w, b + f) - betaln(a, b)
    return mixture(log_density, lambda i, num: rng.beta(a[i] + wins, b[i] + losses, (num, 4)), rng)


def gamma_poisson(arm):
    shape = numpyro.sample("shape", dist.LogNormal(1.0, 0.7))
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 0.7))
    with numpyro.plate("arms", 4):
        demand = numpyro.sample("demand", dist.Gamma(shape, rate))
    numpyro.sample("reward", dist.Poisson(demand[arm]))


def count_rows(rng, n):
    arm = rng.integers(0, 4, n)
    return arm, rng.poisson(np.array([2.0, 2.5, 3.0, 3.6])[arm]), None


def gamma_reference(arm, reward, context):
    rng = np.random.default_rng(3)
    shapes, shape_step = grid(0.1, 80.0, 100)
    rates, rate_step = grid(0.03, 30.0, 100)
    s, r = (x.ravel() for x in np.meshgrid(shapes, rates, indexing="ij"))
    prior = np.add.outer(shape_step - np.log(shapes), rate_step - np.log(rates)).ravel()
    log_density = prior + stats.norm(1.0, 0.7).logpdf(np.log(s)) + stats.norm(0.0, 0.7).logpdf(np.log(r))
    total, num = np.bincount(arm, reward, minlength=4), np.bincount(arm, minlength=4)
    for t, n in zip(total, num, strict=True):
        log_density = log_density + gammaln(s + t) - gammaln(s) + s * np.log(r) - (s + t) * np.log(r + n)
    log_density = log_density - gammaln(reward + 1.0).sum()
    return mixture(log_density, lambda i, m: rng.gamma(s[i] + total, 1.0 / (r[i] + num), (m, 4)), rng)


# Regressions.


def ridge(arm, context):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("arms", 2):
        weights = numpyro.sample("weights", dist.Normal(0.0, scale[jnp.array([0, 0, 1, 1])]).to_event(1))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context, axis=-1), 0.7))


WEIGHTS = np.array([[0.8, -0.5, 0.1, 0.0], [0.5, -0.2, 0.0, 0.1]])
POINT = np.array([0.5, -0.4, 0.8, 0.3])


def ridge_rows(rng, n):
    arm, context = rng.integers(0, 2, n), rng.standard_normal((n, 4))
    return arm, np.sum(WEIGHTS[arm] * context, axis=1) + 0.7 * rng.standard_normal(n), context


def ridge_reference(arm, reward, context):
    scales, step = grid(5e-3, 5.0, 60)
    one, two = (x.ravel() for x in np.meshgrid(scales, scales, indexing="ij"))
    prior = np.add.outer(step, step).ravel() + sum(stats.halfnorm.logpdf(s) for s in (one, two))
    design = np.zeros((len(arm), 2, 4))
    design[np.arange(len(arm)), arm] = context
    readout = np.kron(np.eye(2), POINT)
    diagonals = np.stack([one, one, two, two] * 2, axis=1) ** -2.0
    precisions = [np.diag(d) for d in diagonals]
    noises = np.full(len(one), 0.7)
    return gaussian(
        precisions, np.log(diagonals).sum(axis=1), noises, prior, design.reshape(len(arm), 8), reward, readout
    )


def seasonal(arm, context):
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    with numpyro.plate("arms", 3):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        wave = numpyro.sample("wave", dist.Normal(0.0, amplitude).expand([2]).to_event(1))
    angle = 2.0 * jnp.pi * context
    season = wave[arm, 0] * jnp.sin(angle) + wave[arm, 1] * jnp.cos(angle)
    numpyro.sample("reward", dist.Normal(level[arm] + season, 0.5))


def seasonal_design(arm, time, num_arms=3):
    design = np.zeros((len(arm), num_arms, 3))
    basis = np.stack([np.ones(len(arm)), np.sin(2 * np.pi * time), np.cos(2 * np.pi * time)], axis=1)
    design[np.arange(len(arm)), arm] = basis
    return design.reshape(len(arm), 3 * num_arms)


def seasonal_rows(rng, n):
    arm, time = rng.integers(0, 3, n), rng.random(n)
    truth = np.array([[0.2, 0.5, 0.1], [0.4, -0.2, 0.4], [0.3, 0.1, 0.6]]).ravel()
    return arm, seasonal_design(arm, time) @ truth + 0.5 * rng.standard_normal(n), time


def seasonal_reference(arm, reward, time):
    diagonals = np.stack([np.tile([1.0, s**-2, s**-2], 3) for s in SPREADS])
    return gaussian(
        [np.diag(d) for d in diagonals],
        np.log(diagonals).sum(axis=1),
        np.full(len(SPREADS), 0.5),
        HALF_NORMAL,
        seasonal_design(arm, time),
        reward,
        seasonal_design(np.arange(3), np.full(3, 0.3)),
    )


# A sale first, then its amount, hierarchies in both.


def hurdle(arm):
    mean = numpyro.sample("mean", dist.Beta(2.0, 3.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(2.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    with numpyro.plate("arms", 5):
        rate = numpyro.sample("rate", dist.Beta(mean * concentration, (1.0 - mean) * concentration))
        size = numpyro.sample("size", dist.Normal(common, spread))
    sale = numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    numpyro.sample("log_amount", dist.Normal(size[arm], 1.0).mask(sale == 1))
    # Not rate x exp(size): after few rows that has no variance a posteriori.
    numpyro.deterministic("expected_reward", rate[arm] * size[arm])


def hurdle_rows(rng, n):
    arm, log_amount, _ = gaussian_rows(rng, n, noise=1.0)
    sale = (rng.random(n) < np.array([0.5, 0.45, 0.4, 0.35, 0.3])[arm]).astype(int)
    return arm, {"sale": sale, "log_amount": log_amount * sale}, None


def hurdle_reference(arm, reward, context):
    rng = np.random.default_rng(4)
    m, k, log_density = beta_grid()
    a, b = m * k, (1 - m) * k
    wins, losses = (np.bincount(arm[reward["sale"] == r], minlength=5) for r in (1, 0))
    for w, f in zip(wins, losses, strict=True):
        log_density = log_density + betaln(a + w, b + f) - betaln(a, b)
    rates, mass = mixture(log_density, lambda i, num: rng.beta(a[i] + wins, b[i] + losses, (num, 5)), rng)
    sold = reward["sale"] == 1
    sizes, other = hierarchy_reference(SPREADS, HALF_NORMAL)(arm[sold], reward["log_amount"][sold], None)
    return rng.permutation(rates) * rng.permutation(sizes), mass + other


# Statistics that no few sums hold: how demand grows with exposure is unknown.


def exposed(arm, context):
    growth = numpyro.sample("growth", dist.Normal(0.5, 0.3))
    with numpyro.plate("arms", 2):
        demand = numpyro.sample("demand", dist.Gamma(2.0, 1.0))
    numpyro.sample("reward", dist.Poisson(demand[arm] * jnp.exp(growth * jnp.log(context))))


def exposed_rows(rng, n):
    arm, exposure = rng.integers(0, 2, n), rng.uniform(0.5, 4.0, n)
    return arm, rng.poisson(np.array([1.5, 2.0])[arm] * exposure**0.7), exposure


def exposed_reference(arm, reward, exposure):
    rng = np.random.default_rng(5)
    growth = np.linspace(-1.5, 2.5, 2000)
    log_density = stats.norm(0.5, 0.3).logpdf(growth) + np.log(growth[1] - growth[0])
    total = np.bincount(arm, reward, minlength=2)
    rate = np.stack([1.0 + (exposure[arm == a] ** growth[:, None]).sum(axis=1) for a in range(2)], axis=1)
    log_density = log_density + growth * (reward @ np.log(exposure)) - gammaln(reward + 1.0).sum()
    log_density += np.sum(gammaln(2.0 + total) - (2.0 + total) * np.log(rate), axis=1)
    factor = 2.0 ** growth[:, None]
    return mixture(log_density, lambda i, num: factor[i] * rng.gamma(2.0 + total, 1.0 / rate[i], (num, 2)), rng)


CASES = {
    "unknown exponent": Case(exposed, 2, ("growth",), exposed_rows, exposed_reference, np.array(2.0)),
    "hierarchy, centred": Case(centred, 5, ("spread",), gaussian_rows, hierarchy_reference(SPREADS, HALF_NORMAL)),
    "hierarchy, non-centred": Case(
        non_centred, 5, ("log_spread",), gaussian_rows, hierarchy_reference(SPREADS, LOG_NORMAL)
    ),
    "spread and noise": Case(
        unknown_noise,
        5,
        ("spread", "noise"),
        gaussian_rows,
        hierarchy_reference(
            SOME,
            SOME_STEP + stats.halfnorm.logpdf(SOME),
            (NOISES, NOISE_STEP - np.log(NOISES) + stats.norm(0, 0.7).logpdf(np.log(NOISES))),
        ),
    ),
    "independent priors, per arm": Case(independent_per_arm, 3, ("variance",), three_rows, per_arm_reference),
    "independent priors, shared": Case(independent_shared, 3, ("precision",), three_rows, shared_reference),
    "Beta-Binomial hierarchy": Case(beta_binomial, 4, ("mean", "concentration"), binary_rows, beta_reference),
    "Gamma-Poisson hierarchy": Case(gamma_poisson, 4, ("shape", "rate"), count_rows, gamma_reference),
    "ridge scales": Case(ridge, 2, ("scale",), ridge_rows, ridge_reference, POINT),
    "seasonality": Case(seasonal, 3, ("amplitude",), seasonal_rows, seasonal_reference, np.array(0.3)),
    "hurdle": Case(
        hurdle,
        5,
        ("mean", "concentration", "spread"),
        hurdle_rows,
        hurdle_reference,
        None,
        ("sale", "log_amount"),
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


@functools.cache
def compiled(name):
    case = CASES[name]
    with jax.enable_x64(True):
        context = None if case.context is None else jnp.asarray(case.context)
        model = RewardModel(case.program, case.num_arms, context, case.outcomes)
        engine = engines.collapsed(model, num_particles=NUM_DRAWS, capacity=CAPACITY)
        table = jax.jit(lambda key, state: model.expected_rewards(engine.sample(key, state, NUM_DRAWS), context))
        return engine, jax.jit(engine.init), jax.jit(engine.update), table


def padded(arm, reward, context):
    """Rows up to the capacity, so that every number of rows compiles once."""
    num = len(arm)

    def pad(leaf):
        return jnp.asarray(np.concatenate([leaf, np.repeat(leaf[-1:], CAPACITY - num, axis=0)]))

    return Interaction(*jax.tree.map(pad, (arm, reward, context)), jnp.arange(CAPACITY) < num)


def shares(table):
    return np.bincount(np.argmax(table, axis=1), minlength=table.shape[1]) / len(table)


@pytest.mark.slow
@every_case
def test_draws_agree_with_quadrature_over_the_outer_sites(name, capsys):
    case = CASES[name]
    engine, init, update, table = compiled(name)
    assert str(engine.explanation).split(":")[1].strip() == f"EXACT GIVEN {', '.join(case.outer)}"
    for number, n in enumerate((5, 50, 500)):
        rows = case.rows(np.random.default_rng(number), n)
        exact, log_evidence = case.reference(*rows)
        with jax.enable_x64(True):
            state, info = update(jr.key(52), init(jr.key(2)), padded(*rows))
            tables = [np.asarray(table(jr.key(100 + seed), state)) for seed in range(4)]
        drawn = tables[0]
        assert bool(info.is_trusted)
        spread = exact.std(axis=0)
        mean_error = np.max(np.abs(drawn.mean(axis=0) - exact.mean(axis=0)) / spread)
        sd_error = np.max(np.abs(drawn.std(axis=0) / spread - 1))
        # Of a typical table: with probabilities like .34, .15 and .51 one of 4,000 draws in sixty is .02 off by chance alone.
        distance = np.mean([0.5 * np.abs(shares(each) - shares(exact)).sum() for each in tables])
        with capsys.disabled():
            print(
                f"\n{name:>28} n={n:<3} mean {mean_error:.3f} sd {sd_error:.3f} p-hat {distance:.3f} evidence "
                f"{float(info.log_evidence) - log_evidence:+.3f} +- {float(info.log_evidence_error):.3f} "
                f"refreshes {int(info.num_refreshes)} autocorrelation {float(info.checks['path_autocorrelation']):.2f}",
                end="",
            )
        assert mean_error < 0.05 and sd_error < 0.05 and distance < 0.02
        assert abs(float(info.log_evidence) - log_evidence) < 4 * float(info.log_evidence_error) + 0.01


@pytest.mark.slow
def test_marginals_are_mixtures_of_closed_forms():
    """64 particles, spread out evenly in both outer sites, stand for all.

    For these rows, 18 sets of 4,000 independent particles in NumPy: the largest of the 12 errors of quantiles was .04 standard
    deviations on average and .058 at most, of which all 4,000 particles leave .016.
    """
    case = CASES["Beta-Binomial hierarchy"]
    engine, init, update, _ = compiled("Beta-Binomial hierarchy")
    rows = case.rows(np.random.default_rng(1), 50)
    exact, _ = case.reference(*rows)
    with jax.enable_x64(True):
        state, _ = update(jr.key(1), init(jr.key(0)), padded(*rows))
        orders = jnp.array([0.05, 0.5, 0.95])

        @jax.jit
        def read(state, x):  # of the state: as a constant, the compiler would try to work all of it out
            marginals = engine.capabilities.marginals(state, None)
            return jax.vmap(marginals.quantile)(orders), marginals.cdf(x), marginals.best_arm_probs(None)

        quantiles, heights, best = map(np.asarray, read(state, jnp.asarray(np.quantile(exact, 0.9, axis=0))))
    np.testing.assert_allclose(heights, 0.9, atol=0.01)
    np.testing.assert_allclose((quantiles - np.quantile(exact, orders, axis=0)) / exact.std(axis=0), 0.0, atol=0.08)
    assert 0.5 * np.abs(best - shares(exact)).sum() < 0.02


@pytest.mark.slow
def test_what_is_kept_does_not_grow_with_the_rows():
    for name in ("independent priors, shared", "Beta-Binomial hierarchy"):
        engine, init, update, _ = compiled(name)
        assert engine.capabilities.reserve is None
        rows = padded(*CASES[name].rows(np.random.default_rng(2), 500))
        with jax.enable_x64(True):
            before = init(jr.key(0))
            after, _ = update(jr.key(1), before, rows)
        assert [leaf.shape for leaf in jax.tree.leaves(after)] == [leaf.shape for leaf in jax.tree.leaves(before)]
        assert int(after.buffer.num_rows) == 500 and after.buffer.arm.size == 0


@pytest.mark.slow
def test_refreshes_among_few_rows_forget_where_they_started():
    """While the scale of a group may still be next to 0, a few particles are far out, and come back slowly.

    With 60 moves to forget in, 26 of 200 other streams had an update that was not trusted; with 240 none of those had, and one
    of these. Of 60 streams more than 3 would have one by a chance of 1 in 320 if one in 100 had.
    """
    file = load_model("ridge_regression")
    model = RewardModel(file.program, file.num_arms, file.context)
    num_rows = 40
    with jax.enable_x64(True):
        engine = engines.collapsed(model)
        truth = {name: jnp.asarray(value, float) for name, value in file.truth.items()}

        @jax.jit
        def learn(seed):
            keys = jr.split(jr.key(seed), 4)
            arm = jr.randint(keys[0], (num_rows,), 0, model.num_arms)
            context = jax.vmap(file.contexts)(jr.split(keys[1], num_rows))
            rows = Interaction(arm, model.draw_reward(keys[2], truth, arm, context), context)

            def step(state, new):
                key, row = new
                state, info = engine.update(key, state, jax.tree.map(lambda leaf: leaf[None], row))
                return state, (info.is_trusted, info.num_refreshes)

            return jax.lax.scan(step, engine.init(keys[3]), (jr.split(keys[3], num_rows), rows))[1]

        is_trusted, num_refreshes = map(np.asarray, zip(*(learn(seed) for seed in range(60)), strict=True))
        assert np.all(num_refreshes[:, -1] > 0)
        assert np.sum(~np.all(is_trusted, axis=1)) <= 3
