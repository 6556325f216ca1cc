"""The table of primitives agrees with JAX, and each domain reads it: entries that are read, lines of the user."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from ppl_bandit.program.jaxpr.entry_reads import affine_reads, connected_components, entries_read
from ppl_bandit.program.jaxpr.index_limits import index_ranges
from ppl_bandit.program.jaxpr.interpreter import DATA, Domain, dependencies, fold_in_numpy, interpret, source_line
from ppl_bandit.program.jaxpr.primitives import PRIMITIVES
from ppl_bandit.runtime.jax_adapter import all_equations, called_jaxpr

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


def affine(function, *data):
    with jax.enable_x64(True):
        return affine_reads(jax.make_jaxpr(function)(np.zeros(3), *data), [np.eye(3, dtype=bool)])


def test_affine_functions_are_found_with_the_entries_that_they_read():
    found = affine(lambda w, x: 1.0 + x * w[0] - w[jnp.array([1, 2])], 0.5)
    np.testing.assert_array_equal(found.reads, [[1, 1, 0], [1, 0, 1]])
    assert not found.is_term and found.power == 1
    inverse = affine(lambda w, x: x / w[1:], 0.5)
    np.testing.assert_array_equal(inverse.reads, [[0, 1, 0], [0, 0, 1]])
    assert inverse.is_term and inverse.power == -1
    summed = affine(lambda w: jnp.zeros(2).at[jnp.array([0, 1, 1])].add(w))
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
    assert affine(function) is None


# Which entries of an argument a result reads: never too few, and constants are computed only where it matters


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


# An operation of a traced program is found in the user's own line, or not at all


HERE = "test_primitives.py"


def stacks_of(function, name):
    """All equations of a primitive, each with the equations that call it."""
    found = []

    def walk(jaxpr, callers):
        for eqn in jaxpr.eqns:
            inner = called_jaxpr(eqn)
            if eqn.primitive.name == name:
                found.append((eqn, *callers))
            elif inner is not None:
                walk(inner[0], (eqn, *callers))

    walk(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr, ())
    return found


def test_a_clip_is_found_in_the_line_that_wrote_it_whoever_traced_it_first():
    jax.make_jaxpr(lambda x: jnp.clip(x, 0.1, 0.9))(jnp.ones(3))  # jax keeps this trace of `clip`, with these frames

    def program(rate):
        return rate.clip(0.1, 0.9)

    found = source_line(stacks_of(program, "max")[0])
    line = program.__code__.co_firstlineno + 1
    assert found.text == f"line {line} of {HERE}: `return rate.clip(0.1, 0.9)`"
    assert found.called == "clip" and found.is_users


def test_an_operator_and_a_jitted_function_of_the_user_are_theirs():
    @jax.jit
    def bend(x):
        return abs(x) + 1.0

    found = source_line(stacks_of(lambda x: bend(x), "abs")[0])
    assert found.is_users and "return abs(x) + 1.0" in found.text


def test_what_a_distribution_does_on_a_line_of_the_user_is_not_theirs():
    def program(x):
        return dist.Bernoulli(probs=x).logits

    lines = [source_line(stack) for stack in stacks_of(program, "log")]
    assert lines and not any(found.is_users for found in lines)
    assert all(HERE in found.text for found in lines)
