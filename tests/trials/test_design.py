"""Designs refuse bad input in words, and describe themselves."""

import numpy as np
import pytest

from ppl_bandit import Design, selectors, stopping

BAD = [
    (lambda: Design([100, 50]), "looks must increase, but looks\\[1\\] is 50 after 100"),
    (lambda: Design([]), "looks is empty"),
    (lambda: Design([0.5]), "looks\\[0\\] must be a positive integer"),
    (lambda: Design([10], stopping=[0.99]), "expected rules such as stopping.superiority"),
    (lambda: Design([10], stopping=stopping.futility(0.9, delta=0.1)), "futility compares arms with a control"),
    (lambda: Design([10], allocation="block"), 'allocation must be "each"'),
    (lambda: Design([10, 20], lag=10), "no outcome would be known then"),
    (lambda: Design([10, 20], lag=[0.9, 0.3]), "add up to at most 1"),
    (lambda: Design([10, 20], burn_in=10), "within the burn-in of 10"),
    (lambda: Design([10, 20], max_rows=15), "max_rows is 15, but the last look comes at 20"),
    (lambda: Design([10, 20], stopping=stopping.superiority([0.9, 0.95, 0.99])), "3 thresholds for 2 looks"),
    (lambda: Design([10], stopping=[stopping.superiority(0.9), stopping.superiority(0.99)]), "give each rule once"),
    (
        lambda: Design([10], stopping=[stopping.superiority(0.5), stopping.inferiority(0.6)]),
        "is not below superiority's",
    ),
    (lambda: Design([10], control=True), "control must be the index or the name"),
    (lambda: Design([10], control=3).control_index(range(3)), "control is 3, which is no arm"),
    (lambda: Design([10], control="x").control_index(["a", "b"]), "control is 'x', which is no arm"),
    (lambda: stopping.superiority(1.0), "strictly inside \\(0, 1\\), got 1.0"),
    (lambda: stopping.superiority(99), "99 percent is 0.99"),
    (lambda: stopping.superiority(float("nan")), "p must be a number"),
    (lambda: stopping.equivalence(0.9, delta=-0.1), "delta must be one positive difference"),
    (lambda: stopping.expected_loss(0.0), "below must be positive"),
    (lambda: Design([10], stopping=stopping.superiority(0.9, margin=0.1)), "a margin compares arms with a control"),
    (lambda: stopping.superiority(0.9, margin=-0.1), "margin must be one positive difference"),
    (lambda: stopping.rule(len, "superiority", at_least=1), "name must be a new name such as 'precision', other than"),
    (lambda: stopping.rule(0.9, "precision", at_least=1), "function must be a function of the look, got 0.9"),
    (lambda: stopping.rule(len, "precision"), "give at_least= or at_most=, one of the two"),
    (lambda: stopping.rule(len, "precision", at_most=[0.1, "x"]), "at_most must be a number, or one per look"),
    (lambda: Design([10], stopping=stopping.superiority), "expected rules such as stopping.superiority"),
    (lambda: Design({1}), "looks must be a sequence of numbers of decisions.*got \\{1\\}"),
    (lambda: Design({10: "first"}), "looks must be a sequence"),
    (lambda: Design("10"), "looks must be a sequence"),
    (lambda: Design([True, 20]), "looks\\[0\\] must be a positive integer"),
    (lambda: Design([float("nan")]), "looks\\[0\\] must be a positive integer"),
    (lambda: Design([10], stopping={stopping.superiority}), "expected rules such as stopping.superiority"),
    (lambda: Design([10], lag={0.5}), "lag must be a number of decisions"),
    (lambda: Design([10], lag=["0.5", "0.5"]), "lag must be a number of decisions"),
    (lambda: Design([10], lag=[True]), "lag must be a number of decisions"),
    (lambda: Design([10], lag=[float("nan")]), "lag must be a number of decisions"),
    (lambda: Design([10], calibration=[0.05]), "calibration must be a mapping"),
    (lambda: stopping.superiority({0.99}), "p must be a number, or one per look"),
    (lambda: stopping.superiority(["0.99"]), "p must be a number, or one per look"),
    (lambda: stopping.expected_loss([True]), "below must be a number, or one per look"),
    (lambda: selectors.fixed([0.5, -0.1]), "probs must be nonnegative"),
]


@pytest.mark.parametrize("build, message", BAD)
def test_bad_input_is_refused_in_words(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_design_says_in_words_what_it_does():
    rules = stopping.superiority(0.99), stopping.equivalence(0.9, delta=0.05), stopping.inferiority(0.01)
    selector = selectors.with_limits(selectors.thompson(), floors=0.15)
    design = Design(range(300, 2001, 100), stopping=rules, selector=selector, allocation="looks")
    words = design.describe()
    assert "300, 400, ..., 2000 decisions (18 looks, every 100)" in words
    assert "with_limits(selector=thompson(), floors=0.15" in words and "probabilities that are fixed between" in words
    assert "differ by less than 0.05 with probability at least 0.9" in words


def test_a_threshold_can_be_replaced_and_is_checked_again():
    design = Design([10, 20], stopping=(stopping.superiority(0.99), stopping.equivalence(0.9, delta=0.05)))
    assert design.with_threshold("superiority", 0.95).thresholds().tolist() == [[0.95, 0.95], [0.9, 0.9]]
    with pytest.raises(ValueError, match="strictly inside"):
        design.with_threshold("superiority", 1.5)


def test_a_last_look_waits_for_all_outcomes():
    design = Design([400, 500], lag=100, max_rows=500)
    assert design.look_rows == (400, 500, 500)
    assert Design([400, 500], lag=100).look_rows == (400, 500)


def test_fixed_shares_keep_their_ratios_among_allowed_arms():
    import jax
    import jax.numpy as jnp

    chosen = selectors.fixed([1, 2, 1])(
        jax.random.key(0), jnp.zeros((5, 3)), 1, allowed=jnp.asarray([True, True, False])
    )
    np.testing.assert_allclose(chosen.propensities, [1 / 3, 2 / 3, 0.0], rtol=1e-6)
