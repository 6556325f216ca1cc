"""Contexts that are indices: values out of range are refused when a model is built and at every call."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import InvalidProgram, RewardModel
from ppl_bandit.inputs.checks import check_contexts
from ppl_bandit.program.jaxpr.index_limits import find_index_limits, first_outside
from ppl_bandit.program.jaxpr.interpreter import DATA


def program(index, sizes=(5,)):
    """Return a program whose outcome reads one entry, at `index(context)`, of an array of latents."""

    def read(arm, context):
        level = numpyro.sample("level", dist.Normal(np.zeros(sizes), 1.0).to_event(len(sizes)))
        bonus = numpyro.sample("bonus", dist.Normal(np.zeros(2), 1.0).to_event(1))
        numpyro.sample("reward", dist.Normal(level[index(context)] + bonus[arm], 1.0))

    return read


def build(index, example=None, sizes=(5,)):
    return RewardModel(program(index, sizes), 2, context={"user": 0, "week": 0} if example is None else example)


def refusal(model, **entries):
    with pytest.raises(ValueError, match="silently") as caught:
        check_contexts(model, entries, None, "context")
    return str(caught.value)


def test_a_value_outside_the_indexed_axis_is_refused_by_name_with_the_size():
    model = build(lambda context: context["user"])
    assert check_contexts(model, {"user": 4, "week": 99}, None, "context")["user"] == 4
    assert "context['user'] = 7: the program reads the entry 7 of an axis with 5 entries" in refusal(
        model, user=7, week=0
    )
    assert "context['user'] = -1" in refusal(model, user=-1, week=0)
    rows = {"user": np.array([0, 4, 5]), "week": np.zeros(3, int)}
    with pytest.raises(ValueError, match=r"contexts\['user'\] = 5 in row 2"):
        check_contexts(model, rows, 3, "contexts")


@pytest.mark.parametrize("user", [7, pytest.param(-2, marks=pytest.mark.slow)])
def test_an_example_outside_the_axis_is_refused_when_the_model_is_built(user):
    with pytest.raises(InvalidProgram, match=rf"context\['user'\] = {user}"):
        build(lambda context: context["user"], {"user": user, "week": 0})


def test_every_axis_has_its_own_limit():
    model = build(lambda context: (context["user"], context["week"]), sizes=(5, 3))
    check_contexts(model, {"user": 4, "week": 2}, None, "context")
    assert "context['week'] = 3" in refusal(model, user=4, week=3)
    assert "context['user'] = 5" in refusal(model, user=5, week=2)


def test_an_index_computed_from_several_entries_is_followed():
    model = build(lambda context: 2 * context["user"] + context["week"] - 1, {"user": 1, "week": 0})
    check_contexts(model, {"user": 0, "week": 5}, None, "context")
    message = refusal(model, user=2, week=2)
    assert "context['user'] = 2 and context['week'] = 2: the program reads the entry 5" in message
    assert "entry -1" in refusal(model, user=0, week=0)


def test_a_program_that_keeps_its_index_in_range_is_not_refused():
    model = build(lambda context: jnp.clip(context["user"], 0, 4))
    assert not model.has_index_limits
    check_contexts(model, {"user": 700, "week": 0}, None, "context")


def test_entries_of_one_array_are_told_apart_and_real_features_are_free():
    model = build(lambda context: context[:, 1].astype(int), np.zeros(3))
    check_contexts(model, np.array([99.5, 4.0, -7.25]), None, "context")
    with pytest.raises(ValueError, match=r"context\[1\] = 5"):
        check_contexts(model, np.array([0.0, 5.0, 0.0]), None, "context")
    assert not build(lambda context: 0, np.zeros(3)).has_index_limits


def accepts(read, example, size=5):
    """Return a function that says whether a context stays inside an axis which `read(level, context)` indexes."""
    rows = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), example)
    leaves = jax.tree.leaves(rows)
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        closed = jax.make_jaxpr(read)(np.zeros(size), rows)
        limits = find_index_limits(closed, [DATA, *leaves], range(1, 1 + len(leaves)))

    def is_inside(context):
        given = [np.reshape(leaf, (1, -1)) for leaf in jax.tree.leaves(context)]
        return all(first_outside(limit, given) is None for limit in limits)

    return is_inside


@pytest.mark.parametrize(
    ("read", "example", "inside", "outside"),
    [
        (lambda level, user: level[user], np.int8(1), (0, 4), (-1, 5, 120)),
        (lambda level, user: level[user], np.uint8(1), (0, 4), (5, 255)),
        (lambda level, user: jax.vmap(lambda one: level[one])(user), np.int64(1), (0, 4), (-1, 5)),
        (lambda level, user: jax.lax.map(lambda one: level[one], user), np.int64(1), (0, 4), (-1, 5)),
        (lambda level, minute: level[minute // 60], np.int64(0), (0, 299), (-1, 300, 5000)),
        (lambda level, share: level[(share * 5).astype(int)], np.float64(0.3), (0.0, 0.99), (-0.3, 1.0, 7.5)),
        (lambda level, age: level[jnp.floor(age / 10).astype(int)], np.float64(1.0), (0.0, 49.9), (-0.1, 50.0)),
        (lambda level, grade: level[jnp.round(grade).astype(int)], np.float64(1.0), (0.0, 4.4), (-0.6, 4.6)),
        (lambda level, minute: level[jnp.mod(minute // 60, 5)], np.int64(0), (0, 5000), ()),
        (lambda level, user: level[jnp.where((user >= 0) & (user < 5), user, 0)], np.int64(0), (-9, 4, 700), ()),
        (lambda level, user: level[jnp.maximum(user, 0)], np.int64(0), (-3, 4), (5,)),
    ],
    ids=["int8", "uint8", "vmap", "map", "quotient", "share", "floor", "round", "mod", "where", "from below"],
)
def test_integers_of_any_width_loops_and_increasing_functions_of_one_entry_are_followed(read, example, inside, outside):
    is_inside = accepts(read, example)
    assert all(is_inside(example.dtype.type(value)) for value in inside)
    assert not any(is_inside(example.dtype.type(value)) for value in outside)


def test_each_of_several_indices_in_one_array_has_a_limit_and_features_beside_them_do_not_count():
    example = {"basket": np.ones(3, int), "features": np.ones(100)}
    is_inside = accepts(lambda level, context: level[context["basket"]].sum(-1) + context["features"].sum(-1), example)
    assert is_inside({**example, "basket": np.array([0, 4, 2])}) and is_inside(
        {**example, "features": np.full(100, 99.0)}
    )
    assert not is_inside({**example, "basket": np.array([0, 1, 5])}) and not is_inside(
        {**example, "basket": np.array([-1, 1, 2])}
    )


def test_a_limit_that_was_found_by_bisection_is_said_in_words_and_survives_the_cache(warm_starts):
    first = build(lambda context: context["user"] // 10)
    first.save_result("none", None)
    for model in (first, build(lambda context: context["user"] // 10)):
        message = refusal(model, user=50, week=0)
        assert "context['user'] = 50: the program reads beyond the ends of an axis with 5 entries" in message
        assert "values from 0 to 49 do not" in message
