"""Room for rows: never claimed where there is none, prepared in time, and seldom asked for."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from ppl_bandit.posterior.capacity import Room, look


class Kept(NamedTuple):
    rows: Any
    num_rows: int


@pytest.mark.parametrize("step, is_merged", [(1, False), (1, True), (37, False), (5000, False)])
def test_there_is_room_wherever_it_is_claimed_and_growth_is_prepared_in_time(step, is_merged):
    calls = []

    def reserve(state, num_rows):
        calls.append(num_rows)
        capacity = len(state.rows)
        while capacity < state.num_rows + num_rows:
            capacity *= 2
        return state if capacity == len(state.rows) else state._replace(rows=np.zeros(capacity))

    state, room, prepared, since = Kept(np.zeros(4096), 0), Room(), set(), 0
    num_steps = max(3, 20_000 // step)
    for seen in range(0, num_steps * step, step):
        if not room.has(seen + step):
            grown = reserve(state, step)
            if len(grown.rows) != len(state.rows) and step == 1:
                # The first room is prepared to grow when it is an eighth full and a look more, others when they are there.
                latest = 4096 * (1 / 8 + 1 / 64) + 2 if len(state.rows) == 4096 else seen / 2 + 1
                assert len(grown.rows) in prepared and since <= latest
            state = grown
        state = state._replace(num_rows=state.num_rows + (step if not is_merged or seen % 3 else 0))
        assert state.num_rows <= len(state.rows)
        if not room.is_sure(seen + step):
            room, grown = look(reserve, room, state, seen + step)
            if grown is not None:
                assert len(grown.rows) > len(state.rows)
                prepared.add(len(grown.rows))
                since = seen + step
    assert not is_merged or len(state.rows) < 20_000
    # 80 looks of an eighth more rows each lead to 20,000; of a room that is nearly full every step asks, a ninth of it at most.
    assert len(calls) <= (4096 + 8192 + 16_384) / 9 * 2 + 80 * 3 + 3 * 24
