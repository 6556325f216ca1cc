"""Approximate posteriors against exact ones, and against long runs of NumPyro's own NUTS.

Means and standard deviations are compared in unconstrained space, where every posterior has them. Engines hold 4,000 draws
with an effective sample size of at least 2,000: a mean is off by 1 / sqrt(2,000) = 0.022 posterior standard deviations, a
standard deviation by sqrt((kurtosis - 1) / (4 x 2,000)) of itself, which is 1.6% for a Gaussian, and the total variation of
p-hat by some 0.013; the bounds 0.1, 10% and 0.03 are four, six and more than two of these. Where heavy tails make the second
error larger, four of it are allowed. Weights of `linear_gaussian` after 5 rows are Student-t with 4 and 5 degrees of freedom:
the sample variance of the former has itself no variance. There the standard deviations of the reference come from their
closed form, and engines hold 20,000 draws: even exact draws miss 10% now and then with 4,000.
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
from hard_posteriors import numpyro_draws
from programs import logistic, slow_but
from scipy.special import polygamma

from ppl_bandit import engines
from ppl_bandit.engines.particles.space import unconstrained_space
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

MAX_ROWS = 500
NUMS_ROWS = (5, 50, MAX_ROWS)
NUM_DRAWS = 4000
CONJUGATE = (
    "bernoulli",
    "binomial",
    "dirichlet_categorical",
    "exponential",
    "gaussian",
    "hierarchical_gaussian",
    "hurdle",
    "linear_gaussian",
    "poisson",
)
OTHERS = ("logistic", "hierarchical_bernoulli", "student_t")
HEAVY_TAILED = ("linear_gaussian", 5)
MAKERS = {
    "nuts": lambda model, num: engines.nuts(model, num_draws=num, capacity=512),
    "reweight": lambda model, num: engines.reweight(model, num_particles=num, capacity=512),
    "svi": lambda model, num: engines.svi(model, capacity=512),
    "laplace": lambda model, num: engines.laplace(model, capacity=512),
}


@functools.cache
def loaded(name):
    file = load_model(name)
    return RewardModel(file.program, file.num_arms, context=file.context, outcomes=file.outcomes), file


@functools.cache
def rows_of(name):
    """500 rows of the model's own world, arms in turn; a test counts the first n of them by a mask."""
    model, file = loaded(name)
    with jax.enable_x64(False):  # random numbers depend on the precision
        arm = jnp.arange(MAX_ROWS) % model.num_arms
        key_context, key_reward = jr.split(jr.key(11))
        context = None if file.context is None else jax.vmap(file.contexts)(jr.split(key_context, MAX_ROWS))
        reward = jax.jit(model.draw_reward)(key_reward, file.truth, arm, context)
        return Interaction(arm, reward, context)


@functools.cache
def compiled(name, engine_name, num_draws):
    engine = MAKERS[engine_name](loaded(name)[0], num_draws)
    return jax.jit(engine.init), jax.jit(engine.update), jax.jit(engine.sample, static_argnums=2)


def approximate(name, engine_name, num_rows, key=3):
    # Gaussians are fitted in double precision, as in the live bandit: Newton's method ends on a gradient that float32 cannot
    # resolve. Chains lose nothing to float32, and are faster in it.
    num_draws = 5 * NUM_DRAWS if (name, num_rows) == HEAVY_TAILED else NUM_DRAWS
    with jax.enable_x64(engine_name in ("svi", "laplace")):
        init, update, sample = compiled(name, engine_name, num_draws)
        mask = jnp.arange(MAX_ROWS) < num_rows
        state, info = update(jr.key(key), init(jr.key(0)), rows_of(name)._replace(mask=mask))
        return sample(jr.key(1), state, num_draws), info


@functools.cache
def exact_posterior(name, num_rows):
    engine = engines.conjugate(loaded(name)[0])
    rows = jax.tree.map(lambda leaf: leaf[:num_rows], rows_of(name))
    state, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows)
    assert bool(info.is_trusted)
    return engine, state


def heavy_tailed_sds():
    """Standard deviations of log variances and of weights: a Normal-InverseGamma posterior in closed form."""
    with jax.enable_x64(True):
        engine, state = exact_posterior(*HEAVY_TAILED)
        known = engine.capabilities.parameters(state)
    shape, rate = known["variance"]["concentration"], known["variance"]["rate"]
    covariance = np.diag(known["weights"]["covariance_times_precision"]).reshape(2, 2)
    variances = (rate / (shape - 1))[:, None] * covariance
    return np.sqrt(np.concatenate([polygamma(1, shape), variances.ravel()]))


