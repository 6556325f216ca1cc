"""The capacity of states that store rows."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from ppl_bandit.posterior.capacity import check_capacity


class Stored(NamedTuple):
    rows: Any
    num_rows: int


def reserve(state, num_rows):
    capacity = len(state.rows)
    while capacity < state.num_rows + num_rows:
        capacity *= 2
    return state if capacity == len(state.rows) else state._replace(rows=np.zeros(capacity))


@pytest.mark.parametrize("num_rows", [0, 1, 100, 2047, 2048, 4000, 4095, 4096])
def test_at_least_half_of_the_free_capacity_is_reported_and_the_next_capacity_is_returned(num_rows):
    num_free, larger = check_capacity(reserve, Stored(np.zeros(4096), num_rows))
    assert (4096 - num_rows) // 2 <= num_free <= 4096 - num_rows
    assert len(larger.rows) == 8192


def test_a_state_that_never_grows_has_no_larger_one():
    num_free, larger = check_capacity(lambda state, num_rows: state, Stored(np.zeros(4), 4))
    assert num_free == 1 << 24 and larger is None
