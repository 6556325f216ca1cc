"""Pytrees packed into one array are restored exactly."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ppl_bandit.runtime.packed_state import changed_leaves, form_from_json, form_to_json, pack, unpack, with_changes


class Tree(NamedTuple):
    flag: object
    counts: object
    table: object


TREE = {
    "count": np.int64(2**53 + 1),  # not a float64
    "empty": np.zeros((0, 3)),
    "flags": np.array([[True, False]]),
    "ids": np.array([-1, 2**63 - 1]),
    "large": np.arange(20_000.0),
    "mean": np.array([[0.1, np.nan], [-0.0, np.inf]]),
    "narrow": np.float32([0.1]),
    "nested": Tree(np.bool_(True), np.array([4, 3], np.uint32), (np.float64(0.1), None)),
}


def test_a_packed_tree_is_restored_exactly_inside_and_outside_of_jit():
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        packed, traced = pack(TREE), jax.jit(pack)(TREE)
        assert len(jax.tree.leaves(traced)) == 2  # one row, and the large array
        for found in (unpack(packed), unpack(traced), jax.jit(unpack)(packed), jax.jit(unpack)(traced)):
            assert jax.tree.structure(found) == jax.tree.structure(TREE)
            for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(TREE), strict=True):
                assert ours.dtype == theirs.dtype and np.shape(ours) == theirs.shape
                np.testing.assert_array_equal(ours, theirs)
            assert np.array_equal(np.signbit(found["mean"]), np.signbit(TREE["mean"]))


def test_random_keys_are_not_packed_into_the_row():
    tree = {"key": jr.key(0), "mean": jnp.zeros(2)}
    with jax.enable_x64(True):
        found = jax.jit(lambda tree: unpack(pack(tree)))(tree)
    np.testing.assert_array_equal(jr.key_data(found["key"]), jr.key_data(tree["key"]))


def test_leaves_that_a_function_does_not_change_are_not_returned():
    before = Tree(np.array(True), np.arange(3), None)
    changes = jax.jit(lambda tree: changed_leaves(tree._replace(counts=tree.counts + 1), tree))(before)
    assert len(jax.tree.leaves(changes)) == 1
    after = with_changes(changes, before)
    assert after.flag is before.flag and after.counts.tolist() == [1, 2, 3] and after.table is None


def test_forms_survive_json():
    with jax.enable_x64(True):
        for tree in (TREE, [pack(TREE), (np.float32(1.0), jr.key(3))]):
            form = jax.eval_shape(lambda own: own, tree)
            stored = form_to_json(form)
            again = form_from_json(stored)
            assert jax.tree.structure(again) == jax.tree.structure(form)
            for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(form), strict=True):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize(
    "stored", [{"class": ["os", "system"], "fields": []}, {"class": ["nowhere", "T"], "fields": []}]
)
def test_only_imported_namedtuples_are_read(stored):
    with pytest.raises(ValueError, match="not an imported NamedTuple"):
        form_from_json(stored)
