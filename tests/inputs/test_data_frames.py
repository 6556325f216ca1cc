"""Frames become rows by the names of their columns, and what is wrong is named by row and column."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from shared_models import prior_engine

from ppl_bandit import Bandit, RewardModel
from ppl_bandit.inputs.data_frames import contexts_from, is_frame, rows_from


def sales(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 2]))
    features = jnp.stack([context["age"], context["visits"] * 1.0], axis=-1)
    numpyro.sample("reward", dist.Normal(jnp.sum(weight[arm] * features, axis=-1), 1.0))


def vector(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 3]))
    numpyro.sample("reward", dist.Normal(jnp.sum(weight[arm] * context, axis=-1), 1.0))


@functools.cache
def sales_model():
    return RewardModel(sales, 2, {"age": jnp.asarray(0.0), "visits": jnp.asarray(0)})


@functools.cache
def vector_model():
    return RewardModel(vector, 2, jnp.zeros(3))


ROWS = {"visits": [3, 1], "unused": ["x", "y"], "reward": [1.5, -0.5], "age": [40.0, 20.0], "arm": ["a", "b"]}


def frames(columns):
    polars = pytest.importorskip("polars", reason="polars is not installed: only pandas frames were read")
    return [pandas.DataFrame(columns), polars.DataFrame(columns)]


def test_columns_are_matched_by_name_whatever_their_order():
    for frame in frames(ROWS):
        assert is_frame(frame)
        arms, rewards, contexts = rows_from(sales_model(), frame, "arm", None, None)
        assert arms == ["a", "b"]
        np.testing.assert_array_equal(rewards["reward"], [1.5, -0.5])
        np.testing.assert_array_equal(contexts["age"], [40.0, 20.0])
        np.testing.assert_array_equal(contexts["visits"], [3, 1])
        assert contexts["visits"].dtype.kind == "i"


def test_a_list_of_a_dictionarys_columns_is_not_read_by_position():
    (frame, _) = frames(ROWS)
    for order in (["age", "visits"], ["visits", "age"]):
        np.testing.assert_array_equal(contexts_from(sales_model(), frame, order)["age"], [40.0, 20.0])


def test_other_names_are_said_and_a_vectors_columns_are_listed():
    (frame, _) = frames({"years": [40.0], "visits": [3], "x": [1.0], "y": [2.0], "z": [3.0]})
    np.testing.assert_array_equal(contexts_from(sales_model(), frame, {"age": "years"})["age"], [40.0])
    np.testing.assert_array_equal(contexts_from(vector_model(), frame, ["z", "x", "y"]), [[3.0, 1.0, 2.0]])


def test_an_array_or_a_dictionary_is_not_a_frame():
    assert not is_frame(np.zeros((2, 2))) and not is_frame(ROWS)


@pytest.mark.parametrize(
    ("changed", "arguments", "message"),
    [
        ({"age": [40.0, None]}, {}, "row 1, column 'age': the cell is empty"),
        ({"age": ["old", "young"]}, {}, "row 0, column 'age': 'old' is not a number"),
        ({"age": [1.0, float("inf")]}, {}, "row 1, column 'age': inf is not finite"),
        ({"visits": [1.0, 2.5]}, {}, "row 1, column 'visits': 2.5 is not a whole number"),
        ({"arm": ["a", None]}, {}, "row 1, column 'arm': the cell is empty"),
        ({}, {"reward": "gain"}, "no column 'gain'; it has 'visits', 'unused', 'reward', 'age', 'arm'"),
        ({}, {"reward": {"clicks": "reward"}}, r"reward has the outcomes \['clicks'\], expected some of \['reward'\]"),
        ({}, {"contexts": {"sex": "age"}}, r"contexts has the keys \['sex'\], expected some of \['age', 'visits'\]"),
        ({}, {"contexts": ["age"]}, r"contexts lists \['age'\], but the context has the columns \['age', 'visits'\]"),
        ({}, {"contexts": "age"}, "contexts must be a list of columns or a dict, got 'age'"),
    ],
)
def test_what_is_wrong_is_named_by_row_and_column(changed, arguments, message):
    for frame in frames(ROWS | changed):
        settings = {"arm": "arm", "reward": None, "contexts": None} | arguments
        with pytest.raises(ValueError, match=message):
            rows_from(sales_model(), frame, **settings)


def test_a_column_that_stands_twice_is_refused():
    frame = pandas.DataFrame([[1.0, 2.0, 3]], columns=["age", "age", "visits"])
    with pytest.raises(ValueError, match="has the column 'age' twice"):
        contexts_from(sales_model(), frame)


def test_a_bandit_decides_and_learns_from_frames():
    frame, other = frames(ROWS)
    bandit, again, by_hand = (Bandit(sales_model(), arms=["a", "b"], engine=prior_engine) for _ in range(3))
    bandit.update_many(frame)
    again.update_many(other, reward="reward", contexts=["visits", "age"])
    by_hand.update_many(
        arms=ROWS["arm"], rewards=ROWS["reward"], contexts={"age": ROWS["age"], "visits": ROWS["visits"]}
    )
    learnt, others, expected = (b._experiment.history.rows() for b in (bandit, again, by_hand))
    jax.tree.map(np.testing.assert_array_equal, learnt, expected)
    jax.tree.map(np.testing.assert_array_equal, others, expected)
    decisions = bandit.select_many(frame[["visits", "age"]])
    assert [d.context["age"] for d in decisions] == ROWS["age"]
    with pytest.raises(ValueError, match="frame must be a DataFrame, .* got list"):
        bandit.update_many([1, 2])
