"""Conclusions of a comparison: the best arm, its lead and probability, and whether other engines decide differently."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_bandit.comparison.results import Comparison
from ppl_bandit.live.show.overview import Overview, arm_overview
from ppl_bandit.live.show.report import name_of
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


def overviews(
    model: RewardModel, arms: list[Any], data: Interaction, contexts: Any, draws: Mapping[str, np.ndarray]
) -> dict[str, Overview]:
    """Return the statistics of the arms under each of several sets of draws (M, K), {label: Overview}."""
    return {
        label: arm_overview(model, arms, np.asarray(data.arm), _by_site(model, flat), contexts)
        for label, flat in draws.items()
        if np.isfinite(flat).all()
    }


def _by_site(model: RewardModel, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Invert `flatten_latents`."""
    ends = np.cumsum([math.prod(shape) for shape in model.latent_shapes.values()])
    parts = zip(model.latent_shapes.items(), np.split(flat, ends[:-1], axis=1), strict=True)
    return {name: part.reshape(len(flat), *shape) for (name, shape), part in parts}


def answer(result: Comparison) -> str:
    """Return one paragraph: the best arm, its lead and probability, and which engines decide differently."""
    found = result.overviews["reference"]
    leader = int(np.argmax(found.mean))
    where = f", {found.where} of the data" if found.where else ""
    sentences = [
        f"After {len(result.data.arm)} rows, {name_of(found.arms[leader])} has the highest expected reward{where}: "
        f"{found.mean[leader]:.4g} (95% interval {found.low[leader]:.4g} to {found.high[leader]:.4g})"
    ]
    if len(found.arms) > 1:
        second = int(found.leaders[1])
        gap, low, high = found.lead(leader, second)
        sentences[0] += (
            f", {gap:.3g} more than {name_of(found.arms[second])} (95% interval of the difference {low:.3g} to {high:.3g})"
        )
        sentences.append(
            f"It is the best arm with probability {found.best_prob[leader]:.3f}; the expected loss of choosing it now is "
            f"{found.loss[leader]:.2g}"
        )
    source = "the exact posterior" if result.reference.is_exact else result.reference.description.partition(":")[0]
    sentences.append(f"Source: {source}")
    different = [label for label in result.engines if decides_differently(result, label)]
    same = [label for label in result.engines if label not in different]
    if different:
        sentences.append(f"{_enumerate(different)} would have made a different decision; see the decisions below")
    if same:
        who = "All engines" if not different and len(same) > 1 else _enumerate(same)
        sentences.append(f"{who} would have made the same decision, within sampling error")
    return ". ".join(sentences) + "."


def verdict(result: Comparison) -> str:
    """Return one line per engine: whether its decisions differ from the reference's."""
    lines = []
    floor = result.reference.floor.other_arm_prob
    for label, engine in result.engines.items():
        share = engine.decisions.other_arm_prob
        if not np.isfinite(share.value):
            lines.append(f"{label}: its draws are not finite, so it cannot decide")
            continue
        text = (
            "DECIDES DIFFERENTLY from the reference"
            if decides_differently(result, label)
            else "decides like the reference"
        )
        lines.append(
            f"{label} {text}: another arm with probability {share.value:.3f}; sampling error alone gives "
            f"{floor.value:.3f} ± {_sampling_sd(result, label):.3f}"
        )
    return "\n".join(lines)


def decides_differently(result: Comparison, label: str) -> bool:
    """Return whether an engine's decisions differ from the reference's by more than three standard errors.

    The sampling error is that of as many samples of the reference itself.
    """
    share = float(result.engines[label].decisions.other_arm_prob.value)
    floor = float(result.reference.floor.other_arm_prob.value)
    return not share <= floor + 3.0 * _sampling_sd(result, label)


def _sampling_sd(result: Comparison, label: str) -> float:
    # At least one draw of M, because 20 samples may agree by chance.
    floor = result.reference.floor.other_arm_prob
    return max(float(floor.error), 1.0 / result.num_samples) / math.sqrt(len(result.engines[label].runs))


def _enumerate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
