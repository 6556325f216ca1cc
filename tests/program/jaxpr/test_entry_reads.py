"""Which entries of an argument a result reads: never too few, and constants are computed only where it matters."""

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.entry_reads import connected_components, entries_read


def reads(*rows):
    return np.array([[column in row for column in range(4)] for row in rows])


def test_an_entry_reads_what_reaches_it_whatever_the_data_are():
    def function(x, data):
        return jnp.stack([x[0] * data, jnp.where(data > 0, x[1], x[2]), jnp.sum(x[1:3]), data])

    np.testing.assert_array_equal(entries_read(function, 4, (jnp.zeros(()),)), reads([0], [1, 2], [1, 2], []))
    shapes = jax.eval_shape(lambda: (jnp.zeros(()),))
    np.testing.assert_array_equal(entries_read(function, 4, shapes), reads([0], [1, 2], [1, 2], []))


def test_constants_tell_which_entry_is_meant_however_they_are_computed():
    def function(x):
        order = jnp.argsort(jnp.array([3.0, 1.0, 2.0]))  # 1, 2, 0
        is_kept = jnp.floor(jnp.log(jnp.array([1.0, 3.0, 30.0])))  # 0, 1, 3
        return x[order] * is_kept

    np.testing.assert_array_equal(entries_read(function, 4, ()), reads([], [2], [0]))


def test_constants_that_say_nothing_of_entries_are_not_computed(count_compilations):
    """Each would be compiled by itself: a second for a program of fifty weights. What is left is where x is indexed."""

    def function(x):
        scale = jnp.exp(jnp.sqrt(jnp.full(7, 0.37)))
        return x[jnp.arange(3)] - jnp.sum(jnp.log(scale) * jnp.cosh(scale))

    with count_compilations() as compiled:
        found = entries_read(function, 4, ())
    np.testing.assert_array_equal(found, reads([0], [1], [2]))
    assert len(compiled) <= 1


def test_columns_are_tied_through_each_other():
    groups = np.array([[True, True, False, False], [False, True, True, False], [False, False, False, True]])
    label = connected_components(groups)
    assert label[0] == label[1] == label[2] != label[3]
