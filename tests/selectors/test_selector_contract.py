"""What every selector promises: the contract, one test over all of them."""

import functools
import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ppl_bandit.selectors import (
    bayes_ucb,
    double_sampling,
    greedy,
    information_directed,
    optimistic_gittins,
    thompson,
    top_two,
    with_floor,
)
from ppl_bandit.types import Marginals

NUM_DRAWS, NUM_ARMS = 60, 5
FAIR = {
    "double_sampling": double_sampling(),
    "thompson": thompson(),
    "greedy": greedy(),
    "bayes_ucb": bayes_ucb(),
    "top_two": top_two(0.3),
    "information_directed": information_directed(),
    "optimistic_gittins": optimistic_gittins(1000),
    "with_floor": with_floor(thompson(), 0.05),
}
ALL = FAIR | {"double_sampling_lowest": double_sampling(ties="lowest")}
MASK = np.array([True, True, False, True, True])


def some_slow(names, quick):
    """Return parameters of which only the quick ones belong to the default run."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


over_all = pytest.mark.parametrize("name", some_slow(ALL, FAIR))


@functools.cache
def jitted(name):
    selector = ALL[name]
    return jax.jit(lambda key, table, step, allowed: selector(key, table, step, allowed=allowed))


def tables():
    """Tables of one shape: in doubt, almost settled, settled, with tied rows, with equal arms, all equal, and so on."""
    rng = np.random.default_rng(11)
    noise = rng.normal(size=(NUM_DRAWS, NUM_ARMS))
    settled = noise * 0.01 + np.arange(NUM_ARMS)
    equal_arms = noise + 0.5 * np.arange(NUM_ARMS)
    equal_arms[:, 3] = equal_arms[:, 4]
    named = {
        "in doubt": noise + 0.3 * np.arange(NUM_ARMS),
        "almost settled": noise * 0.6 + np.arange(NUM_ARMS),
        "settled": settled,
        "tied rows": rng.integers(0, 3, size=(NUM_DRAWS, NUM_ARMS)).astype(float),
        "equal arms": equal_arms,
        "all equal": np.ones((NUM_DRAWS, NUM_ARMS)),
        "exchangeable": np.eye(NUM_ARMS)[np.arange(NUM_DRAWS) % NUM_ARMS] - 0.1,
    }
    return {name: jnp.asarray(table, jnp.float32) for name, table in named.items()}


@over_all
def test_propensities_sum_to_one_and_vanish_off_the_allowed_arms(name):
    for table in tables().values():
        for allowed in (np.ones(NUM_ARMS, bool), MASK, np.arange(NUM_ARMS) == 2):
            selection = jitted(name)(jr.key(0), table, 7, allowed)
            for probs in (selection.best_arm_probs, selection.propensities):
                np.testing.assert_allclose(jnp.sum(probs), 1.0, atol=1e-6)
                assert np.all(np.asarray(probs)[~allowed] == 0.0)
                assert jnp.all(probs >= 0.0)
            assert allowed[selection.arm]
            assert selection.arm.shape == selection.num_candidates.shape == ()


@over_all
def test_arms_are_played_as_often_as_their_propensities_say(name):
    num_runs = 20_000
    keys = jr.split(jr.key(1), num_runs)
    selector = ALL[name]
    select = jax.jit(
        jax.vmap(lambda key, table, allowed: selector(key, table, 7, allowed=allowed), in_axes=(0, None, None))
    )
    for label, table in tables().items():
        for allowed in (np.ones(NUM_ARMS, bool), MASK):
            selection = select(keys, table, allowed)
            frequencies = np.bincount(selection.arm, minlength=NUM_ARMS) / num_runs
            expected = np.asarray(selection.propensities[0])
            # 5 standard errors, and 1e-5 for the error of float32; an arm of propensity 0 is never played.
            error = 5 * np.sqrt(expected * (1 - expected).clip(0) / num_runs) + 1e-5
            assert np.all(np.abs(frequencies - expected) <= error), label
            assert np.all(frequencies[expected == 0] == 0), label


@pytest.mark.parametrize("name", FAIR)
def test_relabelling_the_arms_relabels_the_selection(name):
    rng = np.random.default_rng(2)
    for label, table in tables().items():
        for allowed in (np.ones(NUM_ARMS, bool), MASK):
            order = rng.permutation(NUM_ARMS)
            before = jitted(name)(jr.key(0), table, 7, allowed)
            after = jitted(name)(jr.key(0), table[:, order], 7, allowed[order])
            # p-hat is a sum of M shares and the propensities are within 1e-5: rounding, not a difference of one draw.
            np.testing.assert_allclose(after.best_arm_probs, before.best_arm_probs[order], atol=1e-6, err_msg=label)
            np.testing.assert_allclose(after.propensities, before.propensities[order], atol=2e-5, err_msg=label)
            assert after.num_candidates == before.num_candidates


@over_all
def test_entries_of_arms_that_are_not_allowed_do_not_matter(name):
    table = tables()["in doubt"]
    plain = jitted(name)(jr.key(0), table, 7, MASK)
    for entry in (np.nan, np.inf, 1e6):
        spoilt = jitted(name)(jr.key(0), table.at[:, 2].set(entry), 7, MASK)
        jax.tree.map(np.testing.assert_array_equal, spoilt, plain)


@pytest.mark.parametrize("name", some_slow(FAIR, ("double_sampling", "information_directed", "optimistic_gittins")))
def test_one_draw_of_one_arm_is_enough(name):
    selection = ALL[name](jr.key(0), jnp.ones((1, 1)), 1)
    assert selection.arm == 0
    np.testing.assert_array_equal(selection.propensities, [1.0])
    np.testing.assert_array_equal(selection.best_arm_probs, [1.0])


@over_all
def test_draws_that_all_agree_give_all_weight_to_their_best_arm(name):
    table = jnp.tile(jnp.array([0.0, 2.0, 1.0, 0.5, 0.1]), (NUM_DRAWS, 1))
    selection = jitted(name)(jr.key(0), table, 7, np.ones(NUM_ARMS, bool))
    np.testing.assert_array_equal(selection.best_arm_probs, [0.0, 1.0, 0.0, 0.0, 0.0])
    expected = {"top_two": [0.075, 0.7, 0.075, 0.075, 0.075], "with_floor": [0.05, 0.8, 0.05, 0.05, 0.05]}
    np.testing.assert_allclose(selection.propensities, expected.get(name, [0.0, 1.0, 0.0, 0.0, 0.0]), atol=1e-6)


@pytest.mark.parametrize("name", some_slow(FAIR, ("double_sampling", "optimistic_gittins")))
def test_a_scan_over_a_batch_agrees_with_single_calls(name):
    keys = jr.split(jr.key(5), (3, 2))
    batch = jnp.stack(list(tables().values())[:6]).reshape(3, 2, NUM_DRAWS, NUM_ARMS)
    steps = jnp.array([1, 7, 900])

    @jax.jit
    def run(keys, batch):
        select = jax.vmap(ALL[name], in_axes=(0, 0, None))
        return jax.lax.scan(lambda carry, row: (carry, select(*row)), None, (keys, batch, steps))[1]

    scanned = run(keys, batch)
    for step, row in np.ndindex(3, 2):
        single = jitted(name)(keys[step, row], batch[step, row], int(steps[step]), np.ones(NUM_ARMS, bool))
        assert scanned.arm[step, row] == single.arm
        assert scanned.num_candidates[step, row] == single.num_candidates
        np.testing.assert_allclose(scanned.best_arm_probs[step, row], single.best_arm_probs, atol=1e-6)
        np.testing.assert_allclose(scanned.propensities[step, row], single.propensities, atol=2e-5)


@pytest.mark.parametrize(
    "name", some_slow(("double_sampling", "bayes_ucb", "information_directed", "with_floor"), ("bayes_ucb",))
)
def test_float64_tables_give_float64_probabilities(name):
    table = tables()["tied rows"]
    single = jitted(name)(jr.key(0), table, 7, MASK)
    with jax.enable_x64(True):
        double = jitted(name)(jr.key(0), jnp.asarray(np.asarray(table), jnp.float64), 7, MASK)
    assert single.propensities.dtype == single.best_arm_probs.dtype == jnp.float32
    assert double.propensities.dtype == double.best_arm_probs.dtype == jnp.float64
    assert abs(np.sum(np.asarray(double.propensities)) - 1.0) < 1e-12
    np.testing.assert_allclose(double.propensities, single.propensities, atol=1e-5)


@pytest.mark.parametrize(
    "build",
    [bayes_ucb, *(pytest.param(b, marks=pytest.mark.slow) for b in (thompson, lambda: with_floor(greedy(), 0.05)))],
)
def test_a_loop_of_steps_compiles_once(build, caplog):
    table = tables()["in doubt"]
    selector = build()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        for step in range(1, 12):
            marginals = Marginals(cdf=lambda x: x, quantile=lambda q: q * jnp.arange(1.0, 1.0 + NUM_ARMS))
            given = step if step % 2 else np.int64(step)
            selector(jr.key(step), table + step, given, allowed=MASK, marginals=marginals)
    assert len([record for record in caplog.records if "Compiling jit(decide)" in record.getMessage()]) == 1


@pytest.mark.parametrize("name", ["thompson", "with_floor"])
def test_marginals_that_a_selector_has_no_use_for_change_nothing(name):
    table = tables()["in doubt"]
    marginals = Marginals(cdf=lambda x: x, quantile=lambda q: jnp.full(NUM_ARMS, jnp.nan))
    with_marginals = ALL[name](jr.key(0), table, 7, marginals=marginals)
    jax.tree.map(np.testing.assert_array_equal, with_marginals, ALL[name](jr.key(0), table, 7))


@over_all
def test_a_table_that_is_not_finite_is_explained(name):
    table = tables()["in doubt"].at[3, 4].set(jnp.nan).at[5, 0].set(jnp.inf)
    with pytest.raises(ValueError, match=r"table must be finite .* found 2 .* row 3, arm 4: nan; .*allowed="):
        ALL[name](jr.key(0), table, 7)


@over_all
def test_a_mask_that_allows_no_arm_is_explained(name):
    with pytest.raises(ValueError, match="allowed must let at least one arm be played.*pass None"):
        ALL[name](jr.key(0), tables()["in doubt"], 7, allowed=np.zeros(NUM_ARMS, bool))


@over_all
def test_inside_a_trace_what_cannot_be_decided_is_flagged(name):
    table = tables()["in doubt"]
    nobody = np.zeros(NUM_ARMS, bool)
    for bad_table, allowed in [(table.at[3, 4].set(-jnp.inf), ~nobody), (table, nobody)]:
        selection = jitted(name)(jr.key(0), bad_table, 7, allowed)
        assert selection.arm == -1 and selection.num_candidates == 0
        assert jnp.all(jnp.isnan(selection.propensities)) and jnp.all(jnp.isnan(selection.best_arm_probs))


@pytest.mark.parametrize("name", ["thompson", "with_floor"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(table=np.ones(3)), r"table must have shape \(M, A\).*got \(3,\)"),
        (dict(table=np.ones((2, 3, 4))), r"table must have shape \(M, A\).*got \(2, 3, 4\); .*jax.vmap"),
        (dict(table=np.ones((0, 3))), r"table must have shape \(M, A\).*got \(0, 3\)"),
        (dict(table=np.ones((2, 3), complex)), "table must hold real expected rewards, got dtype complex"),
        (dict(allowed=np.ones(3, bool)), r"allowed must be a boolean mask of shape \(2,\).*got shape \(3,\)"),
        (dict(allowed=np.ones(2)), "allowed must be a boolean mask.*dtype float"),
        (dict(step=0), "step must be at least 1, got 0; count steps from 1"),
        (dict(step=1.5), "step must be one integer.*dtype float"),
        (dict(step=np.arange(2)), r"step must be one integer, got shape \(2,\)"),
    ],
)
def test_arguments_that_cannot_be_used_are_explained(name, arguments, message):
    given = dict(table=np.ones((4, 2)), step=1, allowed=None) | arguments
    with pytest.raises(ValueError, match=message):
        ALL[name](jr.key(0), given["table"], given["step"], allowed=given["allowed"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: double_sampling(max_candidates=0),
            "max_candidates must be an integer of at least 1, got 0; .*thompson",
        ),
        (lambda: double_sampling(max_candidates=2.5), "max_candidates must be an integer of at least 1, got 2.5"),
        (lambda: double_sampling(max_candidates=True), "max_candidates must be an integer of at least 1, got True"),
        (lambda: double_sampling(ties="first"), 'ties must be "random" or "lowest", got \'first\''),
        (lambda: top_two(0.0), r"challenge_rate must lie strictly inside \(0, 1\), got 0.0; use greedy"),
        (lambda: top_two(1.0), r"challenge_rate must lie strictly inside \(0, 1\), got 1.0"),
        (lambda: with_floor(thompson(), -0.1), r"floor must lie in \[0, 1/A\] for A arms, got -0.1"),
        (lambda: with_floor(thompson(), float("nan")), r"floor must lie in \[0, 1/A\] for A arms, got nan"),
    ],
)
def test_settings_that_cannot_be_used_are_explained_at_once(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_importing_the_selectors_loads_no_model_library():
    # The package itself imports engines, so it is stood in for by an empty one with the same path.
    package = Path(__file__).parents[2] / "ppl_bandit"
    script = (
        "import sys, types; package = types.ModuleType('ppl_bandit'); "
        f"package.__path__ = [{str(package)!r}]; sys.modules['ppl_bandit'] = package; "
        "import ppl_bandit.selectors; "
        "print(*sorted(name for name in sys.modules if name.split('.')[0] == 'numpyro' or 'engines' in name)); "
        "print('ppl_bandit.numerics.pareto_tail' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["True"]
