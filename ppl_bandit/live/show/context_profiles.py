"""The expected reward along each entry of the context: who leads where, and whether choosing by context can gain anything."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.display.figure_style import figure_tools, reward_label, styles
from ppl_bandit.display.terminal import shown_name
from ppl_bandit.inputs.data_frames import context_columns
from ppl_bandit.live.show.overview import Overview, reward_tables, subsample_contexts
from ppl_bandit.live.show.reward_curves import RewardCurves
from ppl_bandit.program.model.reward_model import RewardModel

_NUM_VALUES = 15  # of an entry: the curves of programs that people write have few bends
_NUM_OTHERS = 12  # contexts whose other entries are averaged over
_MAX_DRAWS = 400  # posterior draws: an end of a 95% interval is then known to a tenth of the interval
_MAX_COMPUTED = 24  # entries; of wider contexts the first ones
_MAX_SHOWN = 6  # entries in the figure
_MAX_ARMS = 6  # curves that can be told apart


def context_profiles(model: RewardModel, draws: Mapping[str, np.ndarray], contexts: Any) -> list[RewardCurves]:
    """Return the curves along each entry that differs between contexts; the other entries are as in these contexts.

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
    for name, (number, index) in list(context_columns(model).items())[:_MAX_COMPUTED]:
        place: Any = (slice(None), *index)
        seen = np.asarray(jax.tree.leaves(contexts)[number])[place]
        values = _values(seen)
        if values.size < 2:
            continue
        # One shape of table for all entries, which is compiled once.
        grid = np.pad(values, (0, _NUM_VALUES - values.size), mode="edge")
        rows = [np.tile(np.asarray(leaf), (grid.size, *([1] * (np.ndim(leaf) - 1)))) for leaf in leaves]
        rows[number] = rows[number].copy()
        rows[number][place] = np.repeat(grid, num_others)
        with jax.enable_x64(True):
            tables = np.asarray(reward_tables(model, True)(dict(draws), jax.tree.unflatten(structure, rows)))
        # (G, M, A), averaged over the other entries
        averaged = tables.reshape(grid.size, num_others, *tables.shape[1:]).mean(axis=1)[: values.size]
        low, high = np.quantile(averaged, [0.025, 0.975], axis=1)
        found.append(RewardCurves(name, values, averaged.mean(axis=1), low, high))
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
            if x.size > 2:
                profile.draw(axis, arm, colour, dash, label)
                continue
            # two groups: points with bars, no line between them
            offset = (arms.index(arm) - 0.5 * (len(arms) - 1)) * 0.04 * np.ptp(x)
            middle = profile.mean[:, arm]
            margins = np.abs([profile.low[:, arm], profile.high[:, arm]] - middle)
            axis.errorbar(x + offset, middle, margins, fmt="o", color=colour, capsize=3, label=label)
            axis.set(xticks=x, xlim=(x[0] - 0.4 * np.ptp(x), x[-1] + 0.4 * np.ptp(x)))
        axis.set_xlabel(profile.name)
    for axis in axes.ravel()[len(shown) :]:
        axis.set_axis_off()
    for row in axes:
        row[0].set_ylabel(reward_label(unit))
    axes[0, 0].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    rest = f"; the {len(arms)} arms that lead most" if len(arms) < len(overview.arms) else ""
    more = f"; {len(shown)} of {len(profiles)} entries" if len(shown) < len(profiles) else ""
    figure.supxlabel(
        f"posterior mean and central 95% interval, the other entries as in the contexts that were seen{rest}{more}",
        fontsize=8,
        color="0.35",
    )
    return figure


def _values(seen: np.ndarray) -> np.ndarray:
    distinct = np.unique(seen)
    if distinct.size <= _NUM_VALUES:
        return distinct
    low, high = np.quantile(seen, [0.025, 0.975]).tolist()
    values = np.linspace(low, high, _NUM_VALUES)
    return np.unique(values.round()) if seen.dtype.kind in "iu" else values
