"""Looks at a live experiment that has a design: the verdict, computed by the same function as in simulation, and its record."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np

from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.projection import Projection
from ppl_bandit.live.designs import due_look
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import CONTINUE, ENDINGS, NO_ARM, Look, check_look, endings
from ppl_bandit.trials.setting import Setting
from ppl_bandit.trials.stopping import StoppingRule

_LOOK_SEED = 0x10_0C  # folded into the seed, so that looks and decisions use different random numbers


@dataclass(frozen=True)
class LookVerdict:
    """The verdict of a look at an experiment.

    Attributes:
        look: number of the look, from 1; the last one taken if none is due; 0 before the first.
        is_due: whether this call took a look; otherwise the fields repeat the last one.
        ending: "continue", or why the experiment stopped: "superiority", "equivalence", "futility", "undecided", ...
        arm: the arm to use if the experiment has stopped: the superior one, else the active arm most likely best; None while
            it goes on.
        dropped: arms that the look dropped.
        active: arms that are left.
        control: the present control; None without one.
        best_arm_probs: {arm: P(best among the arms left)}.
        evidence: {rule: the value that is compared with its threshold}.
        allocation: {arm: probability until the next look}; None if the selector decides each time.
        num_decisions, num_rewards, num_pending: when the look was taken.
        next_look: number of decisions at the next look; None after the last.
        verdict: all of this in words.
    """

    look: int
    is_due: bool
    ending: str
    arm: Any
    dropped: list[Any]
    active: list[Any]
    control: Any
    best_arm_probs: dict[Any, float]
    evidence: dict[str, float]
    allocation: dict[Any, float] | None
    num_decisions: int
    num_rewards: int
    num_pending: int
    next_look: int | None
    verdict: str

    @property
    def is_stop(self) -> bool:
        """Whether the experiment has stopped."""
        return self.ending != ENDINGS[CONTINUE]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values; arms are strings where they are keys."""
        return asdict(self) | {"is_stop": self.is_stop}

    def __str__(self) -> str:
        return self.verdict


class RuleDistance(NamedTuple):
    """What a stopping rule would find now.

    Attributes:
        name: of the rule.
        value: its criterion at the present posterior.
        threshold: at which it stops, or drops an arm; None if it never does.
        is_met: whether it would at the next look.
        words: all of this.
    """

    name: str
    value: float
    threshold: float | None
    is_met: bool
    words: str


def rule_distances(projection: Projection, design: Design) -> tuple[RuleDistance, ...]:
    """Return how far each stopping rule is from its threshold at the next look; nothing is recorded."""
    last = projection.look
    if last is not None and last["ending"] != ENDINGS[CONTINUE]:
        return ()
    num_decisions = int(projection.num_played.sum())
    done = sum(rows <= num_decisions for rows in design.look_rows)
    index = min(max(done, 0 if last is None else last["look"] + 1), design.num_looks - 1)
    found, _ = _check(projection, design, index)
    return tuple(
        _distance(rule, float(value), float(rule.thresholds(design.num_looks)[index]), design.control is not None)
        for rule, value in zip(design.rules, np.asarray(found.evidence), strict=True)
    )


def _distance(rule: StoppingRule, value: float, threshold: float, has_control: bool) -> RuleDistance:
    own = rule.name.replace("_", " "), f"{{}} or {'less' if rule.settings.get('stops') == 'at_most' else 'more'} stops"
    what, end = _CRITERIA.get(rule.name, own)
    compared = "is better than the control" if has_control else "is best"
    if "margin" in rule.settings:
        what = f"the largest probability that an arm is at most {rule.settings['margin']:g} worse than the control"
    what = what.format(compared=compared, **rule.settings)
    is_low = rule.name in ("inferiority", "expected_loss") or rule.settings.get("stops") == "at_most"
    is_met = value < threshold if rule.name == "inferiority" else value <= threshold if is_low else value >= threshold
    limit = "; it ends nothing at this look" if math.isinf(threshold) else f", and {end.format(f'{threshold:.4g}')}"
    met = " (met)" if is_met else ""
    return RuleDistance(
        rule.name, value, None if math.isinf(threshold) else threshold, is_met, f"{what} is {value:.3g}{limit}{met}"
    )


