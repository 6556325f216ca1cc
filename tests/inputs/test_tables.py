"""Tables of users: columns are found by usual names or named, and every refusal says what to do."""

import numpy as np
import pytest

from ppl_bandit.inputs.data_files import DataFileError
from ppl_bandit.inputs.tables import read_plays

LOG = """variant,converted,price,device,age,p
b,1,12,mobile,30,0.5
a,0,9,desktop,41,0.5
b,NA,12,mobile,22,0.5
b,,12,mobile,23,0.5
a,1,9,tablet,35.5,0.5
"""


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_columns_are_found_by_usual_names_and_rows_without_reward_are_left_out(log):
    table = read_plays(log)
    assert table.arms == ["a", "b"] and table.arm == ["b", "a", "a"]
    assert table.reward.tolist() == [1.0, 0.0, 1.0] and table.propensity is None
    assert "arm 'variant'" in table.words and "2 rows without a reward left out" in table.words


def test_columns_can_be_named_and_valued(log):
    table = read_plays(log, arm="device", value="price*converted", propensity="p", context=["age"])
    assert table.arms == ["desktop", "mobile", "tablet"]
    assert table.reward.tolist() == [12.0, 0.0, 9.0] and table.propensity.tolist() == [0.5] * 3
    assert table.entries["age"].tolist() == [30.0, 41.0, 35.5]
    assert list(table.frame().columns) == ["age", "arm", "reward", "propensity"]


def test_a_column_of_texts_becomes_an_entry_for_each_group(log):
    entries = read_plays(log, context=["device"]).entries
    assert {name: values.tolist() for name, values in entries.items()} == {
        "device=desktop": [0.0, 1.0, 0.0],
        "device=mobile": [1.0, 0.0, 0.0],
        "device=tablet": [0.0, 0.0, 1.0],
    }


def test_equal_probabilities_and_arms_in_a_given_order(log):
    table = read_plays(log, propensity="equal", arms=["b", "a", "c"])
    assert table.arms == ["b", "a", "c"] and np.allclose(table.propensity, 1 / 3)


def test_arms_that_are_numbers_are_sorted_as_numbers_and_semicolons_separate_too(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("price;sold\n10;yes\n9;no\n")
    table = read_plays(path, arm="price", reward="sold")
    assert table.arms == ["9", "10"] and table.reward.tolist() == [1.0, 0.0]


def test_numbers_that_are_codes_become_groups_if_asked(log):
    table = read_plays(log, context=["price", "age"])
    assert list(table.entries) == ["price", "age"] and "price (a number), age (a number)" in table.words
    table = read_plays(log, context=["price:groups"])
    assert table.entries["price=9"].tolist() == [0.0, 1.0, 1.0] and "context price (2 groups)" in table.words


def test_whole_numbers_that_may_be_codes_are_pointed_out(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("arm,reward,region\na,1,3\nb,0,1\na,0,2\n")
    assert "region (a number; if it is a code, --context region:groups)" in read_plays(path, context=["region"]).words


def test_a_column_of_predictions_is_not_taken_for_propensities(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("arm,reward,probability,propensity\na,1,0,\nb,0,,0.5\n")
    with pytest.raises(DataFileError, match="column 'propensity' has an empty cell in row 1: fill in"):
        read_plays(path)
    assert read_plays(path, propensity="none").propensity is None


def test_decimal_commas_are_read_where_commas_do_not_separate(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("arm;reward;spend;date\na;1,5;1.200;01.02.2024\nb;NA;3.450;02.02.2024\nb;1.234,50;10;03.02.2024\n")
    table = read_plays(path, context=["spend"])
    assert table.reward.tolist() == [1.5, 1234.5] and table.entries["spend"].tolist() == [1200.0, 10.0]
    path.write_text("arm;reward\na;1,200\nb;3,450\n")  # 1.2 or 1200
    with pytest.raises(
        DataFileError, match="'1,200' is not a finite number; write the numbers of this column as 1200.5"
    ):
        read_plays(path)
    path.write_text("arm;reward\na;1.200\nb;3.450\n")
    assert read_plays(path).reward.tolist() == [1.2, 3.45]


def test_arms_are_in_the_order_of_the_numbers_in_their_names(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("arm,reward\n" + "".join(f"{arm},1\n" for arm in ("ad 10", "ad 2", "ad", "b1", "ad 9b")))
    assert read_plays(path).arms == ["ad", "ad 2", "ad 9b", "ad 10", "b1"]


def test_percent_and_short_words_are_numbers_and_usual_names_are_found_with_underscores(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("Test_Group;Clicks;discount;returning\na;Y;12,5 %;t\nb;n;7%;F\nb;N/A;1%;f\n")
    table = read_plays(path, context=["discount", "returning"])
    assert table.arm == ["a", "b"] and table.reward.tolist() == [1.0, 0.0]
    assert table.entries["discount"].tolist() == [0.125, 0.07] and table.entries["returning"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("value", "is_fixed"), [("price*sold", True), ("price*2", True), ("spend", False)])
def test_a_table_says_whether_the_amounts_are_those_of_its_arms(tmp_path, value, is_fixed):
    path = tmp_path / "log.csv"
    path.write_text("arm,price,sold,spend\na,9,1,37.5\na,9,0,0\nb,12,1,12.1\n")
    assert read_plays(path, value=value).has_fixed_amounts is is_fixed


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            ("variant", "cell"),
            {},
            "no column named arm, variant.*say which one it is with --arm COLUMN; its columns: cell",
        ),
        (("converted", "sales"), {}, "with --reward COLUMN"),
        (("variant", "variant"), {"reward": "clicks"}, "has no column 'clicks'; its columns: variant, converted"),
        (("a,0", "a,maybe"), {}, "row 2, column 'converted': 'maybe' is not a finite number; correct it"),
        (("a,0", ",0"), {}, "column 'variant' has an empty cell in row 2: fill in what is missing"),
        (("a,0", "c,0"), {"arms": ["a", "b"]}, "row 2 has the arm 'c', which --arms does not name: a, b"),
        (("41", ""), {"context": ["age"]}, "column 'age' has an empty cell in row 2: .*leave it out of --context"),
        (
            ("30,0.5\na,0,9,desktop,41", "N/A,0.5\na,0,9,desktop,"),
            {"context": ["age"]},
            "in 2 rows, such as 1, 2: fill",
        ),
        (("41", "4%"), {"context": ["age"]}, "row 2, column 'age': '4%' is not a finite number; .*% in all or none"),
    ],
)
def test_refusals_name_the_row_the_column_and_the_remedy(tmp_path, change, settings, message):
    path = tmp_path / "log.csv"
    path.write_text(LOG.replace(*change))
    with pytest.raises(DataFileError, match=message):
        read_plays(path, **settings)


def test_a_column_with_too_many_texts_is_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("arm,reward,name\n" + "".join(f"a,1,name {i}\n" for i in range(21)))
    with pytest.raises(DataFileError, match="21 different texts.*leave it out of --context"):
        read_plays(path, context=["name"])
