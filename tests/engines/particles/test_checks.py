"""A failed check is named with its value and its bound; diagnostics are right where their values are known."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import per_arm

from ppl_bandit import Bandit, RewardModel, engines
from ppl_bandit.engines.checks import CHECKS, all_passed, describe_failures, make_info, worst_values
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT, chain_ess, moment_shifts, notable_k_hat, pareto_k_hat
from ppl_bandit.engines.particles.weights import (
    finite_log_weights,
    flatten_log_weights,
    normalize_weights,
    resample,
    weight_ess,
)
from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto
from ppl_bandit.types import Interaction

NAMES = ("k_hat", "acceptance", "capacity")
NO_ROOM = "the rows did not fit into the buffer and were not learnt"


@pytest.mark.parametrize(
    ("values", "failures"),
    [
        ([0.7, 0.5, 1.0], []),
        ([0.93, 0.8, 1.0], ["Pareto k-hat of the weights is 0.93 and must be at most 0.7"]),
        ([0.1, 0.25, 0.0], [NO_ROOM, "the mean acceptance probability is 0.25 and must be at least 0.5"]),
        ([np.nan, 0.8, 1.0], ["Pareto k-hat of the weights is nan and must be at most 0.7"]),
    ],
)
def test_a_failed_check_is_named_with_its_value_and_bound(values, failures):
    checks = dict(zip(NAMES, jnp.asarray(values), strict=True))
    assert describe_failures(checks) == failures
    assert bool(all_passed(checks)) == (not failures)
    info = make_info(checks, permanent=["capacity"])
    assert info.failed_checks() == failures
    assert (bool(info.is_trusted), bool(info.may_recover)) == (not failures, NO_ROOM not in failures)


def test_the_worst_value_of_several_blocks_is_the_largest_or_the_smallest_by_the_kind_of_bound():
    values = dict(zip(NAMES, jnp.array([[0.2, 0.5], [0.9, 0.6], [1.0, 0.0]]), strict=True))
    found = worst_values(values)
    np.testing.assert_allclose([found[name] for name in NAMES], [0.5, 0.6, 0.0])


def clicks(arm):
    score = per_arm("score", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(logits=score[arm]))


def test_the_warning_of_a_live_bandit_names_the_failed_check_and_no_other():
    """`laplace` with its k-hat replaced by 2; the other checks pass or fail as measured."""

    def skewed(model):
        engine = engines.laplace(model)

        def update(key, state, rows):
            state, info = engine.update(key, state, rows)
            return state, info._replace(is_trusted=jnp.array(False), checks={**info.checks, "k_hat": jnp.array(2.0)})

        return engine._replace(update=update)

    bandit = Bandit(clicks, 2, engine=skewed)
    with pytest.warns(UserWarning) as warned:
        bandit.update(arm=0, reward=1)
    text = str(warned[0].message)
    conclusion = "the draws of the laplace engine are not trusted: intervals and P(best) may be wrong; leave engine out"
    assert text.startswith(conclusion) and text.endswith(
        "(details: Pareto k-hat of the weights is 2 and must be at most 0.7)"
    )
    assert bandit.explanation.engine == "laplace"  # chosen for its speed: no slower engine replaces it
    assert "NOT TRUSTED" in bandit.explain() and "k-hat" not in bandit.explain() + bandit.report().text
    assert "k-hat of the weights is 2" in bandit.explain(details=True)
    with pytest.raises(ValueError, match="the laplace engine does not estimate the log evidence"):
        _ = bandit.log_evidence


@pytest.mark.slow
def test_a_bandit_whose_moves_end_at_their_budget_keeps_its_engine_and_every_decision_says_so():
    """`laplace` under the name of an engine that has a fallback; the first 11 updates report moves that did not finish."""
    num_unfinished = 11  # one more than the doubted refreshes after which other evidence leads to the fallback

    def unfinished(model):
        engine = engines.laplace(model)

        def update(key, state, rows):
            state, _ = engine.update(key, state, rows)
            num_rows = jnp.sum(state.buffer.times)
            is_done = num_rows > num_unfinished
            checks = {"autocorrelation": jnp.array(0.8), "divergences": jnp.array(0.0), "budget": jnp.array(0.0)}
            info = make_info(checks, is_unfinished=~is_done, num_refreshes=num_rows)
            return state, info._replace(is_trusted=is_done)

        return engine._replace(update=update, explanation=engine.explanation._replace(engine="reweight"))

    bandit = Bandit(clicks, 2, engine=unfinished)
    with pytest.warns(UserWarning, match="ended at their budget") as warned:
        for row in range(num_unfinished):
            bandit.update(arm=row % 2, reward=1)
    assert len(warned) == 1 and bandit.explanation.engine == "reweight"
    (note,) = bandit.select().notes
    assert "the autocorrelation of the particles with their starting positions is 0.8 and must be at most 0.5" in note
    assert "engines.laplace" in note and "divergent" not in note
    bandit.update(arm=0, reward=1)
    assert bandit.select().notes == () and "NOT TRUSTED, use" not in bandit.explain()


def test_there_are_few_checks_and_every_number_of_the_engines_has_a_comment():
    assert len(CHECKS) <= 22
    numbers, bare = 0, list[str]()
    for path in sorted(Path(engines.__file__).parent.rglob("*.py")):
        source = path.read_text()
        lines = source.splitlines()
        for node in ast.parse(source).body:
            values = [] if not isinstance(node, ast.Assign) else list(ast.walk(node.value))
            if not any(isinstance(value, ast.Constant) and type(value.value) in (int, float) for value in values):
                continue
            numbers += 1
            written = [*lines[node.lineno - 1 : node.end_lineno], *filter(str.strip, lines[node.end_lineno :][:1])]
            above = lines[node.lineno - 2].startswith("#") or "  #" in lines[node.lineno - 2]
            if isinstance(node.value, ast.Call | ast.Dict) or above or any("#" in line for line in written):
                continue
            bare.append(f"{path.name}: {lines[node.lineno - 1]}")
    assert bare == [] and numbers <= 110


def test_rows_that_do_not_fit_are_named():
    engine = engines.laplace(RewardModel(clicks, 2), capacity=2)
    state = jax.jit(engine.init)(jr.key(0))
    _, info = jax.jit(engine.update)(jr.key(1), state, Interaction(jnp.zeros(3, int), jnp.array([0.0, 1.0, 1.0])))
    assert info.failed_checks() == ["the rows did not fit into the buffer and were not learnt"]


# Diagnostics against laws whose values are known


k_hat = jax.jit(pareto_k_hat)


@jax.jit
def k_hat_if_notable(log_weights):
    return notable_k_hat(log_weights, normalize_weights(log_weights))


@pytest.mark.parametrize("shape", [0.3, 0.5, 1.0])
def test_k_hat_finds_the_shape_of_pareto_weights(shape):
    # w = u^(-shape) has the tail index `shape`; with 3 sqrt(M) = 949 of 100,000 weights in the tail, the standard error of
    # the estimate is (1 + shape) / sqrt(949), at most 0.065, and four of them are allowed.
    log_weights = -shape * jnp.log(jr.uniform(jr.key(0), (100_000,), minval=1e-12))
    assert abs(float(k_hat(log_weights)) - shape) < 4 * (1 + shape) / 949**0.5


@pytest.mark.slow
def test_a_tail_is_fitted_only_if_the_largest_weight_is_large_enough_to_matter():
    """Weights 1 + scale X, X of a Pareto tail with k = 0.7, from nearly equal ones to ones of which a few count.

    Where no tail is fitted, the mean of M weights is to be off by no more than that of M independent draws, 1 / sqrt(M)
    relatively, as root of the mean square over the runs. Where one is fitted it is off by more, or nothing was to be found.
    """
    num, num_runs = 1000, 400
    generator = np.random.default_rng(0)
    find, fit = jax.jit(jax.vmap(k_hat_if_notable)), jax.jit(jax.vmap(k_hat))
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
    assert float(k_hat(jnp.full(1000, -3.2))) == 0.0
    assert float(k_hat(-1000.0 + 1e-4 * jr.normal(jr.key(0), (1000,)))) == 0.0  # the rounding of a long sum
    assert float(k_hat(jnp.full(1000, -jnp.inf))) == jnp.inf
    assert float(k_hat(jnp.zeros(1000).at[7].set(jnp.nan))) == jnp.inf
    for impossible in (jnp.full(1000, -jnp.inf), jnp.zeros(1000).at[7].set(jnp.nan)):
        assert float(k_hat_if_notable(impossible)) == jnp.inf
    assert float(weight_ess(jnp.full(50, 2.0))) == pytest.approx(50.0)
    assert float(weight_ess(jnp.zeros(50).at[1:].set(-jnp.inf))) == pytest.approx(1.0)
    assert float(weight_ess(jnp.full(50, -jnp.inf))) == 0.0
    np.testing.assert_array_equal(finite_log_weights(jnp.array([jnp.nan, -jnp.inf])), [0.0, 0.0])
    np.testing.assert_array_equal(finite_log_weights(jnp.array([jnp.nan, 1.0])), [-jnp.inf, 1.0])


def test_moment_shifts_match_closed_forms():
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


def test_the_ess_of_ar1_chains_matches_its_closed_form():
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


def test_chains_that_disagree_or_do_not_move_have_a_small_ess():
    apart = 0.01 * np.random.default_rng(0).normal(size=(10, 100)) + np.arange(10.0)[:, None]
    ess = jax.jit(chain_ess)(jnp.stack([jnp.asarray(apart), jnp.ones((10, 100))], axis=-1))
    assert 0.0 < float(ess[0]) < 20.0
    assert float(ess[1]) < 20.0


@pytest.mark.slow
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
            shape, _ = fit_generalized_pareto(jnp.asarray(weights[:-1] - weights[-1])[::-1])
            expected = (95 * float(shape) + 5.0) / 105.0
            assert abs(float(find(jnp.asarray(log_weights))) - expected) < 1e-6
            fires.append(expected > MAX_K_HAT)
        assert any(fires) and not all(fires)


# Importance weights: tempering and resampling


@pytest.mark.parametrize(
    "log_weights", [[0.0, -1e4, -jnp.inf, -jnp.inf], [0.0, 0.0, 0.0, 0.0], [-jnp.inf, 3.0, 0.0, 1.0]]
)
def test_tempering_ends_when_all_positive_weights_are_equal(log_weights):
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
