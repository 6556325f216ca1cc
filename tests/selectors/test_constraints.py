"""A control's share, floors and caps per arm, floors that fade: played as stated, and stated as played."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ppl_bandit import selectors

NUM_PLAYS = 4000
TABLE = jr.normal(jr.key(0), (200, 4)) + jnp.array([0.0, 0.3, 0.6, 2.0])


def plays(selector, step=1, allowed=None):
    """The arms played from one table with many keys, and the propensities stated for the first."""
    found = jax.jit(jax.vmap(lambda key: selector(key, TABLE, step, allowed=allowed)))(jr.split(jr.key(1), NUM_PLAYS))
    return np.bincount(found.arm, minlength=4) / NUM_PLAYS, np.asarray(found.propensities[0])


def check_shares(shares, propensities):
    # Counts are binomial: 5 standard errors of a share.
    error = 5 * np.sqrt(np.maximum(propensities * (1 - propensities), 1e-12) / NUM_PLAYS)
    assert np.all(np.abs(shares - propensities) <= error + 1e-9)
    np.testing.assert_allclose(propensities.sum(), 1.0, rtol=1e-5)


def test_the_control_gets_its_share_and_the_others_what_the_selector_says():
    shares, propensities = plays(selectors.with_control(selectors.thompson(), 0.25))
    check_shares(shares, propensities)
    assert propensities[0] == pytest.approx(0.25)
    alone = selectors.thompson()(jr.key(0), TABLE, 1, allowed=jnp.array([False, True, True, True])).propensities
    np.testing.assert_allclose(propensities[1:], 0.75 * alone[1:], rtol=1e-5)
    probs = [
        rule(jr.key(0), TABLE, 1).best_arm_probs
        for rule in (selectors.thompson(), selectors.with_control(selectors.thompson(), 0.25))
    ]
    np.testing.assert_array_equal(*probs)  # also of the control, which the selector does not choose among


@pytest.mark.parametrize(
    ("allowed", "expected"), [([False, True, True, True], 0.0), ([True, False, False, False], 1.0)]
)
def test_a_control_that_is_not_allowed_or_alone_has_no_share_to_keep(allowed, expected):
    shares, propensities = plays(selectors.with_control(selectors.greedy(), 0.25), allowed=jnp.array(allowed))
    check_shares(shares, propensities)
    assert propensities[0] == expected


def test_floors_and_caps_per_arm_hold_and_nothing_else_moves():
    limited = selectors.with_limits(selectors.thompson(), floors=[0.2, 0.05], caps=[1.0, 1.0, 1.0, 0.5])
    shares, propensities = plays(limited)
    check_shares(shares, propensities)
    assert propensities[0] >= 0.2 - 1e-6 and propensities[1] >= 0.05 - 1e-6 and propensities[3] <= 0.5 + 1e-6
    free = np.asarray(selectors.thompson()(jr.key(0), TABLE, 1).propensities)
    wide = selectors.with_limits(selectors.thompson(), floors=0.0, caps=1.0)
    np.testing.assert_allclose(plays(wide)[1], free, atol=1e-6)


def test_a_floor_fades_with_the_step():
    fading = selectors.with_limits(selectors.greedy(), floors=0.1, decay=0.5)
    for step, floor in ((1, 0.1), (4, 0.05), (100, 0.01)):
        np.testing.assert_allclose(plays(fading, step)[1], [floor] * 3 + [1 - 3 * floor], atol=1e-5)


def test_softened_probabilities_are_powers_that_change_at_their_numbers_of_decisions():
    probs = jnp.array([0.0, 0.1, 0.2, 0.7])
    allowed = jnp.array([True, True, True, False])
    rule = selectors.softened(selectors.thompson(), [(0, 0.5), (10, 0.0), (20, 1.0)])
    for step, power, arms in ((10, 0.5, None), (11, 0.0, None), (11, 0.0, allowed), (21, 1.0, None)):
        found = rule.select_from_probs(jr.key(0), probs, step, allowed=arms)
        expected = np.asarray(probs) ** power * (1.0 if arms is None else np.asarray(arms))
        np.testing.assert_allclose(found.propensities, expected / expected.sum(), rtol=1e-6)
    check_shares(*plays(selectors.softened(selectors.thompson(), 0.5)))


def test_limits_and_powers_need_no_table_and_give_the_same_without_it():
    softer = selectors.with_limits(selectors.softened(selectors.thompson(), 0.5), floors=0.15)
    with_table = softer(jr.key(0), TABLE, 1)
    without = softer.select_from_probs(jr.key(0), with_table.best_arm_probs, 1)
    np.testing.assert_allclose(without.propensities, with_table.propensities, rtol=1e-6)
    assert softer.select_from_probs is not None and not softer.is_linear
    assert selectors.with_control(softer, 0.3).select_from_probs is None  # chooses among the others


def test_the_root_share_of_a_control_counts_the_arms_that_are_left():
    rule = selectors.with_control(selectors.thompson(), "sqrt")
    for allowed, others in ((jnp.ones(4, bool), 3), (jnp.array([True, True, False, False]), 1)):
        found = rule(jr.key(0), TABLE, 1, allowed=allowed)
        expected = np.sqrt(others) / (np.sqrt(others) + others)
        np.testing.assert_allclose(found.propensities[0], expected, rtol=1e-6)


def test_limits_that_the_allowed_arms_cannot_meet_give_way():
    capped = selectors.with_limits(selectors.greedy(), caps=0.3)
    np.testing.assert_allclose(
        plays(capped, allowed=jnp.array([True, True, False, False]))[1], [0.5, 0.5, 0, 0], atol=1e-6
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: selectors.with_control(selectors.greedy(), 1.0), "share must lie strictly inside"),
        (lambda: selectors.with_control(selectors.greedy(), "match"), "or be \"sqrt\", got 'match'"),
        (lambda: selectors.with_control(selectors.greedy(), 0.5, arm=-1), "arm must be the index"),
        (lambda: selectors.softened(selectors.greedy(), "half"), "power must lie in"),
        (lambda: selectors.softened(selectors.greedy(), [(5, 0.5)]), "begin with 0 decisions"),
        (lambda: selectors.with_limits(selectors.greedy(), floors=[0.6, 0.6]), "add up to 1.2, more than 1"),
        (lambda: selectors.with_limits(selectors.greedy(), floors=[0.3, 0.1], caps=[0.2, 1.0]), "exceed caps"),
        (lambda: selectors.with_limits(selectors.greedy(), caps=1.5), "caps must be probabilities"),
        (lambda: selectors.with_limits(selectors.greedy(), decay=-1.0), "decay must be at least 0"),
        (lambda: selectors.with_limits(selectors.greedy, floors=0.1), "call it"),
    ],
)
def test_rules_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
