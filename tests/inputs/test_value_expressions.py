"""What a row earned, as arithmetic on columns: numbers come out, and nothing else is executed."""

import numpy as np
import pytest

from ppl_bandit.inputs.tables import parse_value

ROWS = {"price": np.array([9.0, 12.0]), "sold": np.array([1.0, 0.0]), "Unit cost": np.array([2.0, 3.0])}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price*sold", [9.0, 0.0]),
        ("(price - `Unit cost`) * sold", [7.0, 0.0]),
        ("-price + 2**3 / 4", [-7.0, -10.0]),
        ("price * (sold == 1) + (price > 10)", [9.0, 1.0]),
        ("log(exp(price)) + sqrt(abs(-4))", [11.0, 14.0]),
    ],
)
def test_arithmetic_on_columns(text, expected):
    np.testing.assert_allclose(parse_value(text).compute(ROWS), expected)


def test_the_columns_of_an_expression_are_known():
    assert parse_value("sold * price - `Unit cost` * sold").columns == ("sold", "price", "Unit cost")


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("__import__('os').system('true')", "__import__"),
        ("price.__class__", "price.__class__"),
        ("[price for price in sold]", "for price in sold"),
        ("(lambda: 1)()", "lambda"),
        ("price[0]", "price[0]"),
        ("price if sold else 0", "if sold"),
        ("log(price, base=2)", "base=2"),
        ("sold and price", "sold and price"),
        ("'a' * 1000", "'a'"),
        ("price *", "not an expression"),
        ("1+" * 400 + "1", "characters"),
        ("", "not an expression"),
        ("1.5", "names no column"),
    ],
)
def test_anything_else_is_refused_with_the_part(text, refused):
    with pytest.raises(ValueError, match="--value") as caught:
        parse_value(text)
    assert refused in str(caught.value)


def test_a_value_that_is_not_finite_is_refused_with_its_row():
    with pytest.raises(ValueError, match="in row 2, expected finite numbers"):
        parse_value("price / sold").compute(ROWS)
