"""Ctrl-C at any line of a step: nothing is lost, doubled or stuck, in memory and with a journal."""

import linecache
import sys
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import ppl_bandit
from ppl_bandit import Bandit, RewardModel, engines
from ppl_bandit.journal.decision_record import fold_decision

FOLDERS = tuple(str(Path(ppl_bandit.__file__).parent / name) for name in ("live", "journal", "posterior", "inputs"))


class Interruption(KeyboardInterrupt):
    """What Ctrl-C raises, told apart from a real one."""


@pytest.fixture(scope="module")
def parts():
    def conversion(arm):
        with numpyro.plate("arms", 2):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    model = RewardModel(conversion, 2)
    engine = engines.conjugate(model)
    return model, lambda _: engine


def interrupted(call, number):
    """Call, with an interruption at a line of the live bandit's code; return whether it came to that."""
    left = number

    def look(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        # Not where a `with` ends: no signal is looked at between its last line and what it does at its end.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
            "with "
        ):
            left -= 1
            if left == 0:
                raise Interruption
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    except Interruption:
        return True
    finally:
        sys.settrace(before)
    return left <= 0


def check(bandit):
    found = bandit.posterior_parameters()["rate"]
    arms, rewards, _ = bandit._rows()
    for name, values in (("concentration1", rewards["reward"]), ("concentration0", 1 - rewards["reward"])):
        np.testing.assert_allclose(found[name], 1 + np.bincount(arms, weights=values, minlength=2))
    experiment = bandit._experiment
    records = [fold_decision(events) for events in experiment.store.decisions(experiment.name)]
    assert sum(record.status == "rewarded" for record in records) == arms.size == bandit.num_rewards
    bandit.select()  # follows the stream
    assert experiment.catch_up().num_played.sum() == len(records) + 1
    numbers = [record.decided.number for record in records if not record.decided.lane]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("kind", ["update", "correct", "select", "batch"])
def test_an_interruption_at_any_line_loses_and_doubles_nothing(parts, tmp_path, kind, is_durable):
    model, engine = parts
    bandit = Bandit(model, engine=engine, num_samples=50, journal=tmp_path / "j.db" if is_durable else None)
    stride = 3 if is_durable or kind == "correct" else 1  # what takes long is interrupted at every third line
    number, num_interrupted = 1, 0
    while True:
        decisions, value = [bandit.select() for _ in range(2)], (number // stride) % 2
        if kind == "correct":
            bandit.update(decisions[0], 1 - value)
        before = bandit.num_rewards
        calls = {
            "update": lambda: bandit.update(decisions[0], value),  # noqa: B023
            "correct": lambda: bandit.update(decisions[0], value, correct=True),  # noqa: B023
            "select": bandit.select,
            "batch": lambda: bandit.update_many(decisions=decisions, rewards=[1, 0]),  # noqa: B023
        }
        if not interrupted(calls[kind], number):
            break
        num_interrupted += 1
        calls[kind]()  # reported again, it counts once
        assert bandit.num_rewards == before + {"update": 1, "batch": 2}.get(kind, 0)
        if num_interrupted % 10 == 0:
            check(bandit)
        number += stride
    check(bandit)
    assert num_interrupted > 20
    if is_durable:
        again = Bandit(model, engine=engine, num_samples=50, journal=tmp_path / "j.db")
        assert again.num_rewards == bandit.num_rewards
        assert bandit._experiment.store.first_broken("default") is None