_CRITERIA = {  # what is compared, and what happens beyond the threshold
    "superiority": ("the largest probability that an arm {compared}", "{} or more stops"),
    "inferiority": ("the smallest probability that an arm {compared}", "less than {} drops the arm"),
    "equivalence": ("the probability that arms differ by less than {delta:g}", "{} or more stops"),
    "futility": ("the largest probability that an arm gains less than {delta:g}", "{} or more drops the arm"),
    "expected_loss": ("the expected loss of the best choice", "{} or less stops"),
}


def take_look(experiment: Experiment, design: Design) -> LookVerdict:
    """Take the look that is due, record it, and return its verdict; without one that is due, return the last.

    A look is due as soon as its number of decisions is reached, and decisions are refused until it is taken. If a slate passed
    several, only the last of them is taken. The last look of a design with `max_rows` waits until no reward is pending.
    """

    def num_pending() -> int:
        return experiment.store.num_pending(experiment.name)

    before = experiment.projection.look
    projection = experiment.record_look(lambda latest: _look_body(latest, design, num_pending()))
    return _verdict(projection, design, projection.look is not before, num_pending())


def _look_body(projection: Projection, design: Design, num_pending: int) -> dict[str, Any] | None:
    """Return the event of the look that is due; None if none is."""
    index = due_look(projection, design)
    if index is None or (index == design.num_looks - 1 and design.max_rows is not None and num_pending):
        return None
    found, allocation = _check(projection, design, index)
    return {
        "look": index,
        "num_decisions": int(projection.num_played.sum()),
        "num_rewards": len(projection.history),
        "num_pending": num_pending,
        "ending": endings(design)[int(found.ending)],
        "arm": int(found.arm),
        "active": np.asarray(found.active).tolist(),
        "dropped": np.flatnonzero(~found.active & ~_is_retired(projection)).tolist(),
        "control": int(found.control),
        "best_arm_probs": np.asarray(found.best_arm_probs).tolist(),
        "evidence": dict(zip((rule.name for rule in design.rules), np.asarray(found.evidence).tolist(), strict=True)),
        "allocation": allocation,
    }


def prepare_look(projection: Projection, design: Design) -> None:
    """Compile what a look needs, and record nothing."""
    _check(projection, design, 0)


def look_difference(projection: Projection, design: Design, recorded: Mapping[str, Any]) -> str:
    """Take a recorded look again, at the projection before it; return the difference in words, empty if there is none."""
    found, _ = _check(projection, design, recorded["look"])
    ending = endings(design)[int(found.ending)]
    if ending != recorded["ending"]:
        return f"the recorded verdict is {recorded['ending']!r}, the replayed one is {ending!r}"
    if np.asarray(found.active).tolist() != recorded["active"]:
        return "the recorded and the replayed look drop different arms"
    return ""


def _check(projection: Projection, design: Design, index: int) -> tuple[Look, list[float] | None]:
    """Apply the design at one look: the verdict, and the allocation until the next."""
    task, learner, last = projection.task, projection.learner, projection.look
    names = task.arms.names
    first = design.control_index(names)
    control = (NO_ARM if first is None else first) if last is None else last["control"]
    active = ~_is_retired(projection)
    with jax.enable_x64(True):
        key = jr.fold_in(jr.fold_in(jr.key(task.seed), _LOOK_SEED), index)
        check = _compiled_check(_ById(learner.engine), _ById(design), task.model, first, task.num_samples)
        num = projection.num_played.sum()
        found, probs = jax.device_get(check(key, learner.state, np.int64(index), active, np.int64(control), num))
    if not np.all(np.isfinite(found.best_arm_probs)):
        raise ValueError("the expected rewards are not finite at this posterior, so the look has no verdict")
    return found, None if probs is None or found.ending != CONTINUE else probs.tolist()


def _is_retired(projection: Projection) -> np.ndarray:
    return np.isin(np.arange(len(projection.task.arms)), list(projection.retired))


