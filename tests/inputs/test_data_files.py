"""CSV files: what is written is read again, and a bad file is refused with its row, its column and what to do."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import RewardModel
from ppl_bandit.inputs.data_files import DataFileError, read_data, write_data
from ppl_bandit.inputs.data_frames import context_columns


def visits(arm, context):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("calls", dist.Poisson(rate[arm] * context["hours"] * jnp.exp(context["who"][:, 0])))
    numpyro.sample("sold", dist.Bernoulli(jnp.full(arm.shape, 0.5)))
    numpyro.deterministic("expected_reward", rate[arm])


@pytest.fixture(scope="module")
def model():
    context = {"hours": jnp.array(1.0), "who": jnp.zeros(2), "is_new": jnp.array(False)}
    return RewardModel(visits, 2, context, outcomes=("calls", "sold"))


@pytest.fixture(scope="module")
def clicks():
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([3]))
        numpyro.sample("click", dist.Bernoulli(rate[arm]))

    return RewardModel(program, 3, outcomes=("click",))


GOOD = """arm,calls,sold,hours,who_0,who_1,is_new,comment
no,2,1,1.5,0.25,-1,true,"a, b"
yes,0,0,2,0,1e-1,0,

yes,3,1,0.5,1,0,1,last
"""


def test_a_file_with_contexts_and_outcomes_is_read_and_written_again(model, tmp_path):
    path = tmp_path / "visits.csv"
    path.write_text(GOOD, encoding="utf-8-sig")
    rows = read_data(path, model, ["no", "yes"])
    assert rows.arm.tolist() == [0, 1, 1]
    assert rows.reward["calls"].tolist() == [2, 0, 3] and rows.reward["sold"].tolist() == [1, 0, 1]
    assert rows.context["hours"].tolist() == [1.5, 2.0, 0.5]
    np.testing.assert_array_equal(rows.context["who"], [[0.25, -1], [0, 0.1], [1, 0]])
    assert rows.context["is_new"].dtype == bool and rows.context["is_new"].tolist() == [True, False, True]
    write_data(tmp_path / "again.csv", model, rows, ["no", "yes"])
    again = read_data(tmp_path / "again.csv", model, ["no", "yes"])
    np.testing.assert_array_equal(again.context["who"], rows.context["who"])
    assert again.arm.tolist() == rows.arm.tolist()


def test_a_vector_is_numbered_and_a_single_outcome_may_be_called_reward(clicks, tmp_path):
    (tmp_path / "a.csv").write_text("reward,arm\n1,2\n0,0\n")
    rows = read_data(tmp_path / "a.csv", clicks)
    assert rows.arm.tolist() == [2, 0] and rows.reward.tolist() == [1, 0]

    def linear(arm, context):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros((2, 3)), 1.0))
        numpyro.sample("reward", dist.Normal((weights[arm] * context).sum(-1), 1.0))

    assert list(context_columns(RewardModel(linear, 2, jnp.zeros(3)))) == ["context_0", "context_1", "context_2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arm,click\n0,1\n7,0\n", "row 2, column 'arm': '7' is not an arm; number the arms from 0 to 2"),
        ("arm,click\n0,1\n,0\n", "row 2, column 'arm': the cell is empty"),
        ("arm,click\n0,1\n\n1,7\n", "row 3, column 'click': the program cannot produce click = 7"),
        ("arm,click\n0,yes\n", "row 1, column 'click': 'yes' is not a number; give a number"),
        ("arm,click\n0,1\n1,\n", "row 2, column 'click': the cell is empty"),
        ("arm,click\n0,nan\n", "row 1, column 'click': 'nan' is not finite"),
        ("arm,click\n0,1\n1,2\n", "row 2, column 'click': the program cannot produce click = 2 on arm 1; correct"),
        ("arm,click\n0,1,5\n", "row 1 has 3 cells, the header has 2"),
        (
            "arm,clicks\n0,1\n",
            "no column 'click'; this program needs the columns arm, click, and the file has arm, clicks",
        ),
        ("arm,click,click\n0,1,1\n", "the header has the column 'click' twice"),
        ("arm,click\n", "there are no rows"),
        ("", "there are no rows"),
    ],
)
def test_a_bad_file_is_refused_with_its_row_and_column(clicks, tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataFileError) as refused:
        read_data(path, clicks)
    assert message in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("hours", "two", "row 1, column 'hours': 'two' is not a number"),
        ("who_1", "inf", "row 1, column 'who_1': 'inf' is not finite"),
        ("is_new", "2", "row 1, column 'is_new': '2' is not 0 or 1"),
        ("arm", "maybe", "row 1, column 'arm': 'maybe' is not an arm; the arms are no, yes"),
        ("calls", "-1", "row 1, column 'calls': the program cannot produce calls = -1"),
    ],
)
def test_a_bad_cell_of_a_context_or_an_outcome_is_named(model, tmp_path, column, cell, message):
    header, row = GOOD.splitlines()[0].split(","), ["no", "2", "1", "1.5", "0.25", "-1", "true", ""]
    row[header.index(column)] = cell
    (tmp_path / "bad.csv").write_text(",".join(header) + "\n" + ",".join(row) + "\n")
    with pytest.raises(DataFileError) as refused:
        read_data(tmp_path / "bad.csv", model, ["no", "yes"])
    assert message in str(refused.value)


def test_files_that_are_none_and_names_that_do_not_fit_are_refused(clicks, tmp_path):
    with pytest.raises(DataFileError, match="give a CSV file"):
        read_data(tmp_path / "missing.csv", clicks)
    (tmp_path / "a.csv").write_text("arm,click\n0,1\n")
    with pytest.raises(DataFileError, match="has 2 names, but the program has 3"):
        read_data(tmp_path / "a.csv", clicks, ["a", "b"])
