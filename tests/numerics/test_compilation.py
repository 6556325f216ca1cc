import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.numerics.compilation import Ahead
from ppl_bandit.numerics.packing import pack, unpacker


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


def test_what_is_prepared_is_not_waited_for_and_shapes_are_told_apart():
    double = Ahead(lambda x: 2 * x)
    with jax.enable_x64(True):
        double.prepare(np.zeros(3))
        double.wait()
        for size in (3, 4, 3, 4):
            np.testing.assert_array_equal(double(np.ones(size)), 2 * np.ones(size))
    assert double.num_waits == 1  # for four numbers, once


def test_an_error_while_tracing_is_raised_to_the_caller():
    wrong = Ahead(lambda x: jnp.reshape(x, (2,)))
    with jax.enable_x64(True):
        for _ in range(2):
            with pytest.raises(TypeError, match="reshape"):
                wrong(np.ones(3))


@pytest.mark.parametrize(
    "settings, expected",
    [({}, "ppl_bandit/jax"), ({"PPL_BANDIT_CACHE": "off"}, "None"), ({"JAX_COMPILATION_CACHE_DIR": "mine"}, "mine")],
)
def test_compiled_programs_are_kept_in_the_users_cache_unless_told_otherwise(settings, expected, tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PPL_BANDIT"))}
    script = "import ppl_bandit.numerics.compilation, jax; print(jax.config.jax_compilation_cache_dir)"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=clean | {"XDG_CACHE_HOME": str(tmp_path)} | settings,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.strip().endswith(expected), ended.stderr
