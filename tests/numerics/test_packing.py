"""Trees as few arrays, and back."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.runtime.packed_state import Joining, pack, unpacker


class Tree(NamedTuple):
    flag: object
    counts: object
    table: object


def test_a_tree_survives_being_packed():
    tree = Tree(np.bool_(True), np.array([2**40, 3]), {"a": np.arange(6.0).reshape(2, 3), "b": np.float64(0.1)})
    with jax.enable_x64(True):
        found = unpacker(tree)(np.asarray(jax.jit(pack)(tree)))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_numbers_that_no_whole_number_can_be_are_unpacked_without_a_word():
    tree = Tree(np.bool_(False), np.array([4, 3]), np.array([np.nan, np.inf]))
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = unpacker(tree)(np.asarray(jax.jit(pack)(tree)))
    jax.tree.map(np.testing.assert_array_equal, found, tree)


def test_a_tree_is_joined_to_a_row_for_each_type_and_cut_as_it_was():
    with jax.enable_x64(True):
        tree = {
            "count": np.int64(2**53 + 1),  # no float64 holds it
            "empty": np.zeros((0, 3)),
            "large": np.arange(20_000.0),
            "mean": np.array([[0.1, np.nan], [-0.0, np.inf]]),
            "narrow": np.float32([0.1]),
            "seen": np.array([True, False]),
            "single": np.array(0.3),
        }
        joining = Joining(tree)
        joined = joining.join(tree)
        assert [array.shape for array in joined.arrays] == [(1,), (5,), (1,), (2,), (20_000,)]
        traced = jax.jit(lambda tree: joining.join(tree))(tree)
        for found in (joining.cut(joined), jax.jit(joining.cut)(joined), jax.jit(joining.cut)(traced)):
            for name, value in tree.items():
                assert found[name].dtype == value.dtype and found[name].shape == np.shape(value)
                np.testing.assert_array_equal(found[name], value)
                assert np.array_equal(np.signbit(found["mean"]), np.signbit(tree["mean"]))


def test_what_is_no_plain_number_stays_alone_and_other_shapes_do_not_fit():
    tree = {"key": jr.key(0), "mean": jnp.zeros(2)}
    joining = Joining(tree)
    found = jax.jit(lambda tree: joining.cut(joining.join(tree)))(tree)
    np.testing.assert_array_equal(jr.key_data(found["key"]), jr.key_data(tree["key"]))
    assert joining.fits(found)
    for other in ({**tree, "mean": jnp.zeros(3)}, {**tree, "mean": jnp.zeros(2, int)}, {"mean": tree["mean"]}):
        assert not joining.fits(other)