class _ById:
    """A value as a key of a cache: equal to itself alone. An engine and a design hold mappings, which have no hash."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.value is self.value


@functools.lru_cache(maxsize=32)
def _compiled_check(
    own_engine: _ById, own_design: _ById, model: RewardModel, first_control: int | None, num_samples: int
) -> Callable[..., tuple[Look, Any]]:
    engine, design = own_engine.value, own_design.value

    own_control = NO_ARM if first_control is None else first_control
    setting = Setting(model, engine, design, own_control, num_samples)

    def check(key: Any, state: Any, index: Any, active: Any, control: Any, num: Any) -> Any:
        posterior = setting.posterior(key, state, design.deltas)
        present = None if first_control is None else control
        found = check_look(design, index, posterior, active, present, first_control=first_control)
        if design.allocation == "each":
            return found, None
        return found, setting.allocation(jr.fold_in(key, 2), state, found.active, found.best_arm_probs, num)

    return jax.jit(check)


def _verdict(projection: Projection, design: Design, is_due: bool, num_pending: int) -> LookVerdict:
    names, look = projection.task.arms.names, projection.look
    num_decisions = int(projection.num_played.sum())
    if look is None:
        first, control = design.look_rows[0], design.control_index(names)
        words = f"No look is due: the first takes place at {first} decisions, and {num_decisions} were made."
        own = None if control is None else names[control]
        counts = num_decisions, len(projection.history), num_pending
        goes_on = ENDINGS[CONTINUE]
        return LookVerdict(0, False, goes_on, None, [], list(names), own, {}, {}, None, *counts, first, words)
    is_stop = look["ending"] != ENDINGS[CONTINUE]
    later = [rows for rows in design.look_rows if rows > num_decisions]
    found = LookVerdict(
        look=look["look"] + 1,
        is_due=is_due,
        ending=look["ending"],
        arm=names[look["arm"]] if is_stop else None,
        dropped=[names[index] for index in look["dropped"]],
        active=[name for name, is_active in zip(names, look["active"], strict=True) if is_active],
        control=None if look["control"] == NO_ARM else names[look["control"]],
        best_arm_probs=dict(zip(names, look["best_arm_probs"], strict=True)),
        evidence=dict(look["evidence"]),
        allocation=None if look["allocation"] is None else dict(zip(names, look["allocation"], strict=True)),
        num_decisions=look["num_decisions"],
        num_rewards=look["num_rewards"],
        num_pending=look["num_pending"],
        next_look=None if is_stop else next(iter(later), design.last_rows),
        verdict="",
    )
    return replace(found, verdict=printable(_words(found, design, num_pending)))


_REASONS = {
    "superiority": "{arm} is superior",
    "equivalence": "the arms are equivalent; {arm} leads",
    "futility": "no arm is likely to reach the gain that matters; {arm} remains",
    "expected_loss": "the expected loss of choosing {arm} now is below the bound",
    "undecided": "the last look is reached without a decision; {arm} leads",
}


def _words(found: LookVerdict, design: Design, num_pending: int) -> str:
    lines = []
    at = f"look {found.look} of {design.num_looks} ({found.num_decisions} decisions, {found.num_rewards} rewards)"
    if found.is_stop:
        other = "the rule " + found.ending.replace("_", " ") + " is met; {arm} leads"
        reason = _REASONS.get(found.ending, other).format(arm=shown_name(found.arm))
        lines.append(f"Stop at {at}: {reason}.")
    else:
        lines.append(f"Continue after {at}; the next look is at {found.next_look} decisions.")
        if not found.is_due and found.next_look == design.last_rows and num_pending and design.max_rows is not None:
            lines.append(f"The last look waits for {num_pending} pending rewards: report, discard or expire them.")
    if found.dropped:
        lines.append(f"Dropped: {', '.join(str(shown_name(arm)) for arm in found.dropped)}.")
    probs = ", ".join(
        f"{shown_name(arm)} {prob:.4g}" for arm, prob in found.best_arm_probs.items() if arm in found.active
    )
    lines.append(f"P(best): {probs}.")
    rules = {rule.name: rule for rule in design.rules}
    for name, value in found.evidence.items():
        threshold = float(rules[name].thresholds(design.num_looks)[found.look - 1])
        words = _distance(rules[name], value, threshold, design.control is not None).words
        lines.append(f"{words[0].upper()}{words[1:]}.")
    if found.allocation is not None and not found.is_stop:
        shares = ", ".join(f"{shown_name(arm)} {prob:.3f}" for arm, prob in found.allocation.items() if prob)
        lines.append(f"Allocation until the next look: {shares}.")
    return "\n".join(lines)
