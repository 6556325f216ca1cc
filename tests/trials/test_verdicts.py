"""The verdict of a look equals an independent version of adaptr's order of checks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_rules import look_with_control, look_without_control
from trial_settings import widest

from ppl_bandit.trials import stopping
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import ENDINGS, check_look, endings
from ppl_bandit.trials.setting import from_table

NUM_DRAWS, NUM_ARMS, NUM_CASES = 64, 4, 1500


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(1)
    means = rng.normal(0.0, 1.0, (NUM_CASES, 1, NUM_ARMS)) * rng.choice([0.02, 0.5, 2.0], (NUM_CASES, 1, 1))
    return (
        means + rng.normal(size=(NUM_CASES, NUM_DRAWS, NUM_ARMS)) * rng.choice([0.05, 1.0], (NUM_CASES, 1, 1))
    ).astype(np.float32)


def verdicts(design, tables, active, control):
    def one(table, mask):
        return check_look(design, 0, from_table(table), mask, control, first_control=control)

    return jax.device_get(jax.jit(jax.vmap(one))(jnp.asarray(tables), jnp.asarray(active)))


def random_masks(control=None):
    rng = np.random.default_rng(2)
    active = rng.random((NUM_CASES, NUM_ARMS)) < 0.8
    active[:, 0 if control is None else control] = True
    active[np.arange(NUM_CASES), 1 + rng.integers(0, NUM_ARMS - 1, NUM_CASES)] = True
    return active


def test_without_a_control_a_look_drops_then_checks_superiority_then_equivalence(tables):
    rules = stopping.superiority(0.9), stopping.inferiority(0.1), stopping.equivalence(0.7, delta=0.3)
    active = random_masks()
    found = verdicts(Design([10, 20], stopping=rules), tables, active, None)
    endings = set()
    for case, table in enumerate(tables):
        ending, left = look_without_control(table, np.flatnonzero(active[case]), 0.1, 0.9, 0.7, 0.3)
        assert ENDINGS[found.ending[case]] == ending
        assert np.flatnonzero(found.active[case]).tolist() == left
        endings.add(ending)
    assert endings == {"continue", "superiority", "equivalence"}


@pytest.mark.parametrize("only_first", [False, True])
def test_with_a_control_a_winner_becomes_the_control_and_all_is_checked_again(tables, only_first):
    rules = (
        stopping.superiority(0.9),
        stopping.inferiority(0.1),
        stopping.equivalence(0.7, delta=0.3, only_first=only_first),
        stopping.futility(0.8, delta=0.2, only_first=only_first),
    )
    active = random_masks(control=1)
    found = verdicts(Design([10, 20], stopping=rules, control=1), tables, active, 1)
    reference = functools.partial(
        look_with_control,
        control=1,
        low=0.1,
        high=0.9,
        equal=0.7,
        delta=0.3,
        futile=0.8,
        gain=0.2,
        only_first=only_first,
    )
    endings = set()
    for case, table in enumerate(tables):
        ending, left, control = reference(table, np.flatnonzero(active[case]))
        assert (ENDINGS[found.ending[case]], found.control[case]) == (ending, control)
        assert np.flatnonzero(found.active[case]).tolist() == left
        endings.add(ending)
    assert endings == {"continue", "superiority", "equivalence", "futility"}


def test_a_margin_asks_for_non_inferiority_to_the_first_control_alone():
    # Arm 1 is .1 below the control 0, and arm 2 .1 below arm 1; all within .02 of these.
    table = jnp.asarray(np.random.default_rng(6).normal([1.0, 0.9, 0.8], 0.02, (2000, 3)))
    for margin, control, left in ((0.0, 0, 1), (0.18, 1, 1), (0.05, 0, 2)):
        design = Design([10, 20], stopping=[stopping.superiority(0.95, margin), stopping.inferiority(0.01)], control=0)
        look = check_look(design, 0, from_table(table), jnp.ones(3, bool), 0, first_control=0)
        assert (int(look.control), int(look.active.sum())) == (control, left)  # arm 2 does not replace arm 1
        expected = float(jnp.mean(table[:, 1] - table[:, 0] > -margin))
        assert float(look.evidence[0]) == pytest.approx(expected, abs=1e-6)


def test_the_last_look_ends_undecided_and_thresholds_change_by_look():
    table = jnp.asarray(
        np.random.default_rng(3).normal([0.0, 1.0], 1.0, (1000, 2))
    )  # the second arm is best in about .76
    design = Design([10, 20, 30], stopping=stopping.superiority([0.99, 0.7, 0.99]))
    endings = [ENDINGS[check_look(design, look, from_table(table), jnp.ones(2, bool)).ending] for look in range(3)]
    assert endings == ["continue", "superiority", "undecided"]


def test_loss_and_rules_of_the_user_stop_with_the_arm_that_they_judge():
    table = jnp.asarray(np.random.default_rng(4).normal([1.0, 1.1], [0.01, 0.02], (2000, 2)))
    active = jnp.ones(2, bool)
    for rule, name in (
        (stopping.expected_loss(0.001), "expected_loss"),
        (stopping.rule(widest, "precision", at_most=0.1), "precision"),
        (stopping.rule(lambda look: look.posterior.mean()[look.leader], "mean", at_least=1.05), "mean"),
        (stopping.rule(lambda look: look.num_decisions, "half", at_least=[10, 20]), "half"),
    ):
        design = Design([10, 20], stopping=rule)
        look = check_look(design, 0, from_table(table), active)
        assert (endings(design)[look.ending], int(look.arm)) == (name, 1)
    narrow = stopping.rule(widest, "precision", at_most=0.05)
    look = check_look(Design([10, 20], stopping=narrow), 0, from_table(table), active)
    assert ENDINGS[look.ending] == "continue"  # 2 * 1.96 * .02 = .078 is wider
    assert narrow.with_threshold(0.1).thresholds(2).tolist() == [0.1, 0.1]
    assert narrow.describe() == "Precision: at most 0.05."
