"""Expected rewards as curves: along an entry of the context, and over time."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.display.figure_style import figure_tools, reward_label, styles
from ppl_bandit.display.terminal import shown_name
from ppl_bandit.live.overview import Overview, context_entries, reward_tables, subsample_contexts
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


class RewardCurves(NamedTuple):
    """A curve of each arm, with a band.

    Attributes:
        name: what it is along.
        values: (G,), of that.
        mean, low, high: (G, A), posterior mean of the expected reward, and its central 95% interval.
        groups: names of the values, if they are groups.
    """

    name: str
    values: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    groups: tuple[str, ...] = ()

    def draw(self, axis: Any, arm: int, colour: str, dash: Any, label: str) -> None:
        """Draw the line and the band of one arm."""
        axis.plot(self.values, self.mean[:, arm], color=colour, linestyle=dash, label=label)
        axis.fill_between(self.values, self.low[:, arm], self.high[:, arm], color=colour, alpha=0.13, linewidth=0)


_NUM_VALUES = 15  # of an entry: the curves of programs that people write have few bends
_NUM_OTHERS = 12  # contexts whose other entries are averaged over
_MAX_DRAWS = 400  # posterior draws: an end of a 95% interval is then known to a tenth of the interval
_MAX_SHOWN = 6  # entries in the figure
_MAX_ARMS = 6  # curves that can be told apart


def context_profiles(model: RewardModel, draws: Mapping[str, np.ndarray], contexts: Any) -> list[RewardCurves]:
    """Return the curves along each entry that differs between contexts, or over its groups; others are as in these contexts.

    The values are all that an entry has in the contexts, if they are few, else evenly spaced from 2.5% to 97.5% of them.

    Args:
        draws: of the latents, {site: (M, ...)}.
        contexts: that were seen, with a leading axis.
    """
    found = []
    draws = {site: values[:_MAX_DRAWS] for site, values in draws.items()}
    others = subsample_contexts(contexts, _NUM_OTHERS, table_size=_MAX_DRAWS * model.num_arms)
    leaves, structure = jax.tree.flatten(others)
    num_others = len(leaves[0])
    entries = context_entries(model, contexts)
    settings = [
        np.stack(list(entry.groups.values())) if entry.groups else _values(entry.seen[:, 0])[:, None]
        for entry in entries
    ]
    size = max(map(len, settings), default=0)  # one shape of table for all entries, which is compiled once
    for entry, grid in zip(entries, settings, strict=True):
        padded = np.pad(grid, ((0, size - len(grid)), (0, 0)), mode="edge")
        rows = [np.tile(np.asarray(leaf), (size, *([1] * (np.ndim(leaf) - 1)))) for leaf in leaves]
        for (number, index), column in zip(entry.places.values(), padded.T, strict=True):
            np.moveaxis(rows[number], 0, -1)[index] = np.repeat(column, num_others)
        with jax.enable_x64(True):
            tables = np.asarray(reward_tables(model, True)(dict(draws), jax.tree.unflatten(structure, rows)))
        # (G, M, A), averaged over the other entries
        averaged = tables.reshape(size, num_others, *tables.shape[1:]).mean(axis=1)[: len(grid)]
        low, high = np.quantile(averaged, [0.025, 0.975], axis=1)
        values = np.arange(len(grid)) if entry.groups else grid[:, 0]
        names = tuple(name.removeprefix(f"{entry.name}=") for name in entry.groups)
        found.append(RewardCurves(entry.name, values, averaged.mean(axis=1), low, high, names))
    return found


def plot_profiles(profiles: Sequence[RewardCurves], overview: Overview, title: str, unit: str = "") -> Any:
    """Return a figure with a panel for each of the entries along which the lead changes most; None without any.

    Args:
        unit: of the expected reward.
    """
    if not profiles:
        return None

    def change(profile: RewardCurves) -> float:
        gaps = profile.mean - profile.mean.mean(axis=1, keepdims=True)
        return float(np.ptp(gaps, axis=0).max())

    shown = sorted(profiles, key=change, reverse=True)[:_MAX_SHOWN]
    num_columns = min(3, len(shown))
    num_rows = -(-len(shown) // num_columns)
    shares = np.zeros(len(overview.arms)) if overview.by_context is None else overview.by_context.lead_shares
    places = np.argsort(overview.leaders)  # of the arms by their means
    arms = np.lexsort((places, -shares))[:_MAX_ARMS].tolist()  # those that lead in most contexts come first
    # Of few arms each has the colour that it has in the other figure.
    own = list(itertools.islice(styles(), len(overview.arms)))
    look = [own[arm] for arm in arms] if len(own) <= _MAX_ARMS else own
    figure, axes = figure_tools().subplots(
        num_rows, num_columns, figsize=(11, 0.6 + 3.2 * num_rows), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, profile in zip(axes.ravel(), shown, strict=False):
        for arm, (colour, dash) in zip(arms, look, strict=False):
            label, x = str(shown_name(overview.arms[arm])), profile.values
            if x.size > 2 and not profile.groups:
                profile.draw(axis, arm, colour, dash, label)
                continue
            # groups, or two values: points with bars, no line between them
            gap = np.diff(x).min()
            offset = (arms.index(arm) - 0.5 * (len(arms) - 1)) * 0.08 * gap
            middle = profile.mean[:, arm]
            margins = np.abs([profile.low[:, arm], profile.high[:, arm]] - middle)
            axis.errorbar(x + offset, middle, margins, fmt="o", color=colour, capsize=3, label=label)
            axis.set(xticks=x, xlim=(x[0] - 0.4 * gap, x[-1] + 0.4 * gap))
            if profile.groups:
                is_wide = sum(map(len, profile.groups)) > 90 // num_columns
                names = [name if len(name) <= 16 else f"{name[:15]}..." for name in profile.groups]
                axis.set_xticklabels(names, rotation=90 * is_wide, fontsize=8)
        axis.set_xlabel(profile.name)
    for axis in axes.ravel()[len(shown) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel(reward_label(unit))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=11)
    rest = f"; the {len(arms)} arms that lead most" if len(arms) < len(overview.arms) else ""
    more = f"; {len(shown)} of {len(profiles)} entries" if len(shown) < len(profiles) else ""
    what = "posterior mean and central 95% interval, the other entries as in the contexts that were seen"
    figure.supxlabel(f"{what}{rest}{more}", fontsize=8, alpha=0.65)
    return figure


def _values(seen: np.ndarray) -> np.ndarray:
    distinct = np.unique(seen)
    if distinct.size <= _NUM_VALUES:
        return distinct
    low, high = np.quantile(seen, [0.025, 0.975]).tolist()
    values = np.linspace(low, high, _NUM_VALUES)
    return np.unique(values.round()) if seen.dtype.kind in "iu" else values


_MAX_POINTS = 200
_NUM_DRAWS = 400
_MAX_ARMS_OVER_TIME = 6  # whose bands can be told apart


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
    shown = np.sort(np.argsort(-found.mean[-1])[:_MAX_ARMS_OVER_TIME])
    figure, (above, below) = figure_tools().subplots(
        2, 1, figsize=(9, 5.2), sharex=True, layout="constrained", height_ratios=(16, shown.size)
    )
    for row, (index, (colour, dash)) in enumerate(zip(shown, styles(), strict=False)):
        found.draw(above, index, colour, dash, str(arms[index]))
        numbers = 1 + np.flatnonzero(played == index)
        below.plot(numbers, np.full(numbers.size, row), "|", color=colour, markersize=7)
    above.set(ylabel=reward_label(unit), title=title)
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    below.set(xlabel=found.name, ylabel="played", ylim=(shown.size - 0.5, -0.5))
    below.set_yticks(range(shown.size), [str(arms[index]) for index in shown], fontsize=8)
    rest = f"; {shown.size} of {len(arms)} arms" if shown.size < len(arms) else ""
    figure.supxlabel(f"mean and 95% interval of the next decision's law{rest}; {caption}", fontsize=8)
    return figure
