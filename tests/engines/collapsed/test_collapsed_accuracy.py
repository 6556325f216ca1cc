"""The collapsed engine against quadrature over the outer sites, which is exact to any digit.

References are written in NumPy, apart from the library: on a grid of outer values, the density with inner sites integrated out
by textbook formulas, and the law of the arms' expected rewards given each. Tolerances: 4,000 draws leave an error of
1 / sqrt(4,000) = .016 posterior standard deviations in a mean, .011 of a standard deviation in itself, and of about .01 in
total variation for p-hat over five arms (.006 to .018 over eight seeds of the Beta-Binomial hierarchy at n = 5); 4,000
particles of which at least half count add as much again at most.

Gaussian processes have 10,000 draws of 10,000 particles: the Monte Carlo error of a mean is at most .010 sd from the draws and
as much from the particles, .014 in all. Of 30 such errors (five data sets, six arms) one exceeds .05, or 3.5 errors, with a
probability of .015. The relative error of a standard deviation is .010.

Of forty arms, the largest error of means of 4,000 draws passes 4.5 standard errors once in 4,000 times; those of the spread's
particles, shared by all arms, add less than half of one.
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
from programs import bernoulli, drawn, learnt, moments, normal, per_arm, reward, rows_of
from scipy import stats
from scipy.special import betaln, gammaln

from ppl_bandit import engines
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

CAPACITY = 512
NUM_REFERENCE = 100_000


class Case(NamedTuple):
    """A program, the outer sites that should be found, how to make data and the reference.

    `rows(rng, n)` -> (arm, reward, context); `reference(arm, reward, context)` -> (draws of expected rewards (R, A), log
    evidence); `context` is the one of the decision. `bounds` are those of the errors of means, of standard deviations and of
    p-hat; without the last, the evidence is not compared either.
    """

    program: object
    num_arms: int
    outer: tuple
    rows: object
    reference: object
    context: object = None
    outcomes: tuple = ("reward",)
    sizes: tuple = (5, 50, 500)
    num_draws: int = 4000
    bounds: tuple = (0.05, 0.05, 0.02)


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


def common_and_spread():
    return numpyro.sample("common", dist.Normal(0.0, 2.0)), numpyro.sample("spread", dist.HalfNormal(1.0))


def centred(arm, num_arms=5):
    normal(per_arm("mean", dist.Normal(*common_and_spread()), num_arms)[arm])


def non_centred(arm):
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    log_spread = numpyro.sample("log_spread", dist.Normal(-0.5, 0.8))
    deviation = per_arm("deviation", dist.Normal(0.0, 1.0), 5)
    normal((common + jnp.exp(log_spread) * deviation)[arm])


def unknown_noise(arm):
    common, spread = common_and_spread()
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 0.7))
    normal(per_arm("mean", dist.Normal(common, spread), 5)[arm], noise)


MEANS = np.array([0.3, 0.8, 1.0, 1.3, 1.8])


def gaussian_rows(rng, n, noise=0.8):
    arm = rng.integers(0, 5, n)
    return arm, MEANS[arm] + noise * rng.standard_normal(n), None


def rows_of_forty(rng, n):
    arm = rng.integers(0, 40, size=n)
    return arm, rng.normal(1.0, 0.5, size=40)[arm] + rng.standard_normal(n), None


def hierarchy_precision(spread, num_arms):
    precision = np.diag([0.25 + num_arms / spread**2, *[1 / spread**2] * num_arms])
    precision[0, 1:] = precision[1:, 0] = -1 / spread**2
    return precision, -np.log(4.0) - 2 * num_arms * np.log(spread)


KNOWN_NOISE = (np.ones(1), np.zeros(1))


def hierarchy_reference(spreads, spread_prior, noises=KNOWN_NOISE, num_arms=5):
    def reference(arm, reward, context):
        pairs = [(s, a, v, b) for s, a in zip(spreads, spread_prior, strict=True) for v, b in zip(*noises, strict=True)]
        precisions, log_dets = zip(*[hierarchy_precision(pair[0], num_arms) for pair in pairs], strict=True)
        means = np.eye(num_arms + 1)[1:]
        prior = np.array([a + b for _, a, _, b in pairs])
        return gaussian(precisions, log_dets, np.array([v for _, _, v, _ in pairs]), prior, means[arm], reward, means)

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
    normal(mean[arm], jnp.sqrt(variance[arm]))


def independent_shared(arm):
    precision = numpyro.sample("precision", dist.Gamma(3.0, 2.0))
    normal(per_arm("mean", dist.Normal(0.0, 2.0), 3)[arm], 1.0 / jnp.sqrt(precision))


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
    bernoulli(per_arm("rate", dist.Beta(mean * concentration, (1.0 - mean) * concentration), 4)[arm])


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
    return beta_hierarchy(np.random.default_rng(2), arm, reward, 4)


def beta_hierarchy(rng, arm, clicks, num_arms):
    m, k, log_density = beta_grid()
    a, b = m * k, (1 - m) * k
    wins, losses = (np.bincount(arm[clicks == r], minlength=num_arms) for r in (1, 0))
    for w, f in zip(wins, losses, strict=True):
        log_density = log_density + betaln(a + w, b + f) - betaln(a, b)
    return mixture(log_density, lambda i, num: rng.beta(a[i] + wins, b[i] + losses, (num, num_arms)), rng)


def gamma_poisson(arm):
    shape = numpyro.sample("shape", dist.LogNormal(1.0, 0.7))
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 0.7))
    reward(dist.Poisson(per_arm("demand", dist.Gamma(shape, rate), 4)[arm]))


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
    weights = per_arm("weights", dist.Normal(0.0, scale[jnp.array([0, 0, 1, 1])]).to_event(1))
    normal(jnp.sum(weights[arm] * context, axis=-1), 0.7)


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
    normal(level[arm] + season, 0.5)


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
    common, spread = common_and_spread()
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
    rates, mass = beta_hierarchy(rng, arm, reward["sale"], 5)
    sold = reward["sale"] == 1
    sizes, other = hierarchy_reference(SPREADS, HALF_NORMAL)(arm[sold], reward["log_amount"][sold], None)
    return rng.permutation(rates) * rng.permutation(sizes), mass + other


# Statistics that no few sums hold: how demand grows with exposure is unknown.


def exposed(arm, context):
    growth = numpyro.sample("growth", dist.Normal(0.5, 0.3))
    reward(dist.Poisson(per_arm("demand", dist.Gamma(2.0, 1.0))[arm] * jnp.exp(growth * jnp.log(context))))


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


# Gaussian processes over arms with several priors and in several forms: exact given the length-scale and the amplitude.

NUM_PLACES, NOISE, EFFECTS = 6, 0.3, 0.2
POSITION = np.linspace(0.0, 1.0, NUM_PLACES)
# {name: (law of the length-scale, law of the amplitude)}, each in NumPyro and in SciPy
PRIORS = {
    "LogNormal and HalfNormal": (
        (dist.LogNormal(-1.0, 0.5), stats.lognorm(0.5, scale=np.exp(-1.0))),
        (dist.HalfNormal(1.0), stats.halfnorm()),
    ),
    "InverseGamma and LogNormal": (
        (dist.InverseGamma(3.0, 1.0), stats.invgamma(3.0)),
        (dist.LogNormal(0.0, 0.5), stats.lognorm(0.5)),
    ),
    "HalfNormal and InverseGamma": (
        (dist.HalfNormal(0.5), stats.halfnorm(scale=0.5)),
        (dist.InverseGamma(3.0, 2.0), stats.invgamma(3.0, scale=2.0)),
    ),
}


def kernel(length, xp=jnp):
    return xp.exp(-0.5 * ((POSITION[:, None] - POSITION) / length) ** 2) + 1e-6 * np.eye(NUM_PLACES)


def curve(covariance):
    return numpyro.sample("curve", dist.MultivariateNormal(0.0, covariance))


def non_centred_curve(covariance):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([NUM_PLACES]).to_event(1))
    return jnp.linalg.cholesky(covariance) @ z


def with_arm_effects(covariance):
    effect = per_arm("effect", dist.Normal(0.0, EFFECTS), NUM_PLACES)
    return curve(covariance) + effect


def with_a_second_curve(covariance):
    return curve(covariance) + numpyro.sample("trend", dist.MultivariateNormal(0.0, 0.25 * kernel(2.0)))


FORMS = {  # {name: (program of the values, covariance added to that of the curve)}
    "centred": (curve, 0.0),
    "non-centred": (non_centred_curve, 0.0),
    "with arm effects": (with_arm_effects, EFFECTS**2 * np.eye(NUM_PLACES)),
    "with a second curve": (with_a_second_curve, 0.25 * kernel(2.0, np)),
}


def curve_rows(rng, n):
    arm = rng.integers(0, NUM_PLACES - 1, n)  # the last arm is never played
    return arm, np.sin(4.0 * POSITION[arm]) + NOISE * rng.standard_normal(n), None


def process(prior, form):
    (length_law, length_density), (amplitude_law, amplitude_density) = PRIORS[prior]
    values_of, added = FORMS[form]

    def program(arm):
        length, amplitude = numpyro.sample("length", length_law), numpyro.sample("amplitude", amplitude_law)
        normal(values_of(amplitude**2 * kernel(length))[arm], NOISE)

    def reference(arm, reward, context):
        points, step = grid(0.005, 30.0, 80)
        length, amplitude = (own.ravel() for own in np.meshgrid(points, points))
        prior = np.add.outer(step, step).ravel() + length_density.logpdf(length) + amplitude_density.logpdf(amplitude)
        precisions = np.linalg.inv(amplitude[:, None, None] ** 2 * np.stack([kernel(n, np) for n in length]) + added)
        log_dets, places = np.linalg.slogdet(precisions)[1], np.eye(NUM_PLACES)
        return gaussian(precisions, log_dets, np.full(length.size, NOISE), prior, places[arm], reward, places)

    more = dict(sizes=(24,) * 5, num_draws=10_000, bounds=(0.05, 0.05, None))
    return Case(program, NUM_PLACES, ("length", "amplitude"), curve_rows, reference, **more)


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
        hurdle, 5, ("mean", "concentration", "spread"), hurdle_rows, hurdle_reference, None, ("sale", "log_amount")
    ),
    "hierarchy of forty arms": Case(
        functools.partial(centred, num_arms=40),
        40,
        ("spread",),
        rows_of_forty,
        hierarchy_reference(SPREADS, HALF_NORMAL, num_arms=40),
        sizes=(300,),
        bounds=(5.0 / 4000**0.5, 5.0 / 8000**0.5 + 0.01, None),
    ),
    **{f"process, {prior}": process(prior, "centred") for prior in PRIORS},
    **{f"process, {form}": process("LogNormal and HalfNormal", form) for form in list(FORMS)[1:]},
}


@functools.cache
def compiled(name):
    case = CASES[name]
    with jax.enable_x64(True):
        context = None if case.context is None else jnp.asarray(case.context)
        model = RewardModel(case.program, case.num_arms, context, case.outcomes)
        engine = engines.collapsed(model, num_particles=case.num_draws, capacity=CAPACITY)
        table = jax.jit(lambda key, state: model.expected_rewards(engine.sample(key, state, case.num_draws), context))
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
@pytest.mark.parametrize("name", CASES)
def test_draws_agree_with_quadrature_over_the_outer_sites(name, capsys):
    case = CASES[name]
    engine, init, update, table = compiled(name)
    assert str(engine.explanation).split(":")[1].strip() == f"EXACT GIVEN {', '.join(case.outer)}"
    for number, n in enumerate(case.sizes):
        rows = case.rows(np.random.default_rng(number), n)
        exact, log_evidence = case.reference(*rows)
        with jax.enable_x64(True):
            state, info = update(jr.key(52), init(jr.key(2)), padded(*rows))
            tables = [np.asarray(table(jr.key(100 + seed), state)) for seed in range(4)]
        assert bool(info.is_trusted)
        spread = exact.std(axis=0)
        mean_error = np.max(np.abs(tables[0].mean(axis=0) - exact.mean(axis=0)) / spread)
        sd_error = np.max(np.abs(tables[0].std(axis=0) / spread - 1))
        # Of a typical table: with probabilities like .34, .15 and .51 one of 4,000 draws in sixty is .02 off by chance alone.
        distance = np.mean([0.5 * np.abs(shares(each) - shares(exact)).sum() for each in tables])
        with capsys.disabled():
            print(
                f"\n{name:>28} n={n:<3} mean {mean_error:.3f} sd {sd_error:.3f} p-hat {distance:.3f} evidence "
                f"{float(info.log_evidence) - log_evidence:+.3f} +- {float(info.log_evidence_error):.3f} "
                f"refreshes {int(info.num_refreshes)} autocorrelation {float(info.checks['path_autocorrelation']):.2f}",
                end="",
            )
        assert mean_error < case.bounds[0] and sd_error < case.bounds[1]
        if case.bounds[2] is not None:
            assert distance < case.bounds[2]
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


CONTEXTS = np.array([[1.0, 0.5], [-0.5, 1.0], [1.5, -1.0], [0.3, 0.8], [-1.2, 0.4], [0.7, -0.6]])
REWARDS = np.array([1.9, -1.2, 3.3, 0.4, -2.2, 1.1])


def horseshoe(arm, context):
    overall = numpyro.sample("overall", dist.HalfCauchy(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("features", 2):
        local = numpyro.sample("local", dist.HalfCauchy(1.0))
        weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
    normal(context @ (weight * local * overall) + 0.0 * arm, noise)


def moments_of_slopes():
    """Posterior means and standard deviations of both slopes: a grid over four logarithms, Gaussian in the weights."""
    logs = np.linspace(-6.0, 4.5, 28)  # of scales; the posterior beyond has less than 1% of the mass
    axes = np.meshgrid(logs, np.linspace(-3.0, 1.5, 24), logs, logs, indexing="ij")
    overall, noise, first, second = (np.exp(axis.ravel()) for axis in axes)
    scales = overall[:, None] * np.stack([first, second], axis=1)
    log_prior = sum(np.log(u) - np.log1p(u**2) for u in (overall, first, second))  # with the Jacobian of the logarithm
    log_prior += np.log(noise) - 0.5 * noise**2
    precision = CONTEXTS.T @ CONTEXTS / noise[:, None, None] ** 2 + np.eye(2) / scales[:, :, None] ** 2
    linear = CONTEXTS.T @ REWARDS / noise[:, None] ** 2
    covariance = np.linalg.inv(precision)
    mean = np.einsum("nij,nj->ni", covariance, linear)
    log_density = log_prior - len(REWARDS) * np.log(noise) - 0.5 * REWARDS @ REWARDS / noise**2
    log_density += 0.5 * np.sum(linear * mean, axis=1) - 0.5 * np.linalg.slogdet(precision)[1]
    log_density -= np.sum(np.log(scales), axis=1)
    first_moment, _ = moments(log_density, mean.T)
    second_moment, _ = moments(log_density, (mean**2 + np.diagonal(covariance, axis1=1, axis2=2)).T)
    return first_moment, np.sqrt(second_moment - first_moment**2)


@pytest.mark.slow
def test_a_horseshoe_agrees_with_quadrature():
    """Two more outer than inner numbers. 1,000 particles of four dimensions, autocorrelation at most .16, 4,000 draws.

    A mean is off by about sqrt(1.4 / 1,000) = .037 posterior standard deviations; three of these, and .01 for the grid. A
    standard deviation of a law with heavy tails (kurtosis up to 10) is off by sqrt(10 / 4 * 1.4 / 1,000) = 6%; two of these.
    """
    engine = engines.choose(RewardModel(horseshoe, 1, jnp.zeros(2)))
    assert engine.explanation.engine == "collapsed" and set(engine.settings["outer"]) == {"overall", "noise", "local"}
    state, info = learnt(engine, rows_of(np.zeros(6, int), REWARDS.astype(np.float32), CONTEXTS.astype(np.float32)))
    assert bool(info.is_trusted)
    draws = {name: np.asarray(value, float) for name, value in drawn(engine, state, 4000).items()}
    slopes = draws["weight"] * draws["local"] * draws["overall"][:, None]
    mean, deviation = moments_of_slopes()
    assert np.max(np.abs(slopes.mean(axis=0) - mean) / deviation) < 3 * 0.037 + 0.01
    assert np.max(np.abs(slopes.std(axis=0) / deviation - 1)) < 2 * 0.06
