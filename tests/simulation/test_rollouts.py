"""The step that all simulations share: what it reveals, and what it learns."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from shared_models import bernoulli_model

import ppl_bandit
from ppl_bandit import Environment
from ppl_bandit.simulation.rollouts import (
    Choice,
    Play,
    Step,
    follow_log,
    log_steps,
    no_waiting,
    play_function,
    take_logged,
)
from ppl_bandit.types import Interaction

NEVER = -1
COUNTER = SimpleNamespace(update=lambda key, state, rows: (state + jnp.sum(rows.mask), None))


def record_known(key, play, played):
    return play, play.state


def known_after(sizes, delay, until, num_waiting, is_delay_fixed):
    """The number of known outcomes after each step of a world with N = 4 rows a step."""
    world = Environment(bernoulli_model(2), {"rate": jnp.array([0.5, 0.5])})

    def decide(keys, play, step, context):
        return Choice(jnp.zeros(4, int), None, jnp.arange(4) < step.size)

    play = play_function(jr.key(0), COUNTER, decide, record_known, world, num_rows=4, is_delay_fixed=is_delay_fixed)
    start = Play(jnp.asarray(0), None, no_waiting(world, num_waiting))
    first = np.cumsum([1, *sizes[:-1]])
    steps = Step(np.arange(len(sizes)), first, np.asarray(sizes), np.asarray(delay), np.asarray(until))
    return jax.lax.scan(play, start, jax.tree.map(jnp.asarray, steps))[1].tolist()


@pytest.mark.parametrize("is_delay_fixed", [True, False])
def test_an_outcome_is_known_after_as_many_decisions_as_it_is_late(is_delay_fixed):
    # Looks after 4, 6, 8 decisions, outcomes 3 decisions late: rows 1, then 1 to 3, then 1 to 5.
    assert known_after([4, 2, 2], [3, 3, 3], [4, 6, 8], 3, is_delay_fixed) == [1, 3, 5]


def test_a_last_look_waits_for_all_outcomes_but_those_that_never_arrive():
    delays = [[3, 0, NEVER, 2], [0, 1, 0, 0], [3, NEVER, 0, 0]]
    # At 4: rows 1 and 2. At 6: also 4, due at 6, and 5. At the end also 6, due at 7, and 7, due at 10; 3 and 8 never.
    assert known_after([4, 2, 2], delays, [4, 6, 99], 3, False) == [2, 4, 6]


def test_the_steps_of_a_log_learn_each_row_once_and_padding_is_not_played():
    rows = Interaction(np.arange(11) % 2, np.arange(11.0))
    steps = log_steps(rows, size=2)
    assert len(steps.index) == 8 and steps.size.tolist() == [2, 2, 2, 2, 2, 1, 0, 0]
    play = play_function(jr.key(0), COUNTER, take_logged, record_known)
    end, found = follow_log(play, Play(jnp.asarray(0)), jax.tree.map(jnp.asarray, steps))
    assert found.tolist() == [2, 4, 6, 8, 10, 11, 0, 0] and int(end.state) == 11


DECIDES = {"decide", "select", "selector", "decision_function", "pick_arm"}
LEARNS = re.compile(r"(engine|learner|compiled)\.(update|quick_update|add_rows|learn)$")
LIVE = ("simulation", "live", "posterior")  # the rollout, and what learns the rows of an experiment as they come


def decides_and_learns(source):
    """The functions of a file that call a decision and an engine's update, themselves or in a function within."""
    found = []
    for node in ast.parse(source).body:
        called = [ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)]
        if any(name.rpartition(".")[2] in DECIDES for name in called) and any(map(LEARNS.search, called)):
            found.append(getattr(node, "name", ""))
    return found


def test_only_the_rollout_and_the_live_bandit_decide_and_learn():
    package = Path(ppl_bandit.__file__).parent
    others = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in LIVE]
    assert {str(path): found for path in others if (found := decides_and_learns(path.read_text()))} == {}
    loop = "def play(s):\n for row in rows:\n  arm = select(s)\n  s, info = setting.engine.update(key, s, row)"
    assert decides_and_learns(loop) == ["play"]