@functools.cache
def reference(name, num_rows):
    """Draws of the exact posterior, or 100,000 of NumPyro's NUTS."""
    model, _ = loaded(name)
    rows = jax.tree.map(lambda leaf: leaf[:num_rows], rows_of(name))
    if name == "student_t" and num_rows == 5:
        return student_t_by_quadrature(rows)
    with jax.enable_x64(True):
        if name in CONJUGATE:
            engine, state = exact_posterior(name, num_rows)
            return jax.device_get(jax.jit(engine.sample, static_argnums=2)(jr.key(0), state, 40_000))

        return numpyro_draws(model, rows)


def student_t_by_quadrature(rows, num_draws=40_000):
    """Exact draws of `student_t` on few rows: arms are independent, and each has two latents.

    An arm with one row leaves a funnel, its mean the nearer to the row the smaller its scale, which NumPyro's NUTS with a
    target acceptance of 0.9 does not reach the end of: 100,000 draws of it are off by 0.1 standard deviations.
    """
    rng = np.random.default_rng(0)
    log_scales = np.linspace(-14.0, 3.0, 1701)
    arm, reward = np.asarray(rows.arm), np.asarray(rows.reward, float)
    draws = {"mean": np.empty((num_draws, 3)), "scale": np.empty((num_draws, 3))}
    for a in range(3):
        grids, cumulatives = [], []
        for log_scale in log_scales:
            near = [y + np.exp(log_scale) * np.sinh(np.linspace(-9.0, 9.0, 801)) for y in reward[arm == a]]
            mean = np.unique(np.clip(np.concatenate([np.linspace(-12.0, 12.0, 1201), *near]), -12.0, 12.0))
            residual = (reward[arm == a][:, None] - mean) / np.exp(log_scale)
            log_density = -(mean**2) / 8 - np.exp(2 * log_scale) / 2 + log_scale  # priors, and the Jacobian of the log
            log_density += np.sum(-2.5 * np.log1p(residual**2 / 4) - log_scale, axis=0)
            density = np.exp(log_density)
            pieces = np.diff(mean) * (density[1:] + density[:-1]) / 2
            grids.append(mean)
            cumulatives.append(np.concatenate([[0.0], np.cumsum(pieces)]))
        totals = np.array([cumulative[-1] for cumulative in cumulatives])
        index = rng.choice(len(log_scales), num_draws, p=totals / totals.sum())
        draws["scale"][:, a] = np.exp(log_scales[index])
        for i in np.unique(index):
            points = rng.uniform(size=np.sum(index == i)) * totals[i]
            draws["mean"][index == i, a] = np.interp(points, cumulatives[i], grids[i])
    return draws


class Errors(NamedTuple):
    """Errors of an engine's draws, the largest over the unconstrained coordinates.

    Attributes:
        mean: in posterior standard deviations.
        sd: of a standard deviation, relative to itself.
        sd_allowed: the same error relative to what is allowed: 10%, or four Monte Carlo errors where these are larger.
        variation: total variation of p-hat.
    """

    mean: float
    sd: float
    sd_allowed: float
    variation: float


def compare(name, num_rows, draws):
    return compare_with(reference(name, num_rows), name, num_rows, draws)


def compare_with(exact, name, num_rows, draws):
    model, _ = loaded(name)
    space = unconstrained_space(model)
    real = jax.jit(jax.vmap(space.unconstrain))
    with jax.enable_x64(True):
        found, right = (np.asarray(real(jax.tree.map(jnp.asarray, d)), float) for d in (draws, exact))
        tables = [np.asarray(jax.jit(model.expected_rewards)(jax.tree.map(jnp.asarray, d))) for d in (draws, exact)]
    sd = heavy_tailed_sds() if (name, num_rows) == HEAVY_TAILED else right.std(axis=0)
    kurtosis = 1 if (name, num_rows) == HEAVY_TAILED else np.mean(((right - right.mean(axis=0)) / sd) ** 4, axis=0)
    allowed = np.maximum(0.1, 4 * np.sqrt((kurtosis - 1) / (4 * NUM_DRAWS / 2)))
    sd_error = np.abs(found.std(axis=0) / sd - 1)
    shares = [np.bincount(table.argmax(axis=1), minlength=model.num_arms) / len(table) for table in tables]
    return Errors(
        np.max(np.abs(found.mean(axis=0) - right.mean(axis=0)) / sd),
        np.max(sd_error),
        np.max(sd_error / allowed),
        0.5 * np.abs(shares[0] - shares[1]).sum(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["nuts", "reweight"])
@pytest.mark.parametrize("name", [*CONJUGATE, *OTHERS])
def test_sampling_engines_agree_with_the_reference(name, engine_name):
    for num_rows in NUMS_ROWS:
        draws, _ = approximate(name, engine_name, num_rows)
        errors = compare(name, num_rows, draws)
        assert errors.mean < 0.1
        assert errors.sd_allowed < 1
        assert errors.variation < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["svi", "laplace"])
