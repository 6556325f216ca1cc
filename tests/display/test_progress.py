"""The time that is left, from the time so far."""

import re

import pytest

from ppl_bandit.display import terminal


@pytest.mark.parametrize(("seconds", "expected"), [(None, [60, 30, 20, 0]), ((30.0, 10.0, 5.0, 5.0), [13, 8, 7, 0])])
def test_the_time_left_counts_what_the_units_take(monkeypatch, capsys, seconds, expected):
    now = iter([0.0, 20.0, 30.0, 60.0, 70.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(terminal, "_SECONDS_BETWEEN_LINES", {True: 0.0, False: 0.0})
    advance = terminal.progress_reporter("demo", 4, "models", seconds=seconds)
    for _ in range(4):
        advance(1)
    said = capsys.readouterr().err
    assert [int(number) for number in re.findall(r"about (\d+) s left", said)] == expected
    assert ("about 50 s\n" in said) == (seconds is not None)  # before anything is done
