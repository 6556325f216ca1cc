"""The answer that a comparison is asked for: which arm, by how much, how sure, and would another engine have said so too."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_bandit.comparison.measuring.results import Comparison
from ppl_bandit.live.show.overview import Overview, arm_overview
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["answer", "decides_differently", "standings", "verdict"]


def standings(
    model: RewardModel, arms: list[Any], data: Interaction, contexts: Any, draws: Mapping[str, np.ndarray]
) -> dict[str, Overview]:
    """Return where the arms stand according to each of several sets of draws (M, K), {label: Overview}."""
    return {
        label: arm_overview(model, arms, np.asarray(data.arm), _by_site(model, flat), contexts)
        for label, flat in draws.items()
        if np.isfinite(flat).all()
    }


def _by_site(model: RewardModel, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Undo `flatten`."""
    found, start = {}, 0
    for name, shape in model.latent_shapes.items():
        size = math.prod(shape)
        found[name] = flat[:, start : start + size].reshape(len(flat), *shape)
        start += size
    return found


def answer(result: Comparison) -> str:
    """Say in one paragraph what to do, how sure that is, and who would have done otherwise."""
    found = result.standings["reference"]
    leader = int(np.argmax(found.mean))
    where = f", {found.where} of the data" if found.where else ""
    said = [
        f"After {len(result.data.arm)} rows, {_named(found, leader)} has the highest expected reward{where}: "
        f"{found.mean[leader]:.4g} (95% interval {found.low[leader]:.4g} to {found.high[leader]:.4g})"
    ]
    if len(found.arms) > 1:
        second = int(np.argsort(-found.mean, kind="stable")[1])
        gap = found.draws[:, leader] - found.draws[:, second]
        low, high = np.quantile(gap, [0.025, 0.975])
        said[0] += (
            f", {gap.mean():.3g} more than {_named(found, second)} (95% interval of the difference {low:.3g} to {high:.3g})"
        )
        said.append(
            f"It is the best arm with probability {found.best_prob[leader]:.3f}, and choosing it now costs "
            f"{found.loss[leader]:.2g} on average against the arm that is really best"
        )
    source = "the exact posterior" if result.reference.is_exact else result.reference.words.partition(":")[0]
    said.append(f"This is what {source} says")
    otherwise = [label for label in result.engines if decides_differently(result, label)]
    alike = [label for label in result.engines if label not in otherwise]
    if otherwise:
        said.append(f"{_list(otherwise)} would have decided otherwise; see the decisions below")
    if alike:
        every = "every engine" if not otherwise and len(alike) > 1 else _list(alike)
        said.append(f"{every[0].upper()}{every[1:]} would have decided alike, as far as chance lets one tell")
    return ". ".join(said) + "."


def verdict(result: Comparison) -> str:
    """Say in a sentence per engine whether it would have decided differently."""
    lines = []
    floor = result.reference.floor.other_arm_prob
    for label, engine in result.engines.items():
        share = engine.decisions.other_arm_prob
        if not np.isfinite(share.value):
            lines.append(f"{label} gave draws that are not finite: no decision can be made on them")
            continue
        words = (
            "DECIDES DIFFERENTLY from" if decides_differently(result, label) else "cannot be told by its decisions from"
        )
        lines.append(
            f"{label} {words} the reference: another arm with probability {share.value:.3f}, where chance gives "
            f"{floor.value:.3f} ± {_chance(result, label):.3f}"
        )
    return "\n".join(lines)


def decides_differently(result: Comparison, label: str) -> bool:
    """Tell whether an engine's decisions differ from the reference's by more than three standard errors of chance.

    Its distance is set against that of as many samples of the reference itself.
    """
    share = float(result.engines[label].decisions.other_arm_prob.value)
    floor = float(result.reference.floor.other_arm_prob.value)
    return not share <= floor + 3.0 * _chance(result, label)


def _chance(result: Comparison, label: str) -> float:
    # A sample's own deviation counts as one draw of M at least, because 20 samples may agree by chance.
    floor = result.reference.floor.other_arm_prob
    return max(float(floor.error), 1.0 / result.num_samples) / math.sqrt(len(result.engines[label].runs))


def _named(found: Overview, index: int) -> str:
    arm = found.arms[index]
    return f"arm {arm}" if isinstance(arm, int) else str(arm)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