@pytest.mark.parametrize("name", [*CONJUGATE, *OTHERS])
def test_gaussian_engines_say_when_they_are_far_off(name, engine_name):
    for num_rows in NUMS_ROWS:
        draws, info = approximate(name, engine_name, num_rows)
        errors = compare(name, num_rows, draws)
        # Where the evidence says that the draws can be trusted, no mean is off by a fifth of a standard deviation, and no
        # standard deviation by a fifth, up to the Monte Carlo error of the evidence, of which two are allowed.
        assert not bool(info.is_trusted) or errors.mean < 0.2 + 2 / np.sqrt(float(info.ess))
        assert not bool(info.is_trusted) or errors.sd < 0.2 + 2 / np.sqrt(2 * float(info.ess))


NUM_TRIALS, NUM_SUCCESSES = 200, 2


def rare_events(arm):
    logistic(jnp.broadcast_to(numpyro.sample("intercept", dist.Normal(0.0, 3.0)), arm.shape))


def grid_median():
    grid = np.linspace(-15.0, 5.0, 200_001)
    log_density = -0.5 * (grid / 3.0) ** 2 + NUM_SUCCESSES * grid - NUM_TRIALS * np.logaddexp(0.0, grid)
    cumulative = np.cumsum(np.exp(log_density - log_density.max()))
    return grid[np.searchsorted(cumulative, cumulative[-1] / 2)]


def rare_event_median(engine):
    reward = jnp.zeros(NUM_TRIALS).at[jnp.array([40, 150])].set(1.0)
    with jax.enable_x64(True):  # as in the live bandit; Newton's method ends on a gradient that float32 cannot resolve
        state, info = jax.jit(engine.update)(
            jr.key(1), jax.jit(engine.init)(jr.key(0)), Interaction(jnp.zeros(NUM_TRIALS, int), reward)
        )
        draws = jax.jit(engine.sample, static_argnums=2)(jr.key(2), state, NUM_DRAWS)["intercept"]
        return float(jnp.median(draws)), info


RARE_MAKERS = {
    "reweight": functools.partial(engines.reweight, num_particles=NUM_DRAWS, capacity=200),
    "nuts": functools.partial(engines.nuts, num_draws=NUM_DRAWS, capacity=200),
    "laplace": functools.partial(engines.laplace, capacity=200),
    "svi": functools.partial(engines.svi, capacity=200),
}


@pytest.mark.parametrize("engine_name", slow_but(RARE_MAKERS, "laplace"))
def test_rare_events_have_the_median_of_the_exact_posterior(engine_name):
    # 2 successes in 200. The posterior sd is 0.7, so the Monte Carlo error of the median is 1.25 x 0.7 / sqrt(2,000) = 0.02,
    # half a percent of the median, -4.6.
    with jax.enable_x64(True):
        engine = RARE_MAKERS[engine_name](RewardModel(rare_events, 1))
    median, info = rare_event_median(engine)
    assert abs(median / grid_median() - 1) < 0.05
    if engine_name in ("reweight", "nuts"):  # the rate is exp(intercept) for rare events: .02 is 2% of it
        assert abs(np.exp(median - grid_median()) - 1) < 0.05
    if engine_name == "laplace":
        # The mode is near the median, and the mean of a skewed posterior is not: .3 sd off, and the engine says so.
        assert not bool(info.is_trusted) and 0.15 < float(info.checks["mean_shift"]) < 0.5
    elif engine_name != "svi":
        assert bool(info.is_trusted)
    else:
        # The best Gaussian in the sense of the lower bound has a sd of 0.65; towards -inf the posterior falls as the prior
        # does, whose sd is 3: k-hat is rightly near 1, and the fit may be flagged. Its width must be right all the same.
        assert float(info.checks["sd_shift"]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "student_t"])
def test_mixtures_and_robust_regressions_work_out_of_the_box(name):
    draws, info = approximate(name, "reweight", 500)
    assert bool(info.is_trusted)
    for site, true in loaded(name)[1].truth.items():
        sample = np.asarray(draws[site])
        # 95% intervals widened to four standard deviations: none of some twenty coordinates should miss.
        assert np.all(np.abs(sample.mean(axis=0) - np.asarray(true)) < 4 * sample.std(axis=0))
