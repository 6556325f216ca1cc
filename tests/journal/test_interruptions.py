"""Ctrl-C at any line of a step: nothing is lost, doubled or stuck, in memory and with a journal."""

import itertools
import linecache
import sys
from pathlib import Path

import numpy as np
import pytest
from shared_models import bernoulli_bandit

import ppl_bandit

FOLDERS = tuple(str(Path(ppl_bandit.__file__).parent / name) for name in ("live", "journal", "posterior", "inputs"))


class Interruption(KeyboardInterrupt):
    """What Ctrl-C raises, told apart from a real one."""


def interrupted(call, is_wanted):
    """Call, and interrupt at the first line of the library where `is_wanted(file, line)`; return whether there was one."""

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if not file.startswith(FOLDERS):
            return None
        # Not where a `with` ends: Python handles no signal between its last line and its __exit__.
        if event == "line" and not linecache.getline(file, frame.f_lineno).lstrip().startswith("with "):
            if is_wanted(file, frame.f_lineno):
                raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interruption:
        return True
    finally:
        sys.settrace(before)
    return False


def check(bandit):
    found = bandit.posterior_parameters()["rate"]
    arms, rewards, _ = bandit._rows()
    for name, values in (("concentration1", rewards["reward"]), ("concentration0", 1 - rewards["reward"])):
        np.testing.assert_allclose(found[name], 1 + np.bincount(arms, weights=values, minlength=3))
    experiment = bandit._experiment
    records = list(experiment.store.decisions(experiment.name))
    assert sum(record.status == "rewarded" for record in records) == arms.size == bandit.num_rewards
    bandit.select()  # follows the stream
    assert experiment.catch_up().num_played.sum() == len(records) + 1
    numbers = [record.decided.number for record in records if not record.decided.stream]
    assert len(set(numbers)) == len(numbers)


def interrupt_repeatedly(journal, kind, wanted_lines):
    """Interrupt calls of one kind until a call ends; `wanted_lines(n)` says where to interrupt call n. Return how many were."""
    bandit = bernoulli_bandit(journal=journal)
    for number in itertools.count():
        decisions, value = [bandit.select() for _ in range(2)], number % 2
        if kind == "correct":
            bandit.update(decisions[0], 1 - value)
        before = bandit.num_rewards
        calls = {
            "update": lambda: bandit.update(decisions[0], value),  # noqa: B023
            "correct": lambda: bandit.update(decisions[0], value, correct=True),  # noqa: B023
            "select": bandit.select,
            "batch": lambda: bandit.update_many(decisions=decisions, rewards=[1, 0]),  # noqa: B023
        }
        if not interrupted(calls[kind], wanted_lines(number)):
            break
        calls[kind]()  # reported again, it counts once
        assert bandit.num_rewards == before + {"update": 1, "batch": 2}.get(kind, 0)
        if number % 10 == 9:
            check(bandit)
    check(bandit)
    if journal is not None:
        again = bernoulli_bandit(journal=journal)
        assert again.num_rewards == bandit.num_rewards
        assert bandit._experiment.store.find_damage("default") is None
    return number


KINDS = ["update", "correct", "select", "batch"]


def test_an_interruption_at_any_line_loses_and_doubles_nothing(tmp_path):
    """Every line that one of the calls runs is interrupted once: by the first call that runs it."""
    covered = set()

    def is_new(file, line):
        is_covered = (file, line) in covered
        covered.add((file, line))
        return not is_covered

    for journal in (None, tmp_path / "j.db"):
        for kind in KINDS:
            interrupt_repeatedly(journal, kind, lambda _: is_new)
    assert len(covered) > 100


@pytest.mark.slow
@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interruption_each_time_that_a_line_runs_loses_and_doubles_nothing(tmp_path, kind, is_durable):
    def nth_line(number):
        events = itertools.count()
        return lambda file, line: next(events) == number

    assert interrupt_repeatedly(tmp_path / "j.db" if is_durable else None, kind, nth_line) > 20
