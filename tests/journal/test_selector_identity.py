"""A journal is continued only with the same selector: its own functions and all that they read count as its settings."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import JournalError, Selection, selectors
from ppl_bandit.journal.identity import selector_from, to_json
from ppl_bandit.selectors.selector_contract import as_selector, make_selector

SHARE = 0.5


def own(share):
    def first_arm(key, table, step, *, allowed=None, marginals=None):
        probs = jnp.array([share, 1.0 - share])
        return Selection(jr.choice(key, 2, p=probs), probs, jnp.asarray(0), probs)

    return first_arm


def made(share):
    def rule(key, inputs):
        return jnp.asarray(0), jnp.asarray(0), jnp.array([share, 1.0 - share])

    return make_selector(rule, name="thompson")  # the name of another one


def reading_a_global():
    return lambda key, table, step, **more: SHARE * table


class Rule:
    def __init__(self, share):
        self.share = share

    def __call__(self, key, table, step, *, allowed=None, marginals=None):
        return self.share


MAKERS = {
    "a closure": own,
    "a rule": made,
    "an object": Rule,
    "a bound method": lambda share: Rule(share).__call__,
    "a partial": lambda share: functools.partial(own(0.1), share=share),
    "a default": lambda share: lambda key, table, step, share=share, **more: share,
    "an array": lambda share: own(np.array(share)),
    "an array of jax": lambda share: own(jnp.array(share)),
    "a jitted function": lambda share: jax.jit(own(share)),
    "a wrapper": lambda share: selectors.with_floor(as_selector(own(share)), 0.1),
    "a function of the step": lambda share: selectors.bayes_ucb(quantile=lambda step: 1.0 - share / step),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_other_settings_of_a_selector_of_ones_own_are_another_identity(kind):
    make = MAKERS[kind]
    same, again, other = (to_json(as_selector(make(share))) for share in (0.5, 0.5, 0.6))
    assert same == again != other


def test_a_global_that_a_selector_reads_counts(monkeypatch):
    before = to_json(as_selector(reading_a_global()))
    monkeypatch.setitem(globals(), "SHARE", 0.6)
    assert to_json(as_selector(reading_a_global())) != before


def test_selectors_of_this_library_are_recorded_as_before():
    for selector in (
        selectors.thompson(),
        selectors.bayes_ucb(0.9),
        selectors.with_floor(selectors.top_two(0.3), 0.05),
        selectors.optimistic_gittins(100),
        selectors.fixed([1, 3]),
        selectors.information_directed(),
    ):
        recorded = to_json(selector)
        assert "function" not in str(recorded) and to_json(selector_from(recorded)) == recorded


def test_a_journal_is_not_continued_with_another_selector_of_ones_own(tmp_path):
    def make(share):
        return bernoulli_bandit(2, selector=own(share), journal=tmp_path / "e.db")

    make(0.5)
    make(0.5)
    with pytest.raises(JournalError, match="selector: it was own"):
        make(0.6)
