"""The table of primitives agrees with JAX, and each domain reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.program.jaxpr.entry_reads import affine_reads
from ppl_bandit.program.jaxpr.index_limits import index_ranges
from ppl_bandit.program.jaxpr.interpreter import DATA, Domain, dependencies, fold_in_numpy, interpret
from ppl_bandit.program.jaxpr.primitives import PRIMITIVES
from ppl_bandit.runtime.jax_adapter import all_equations

X = np.array([[0.5, -1.5, 0.0], [2.0, 0.25, -3.0]], np.float32)
WHOLE = np.array([[1, -7, 0], [2, 5, -3]], np.int32)

MOVES = [
    lambda x: jax.lax.broadcast_in_dim(x, (4, 2, 3), (1, 2)),
    lambda x: jax.lax.concatenate([x, x + 1], 1),
    lambda x: jax.lax.expand_dims(x, (1,)),
    lambda x: jax.lax.reshape(x, (3, 2)),
    lambda x: jax.lax.rev(x, (1,)),
    lambda x: x[:, 1:3],
    lambda x: x[:1, ::2],
    lambda x: jnp.split(x, [1], axis=1)[1],
    lambda x: jnp.squeeze(x[:1], 0),
    lambda x: jnp.stack([x, x], axis=1),
    lambda x: jnp.tile(x, (2, 1)),
    lambda x: x.T,
    lambda x: jax.lax.broadcasted_iota(int, (2, 3), 1) + x,
    lambda x: jax.lax.clamp(-1.0, x, 1.0),
    lambda x: x**3,
]
ELEMENTWISE = {
    **{name: (X,) for name in "neg abs floor ceil sign exp exp2 expm1 tanh sinh cosh sin cos is_finite square".split()},
    **{name: (np.abs(X) + 0.1,) for name in "log log1p sqrt".split()},
    **{name: (X, X[::-1]) for name in "add sub mul max min lt le gt ge eq ne".split()},
    **{name: (WHOLE, WHOLE[::-1]) for name in "and or xor".split()},
    "div": (X, np.abs(X) + 0.1),
    "rem": (WHOLE, np.full_like(WHOLE, 3)),
    "not": (WHOLE,),
}
ALIASES = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_primitives_have_the_numpy_equivalent_that_the_table_says(name):
    args = ELEMENTWISE[name]
    found = PRIMITIVES[name].numpy({}, *args)
    np.testing.assert_allclose(found, getattr(jax.lax, ALIASES.get(name, name))(*args), rtol=1e-5)


def test_integers_are_divided_towards_zero_as_in_jax():
    divisor = np.full_like(WHOLE, 2)
    np.testing.assert_array_equal(PRIMITIVES["div"].numpy({}, WHOLE, divisor), jax.lax.div(WHOLE, divisor))


@pytest.mark.parametrize("function", MOVES)
def test_moves_have_the_numpy_equivalent_that_the_table_says(function):
    closed = jax.make_jaxpr(function)(X)
    domain = Domain(
        lambda *_: pytest.fail("an operation on constants is not folded"), lambda value: True, fold_in_numpy
    )
    (found,) = interpret(domain, closed.jaxpr, closed.consts, [X])
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, function(X), rtol=1e-6)


def test_every_listed_primitive_that_is_traced_here_still_has_its_name():
    def everything(x, i):
        y = jnp.where(x > 0, jnp.exp(x), jnp.log1p(x * x)) / (1 + x**2) ** 0.5
        y = jnp.sort(jnp.cumsum(y)) + jax.scipy.special.gammaln(y) + jax.nn.sigmoid(y) + jax.lax.rsqrt(y)
        y = y.at[i].set(0.0).at[i].add(1.0) + jnp.max(y) + jax.lax.stop_gradient(jnp.argmax(y))
        y = jax.lax.scan(lambda c, v: (c + v, c), 0.0, y)[1] + jax.lax.cond(i > 0, jnp.sin, jnp.cos, y)
        return jnp.dot(y, y[jnp.array([0, 2, 1]) - i]) + jnp.prod(jnp.round(y)) + jax.lax.dynamic_slice(y, (i,), (1,))

    names = {eqn.primitive.name for eqn in all_equations(jax.make_jaxpr(everything)(X[0], 1).jaxpr)}
    assert names <= set(PRIMITIVES), f"not in the table: {names - set(PRIMITIVES)}"
    assert {"gather", "scatter", "scatter-add", "select_n", "dynamic_slice", "cumsum", "sort", "scan", "cond"} <= names


def test_dependence_follows_calls_and_ignores_constants():
    closed = jax.make_jaxpr(jax.jit(lambda x, y: (jnp.sin(x) + np.arange(3.0), jnp.eye(2), x * y)))(1.0, 2.0)
    x, y = frozenset("x"), frozenset("y")
    assert dependencies(closed, [x, y]) == [x, frozenset(), x | y]


def test_index_ranges_are_found_inside_calls_and_where_they_are_known():
    @jax.jit
    def function(table, arm, other):
        return table[2 * arm] + table[other]

    closed = jax.make_jaxpr(function)(np.zeros(3), np.arange(3), np.arange(3))
    assert index_ranges(closed, [DATA, np.arange(3), DATA]) == [(0, 4, 3)]


def reads(function, *data):
    with jax.enable_x64(True):
        return affine_reads(jax.make_jaxpr(function)(np.zeros(3), *data), [np.eye(3, dtype=bool)])


def test_affine_functions_are_found_with_the_entries_that_they_read():
    found = reads(lambda w, x: 1.0 + x * w[0] - w[jnp.array([1, 2])], 0.5)
    np.testing.assert_array_equal(found.reads, [[1, 1, 0], [1, 0, 1]])
    assert not found.is_term and found.power == 1
    inverse = reads(lambda w, x: x / w[1:], 0.5)
    np.testing.assert_array_equal(inverse.reads, [[0, 1, 0], [0, 0, 1]])
    assert inverse.is_term and inverse.power == -1
    summed = reads(lambda w: jnp.zeros(2).at[jnp.array([0, 1, 1])].add(w))
    np.testing.assert_array_equal(summed.reads, [[1, 0, 0], [0, 1, 1]])


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w[0] * w[1],
        lambda w: jnp.exp(w),
        lambda w: 1.0 / (w[0] + w[1]),
        lambda w: 1.0 / w[0] + 1.0 / w[1],
        lambda w: 1.0 + 1.0 / w[0],
        lambda w: jnp.maximum(w, 0.0),
        lambda w: w[0] + 1.0 / w[1],
    ],
)
def test_other_functions_are_not_affine(function):
    assert reads(function) is None
