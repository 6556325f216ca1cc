"""Expected rewards over time, for a program whose latents move: the laws that the engine had after each reward."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.display.figure_style import figure_tools, reward_label, styles
from ppl_bandit.live.show.reward_curves import RewardCurves
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.simulation.rollouts import (
    Play,
    Played,
    follow_log,
    initial_state,
    log_steps,
    play_function,
    take_logged,
)
from ppl_bandit.types import Engine, Interaction, Key

_MAX_POINTS = 200
_NUM_DRAWS = 400
_MAX_ARMS = 6  # whose bands can be told apart


def levels_over_time(model: RewardModel, engine: Engine, seed: int, rows: Interaction) -> RewardCurves:
    """Learn rows again from the prior, and return the laws at no more than 200 points on the way.

    A law is that which a decision right after so many rewards would have read.

    Args:
        rows: all that was learnt, in order; at least one.
    """
    num_rows = len(rows.arm)
    size = -(-num_rows // _MAX_POINTS)
    num_points = -(-num_rows // size)

    def record(key: Key, play: Play, played: Played) -> tuple[Play, tuple[Array, Array]]:
        key_move, key_draw = jr.split(key)
        context = jax.tree.map(lambda leaf: leaf[-1], played.rows.context)
        advance = engine.capabilities.advance
        ahead = play.state if advance is None else advance(key_move, play.state, context)
        table = model.expected_rewards(engine.sample(key_draw, ahead, _NUM_DRAWS), context)
        return play, (jnp.mean(table, axis=0), jnp.quantile(table, jnp.array([0.025, 0.975]), axis=0))

    with jax.enable_x64(True):
        key_init, key_steps = jr.split(jr.key(seed))
        play = play_function(key_steps, engine, take_logged, record)
        start = Play(initial_state(key_init, engine, num_points * size))
        mean, ends = jax.device_get(quick_jit(partial(follow_log, play))(start, log_steps(rows, size=size))[1])
    mean, ends = mean[:num_points], ends[:num_points]
    num_rewards = np.minimum(size * (1 + np.arange(num_points)), num_rows)
    return RewardCurves("reward number", num_rewards, mean, ends[:, 0], ends[:, 1])


def plot_levels(found: RewardCurves, arms: list[Any], played: np.ndarray, title: str, caption: str, unit: str) -> Any:
    """Return a figure: a line and a band for each arm over the rewards, and below it which arm was played.

    Of more than six arms, those with the largest means at the end are drawn.

    Args:
        played: index of the arm of every learnt reward, in order.
        unit: of the expected reward.
    """
    figure, (above, below) = figure_tools().subplots(
        2, 1, figsize=(9, 5.2), sharex=True, layout="constrained", height_ratios=(4, 1)
    )
    shown = np.sort(np.argsort(-found.mean[-1])[:_MAX_ARMS])
    for row, (index, (colour, dash)) in enumerate(zip(shown, styles(), strict=False)):
        found.draw(above, index, colour, dash, str(arms[index]))
        numbers = 1 + np.flatnonzero(played == index)
        below.plot(numbers, np.full(numbers.size, row), "|", color=colour, markersize=7)
    above.set(ylabel=reward_label(unit), title=title)
    above.legend(fontsize=8, loc="upper left", ncols=min(3, shown.size))
    below.set(xlabel=found.name, ylabel="played", yticks=range(shown.size), yticklabels=[arms[i] for i in shown])
    below.set_ylim(shown.size - 0.5, -0.5)
    figure.supxlabel(f"mean and 95% interval of the next decision's law; {caption}", fontsize=8)
    return figure
