"""The design of an experiment: when to look, when to stop, and how decisions are allocated between looks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.inputs.numbers import as_plain_numbers, check_count
from ppl_bandit.journal.identity import selector_from, to_json
from ppl_bandit.selectors.constraints import fixed
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.trials.stopping import StoppingRule
from ppl_bandit.types import Selector


@dataclass(frozen=True)
class Design:
    """When to look at an experiment, when to stop it, and how its decisions are allocated.

    Args:
        looks: increasing numbers of decisions at which to look.
        selector: chooses the arms; None is `selectors.fixed()`, equal shares. `selectors.with_limits`, `with_control` and
            `softened` keep floors, caps, a control's share, and probabilities near equality.
        stopping: a stopping rule or several; without one the experiment runs to the last look.
        control: index or name of the control arm; None compares all arms with each other.
        allocation: "each": the selector decides each time, from all outcomes known then. "looks": its probabilities are
            computed at each look and stay fixed until the next (response-adaptive randomisation in blocks).
        lag: number of the last decisions whose outcomes are not known at a look; or probabilities of delays of 0, 1, 2, ...
            decisions.
        burn_in: decisions at the start that are shared equally among all arms; the first look comes later. With allocation
            "looks" any burn-in makes the whole first block equal, up to the first look.
        max_rows: number of decisions after which there are no more. If it is given, a last look takes place when all of
            their outcomes are known. None ends at the last of `looks`.
        calibration: how `calibrate` found a threshold; None for a design that it did not make.

    Raises:
        ValueError: says which argument is wrong, and what to give instead.
    """

    looks: Sequence[int]
    selector: Selector = field(default=None, kw_only=True)  # type: ignore[assignment]
    stopping: Sequence[StoppingRule] | StoppingRule = field(default=(), kw_only=True)
    control: int | str | None = field(default=None, kw_only=True)
    allocation: str = field(default="each", kw_only=True)
    lag: int | Sequence[float] = field(default=0, kw_only=True)
    burn_in: int = field(default=0, kw_only=True)
    max_rows: int | None = field(default=None, kw_only=True)
    calibration: Mapping[str, Any] | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check all arguments, and store them in plain form."""
        looks = _check_looks(self.looks)
        rules = tuple(self.stopping) if isinstance(self.stopping, Sequence) else (self.stopping,)
        burn_in = check_count(self.burn_in, "burn_in", 0)
        if looks[0] <= burn_in:
            raise ValueError(f"looks begins at {looks[0]}, within the burn-in of {burn_in} decisions: look later")
        max_rows = None if self.max_rows is None else check_count(self.max_rows, "max_rows")
        if max_rows is not None and max_rows < looks[-1]:
            raise ValueError(
                f"max_rows is {max_rows}, but the last look comes at {looks[-1]} decisions: make it at least that"
            )
        if self.allocation not in ("each", "looks"):
            raise ValueError(
                f'allocation must be "each" (the selector decides each time) or "looks" (probabilities stay between looks), '
                f"got {self.allocation!r}"
            )
        stored = {
            "looks": looks,
            "selector": fixed() if self.selector is None else as_selector(self.selector),
            "stopping": rules,
            "lag": _check_lag(self.lag, looks),
            "burn_in": burn_in,
            "max_rows": max_rows,
        }
        for name, value in stored.items():
            object.__setattr__(self, name, value)
        if self.calibration is not None and not isinstance(self.calibration, Mapping):
            raise ValueError(f"calibration must be a mapping, as calibrate makes it, or None, got {self.calibration!r}")
        if self.control is not None and (isinstance(self.control, bool) or not isinstance(self.control, int | str)):
            raise ValueError(f"control must be the index or the name of an arm, got {self.control!r}")
        self._check_rules(rules)

    def _check_rules(self, rules: tuple[StoppingRule, ...]) -> None:
        for rule in rules:
            if not isinstance(rule, StoppingRule):
                raise ValueError(f"stopping has {rule!r}, expected rules such as stopping.superiority(0.99)")
            rule.thresholds(self.num_looks)
            if (rule.name == "futility" or "margin" in rule.settings) and self.control is None:
                what = "a margin" if "margin" in rule.settings else "futility"
                raise ValueError(
                    f"{what} compares arms with a control, and the design has none: give control= (--control), or drop it"
                )
        names = [rule.name for rule in rules]
        if len(set(names)) < len(names):
            raise ValueError(f"stopping has the rules {names}: give each rule once; its threshold may change by look")
        found = {rule.name: rule for rule in rules}
        if {"superiority", "inferiority"} <= set(found):
            low, high = (found[name].thresholds(self.num_looks) for name in ("inferiority", "superiority"))
            if np.any(low >= high):
                raise ValueError(f"inferiority's threshold {low.max():g} is not below superiority's {high.min():g}")

    @property
    def rules(self) -> tuple[StoppingRule, ...]:
        """The stopping rules."""
        return tuple(self.stopping)  # type: ignore[arg-type]

    @property
    def look_rows(self) -> tuple[int, ...]:
        """Number of decisions at each look, with the last look at `max_rows` if that is given."""
        return (*self.looks, *(() if self.max_rows is None else (self.max_rows,)))

    @property
    def deltas(self) -> tuple[float, ...]:
        """The differences of expected rewards that the stopping rules ask about."""
        own = [rule.settings for rule in self.rules if rule.name in ("equivalence", "futility")]
        return (*(float(settings["delta"]) for settings in own), *((self.margin,) if self.margin else ()))

    @property
    def margin(self) -> float:
        """The non-inferiority margin of the superiority rule; 0 without one."""
        rule = self.rule("superiority")
        return 0.0 if rule is None else float(rule.settings.get("margin", 0.0))

    @property
    def num_looks(self) -> int:
        """Number of looks."""
        return len(self.look_rows)

    @property
    def last_rows(self) -> int:
        """Number of decisions of an experiment that does not stop early."""
        return self.look_rows[-1]

    def rule(self, name: str) -> StoppingRule | None:
        """Return the stopping rule of a name; None if the design has none."""
        return next((rule for rule in self.rules if rule.name == name), None)

    def thresholds(self) -> np.ndarray:
        """Return the threshold of each rule at each look, (rules, looks)."""
        rules = [rule.thresholds(self.num_looks) for rule in self.rules]
        return np.stack(rules) if rules else np.zeros((0, self.num_looks))

    def with_threshold(self, name: str, threshold: float | Sequence[float]) -> "Design":
        """Return the design with another threshold of one rule."""
        rules = [rule.with_threshold(threshold) if rule.name == name else rule for rule in self.rules]
        return replace(self, stopping=rules, calibration=None)

    def control_index(self, arms: Sequence[Any]) -> int | None:
        """Return the index of the control among arms.

        Args:
            arms: names of the arms, or their numbers.

        Raises:
            ValueError: if the control is no arm.
        """
        if self.control is None:
            return None
        names = list(arms)
        if self.control in names:
            return names.index(self.control)
        if isinstance(self.control, int) and 0 <= self.control < len(names):
            return self.control
        raise ValueError(f"control is {self.control!r}, which is no arm; the arms are {names}")

    def describe(self) -> str:
        """Return the design in words, for a protocol: looks and allocation, and one line per stopping rule."""
        looks = self.looks
        steps = np.diff(looks)
        if len(looks) > 3 and np.all(steps == steps[0]):
            when = f"{looks[0]}, {looks[1]}, ..., {looks[-1]} decisions ({len(looks)} looks, every {steps[0]})"
        else:
            when = f"{', '.join(map(str, looks))} decisions"
        lines = [f"Looks: at {when}."]
        if self.max_rows is not None:
            lines.append(f"The last look takes place after {self.max_rows} decisions, when all outcomes are known.")
        if isinstance(self.lag, tuple):
            mean = sum(delay * prob for delay, prob in enumerate(self.lag))
            lines.append(f"Outcomes arrive late, after {mean:.3g} further decisions on average.")
        elif self.lag:
            lines.append(f"At a look, the outcomes of the last {self.lag} decisions are not known.")
        if self.burn_in:
            num_equal = self.burn_in if self.allocation == "each" else self.looks[0]
            lines.append(f"The first {num_equal} decisions are shared equally among all arms.")
        lines.append(_allocation_words(self))
        lines.append(
            "Control: none; all arms are compared with each other."
            if self.control is None
            else f"Control: {shown_name(self.control)}."
        )
        rules = [rule.describe() for rule in self.rules]
        lines += rules or ["No stopping rule: the experiment runs to the last look."]
        if self.calibration is not None:
            lines.append(_calibration_words(self.calibration))
        return printable("\n".join(lines))

    def __str__(self) -> str:
        return self.describe()


def _calibration_words(found: Mapping[str, Any]) -> str:
    return (
        f"The threshold of {found['rule']} was calibrated to a type I error of {found['target']:g} under {found['null']} with "
        f"{found['num_trials']} simulated trials; on as many fresh ones it is {found['type_i_error']:.4f} +- "
        f"{found['type_i_error_se']:.4f}."
    )


def selector_words(selector: Selector) -> str:
    """Return how a selector allocates decisions: shares of one that does not adapt, the call of another."""
    if selector.name != "fixed":
        return str(selector)
    probs = selector.settings["probs"]
    return "equal shares" if probs is None else f"shares {', '.join(f'{prob:.3g}' for prob in probs)}"


def _allocation_words(design: Design) -> str:
    words, is_fixed = selector_words(design.selector), design.selector.name == "fixed"
    if design.allocation == "each":
        return f"Allocation: {words}{'' if is_fixed else ' decides each time'}."
    return f"Allocation: {words}{'' if is_fixed else ', with probabilities that are fixed between looks'}."


def _check_looks(looks: Any) -> tuple[int, ...]:
    given = [looks] if isinstance(looks, int | np.integer) else looks
    try:
        if isinstance(given, set | frozenset | Mapping | str | bytes):
            raise TypeError("looks have an order")
        found = tuple(check_count(look, f"looks[{index}]") for index, look in enumerate(given))
    except TypeError:
        raise ValueError(
            f"looks must be a sequence of numbers of decisions, such as range(100, 1001, 100), got {looks!r}"
        ) from None
    if not found:
        raise ValueError("looks is empty: give at least one number of decisions, the last one being the end")
    for index in range(1, len(found)):
        if found[index] <= found[index - 1]:
            raise ValueError(
                f"looks must increase, but looks[{index}] is {found[index]} after {found[index - 1]}: give numbers "
                "of decisions since the start, not since the last look"
            )
    return found


def _check_lag(lag: Any, looks: tuple[int, ...]) -> int | tuple[float, ...]:
    if isinstance(lag, int | np.integer) and not isinstance(lag, bool):
        found = check_count(lag, "lag", 0)
        if found >= looks[0]:
            raise ValueError(
                f"lag is {found}, but the first look comes at {looks[0]} decisions: no outcome would be known then"
            )
        return found
    try:
        probs = as_plain_numbers(lag, "lag")
    except ValueError:
        probs = np.zeros(0)
    if probs.ndim != 1 or probs.size == 0 or not np.all(probs >= 0.0) or not 0.0 < probs.sum() <= 1.0 + 1e-9:
        raise ValueError(
            "lag must be a number of decisions, or the probabilities of delays of 0, 1, 2, ... decisions that add up to "
            f"at most 1, got {lag!r}"
        )
    return tuple(probs.tolist())


# How a threshold was found is no part of the design.
_ARGUMENTS = [field.name for field in fields(Design) if field.name != "calibration"]


def design_settings(design: Design) -> dict[str, Any]:
    """Return a design as JSON values, by the names of its arguments."""
    values = {name: to_json(getattr(design, name)) for name in _ARGUMENTS}
    return values | {"stopping": [_rule_settings(rule) for rule in design.rules]}


def design_from_settings(settings: Mapping[str, Any]) -> Design:
    """Return the design that `design_settings` describes.

    Raises:
        ValueError: if it is not a design, or names a selector or a rule that is not part of this library.
    """
    unknown = set(settings) - set(_ARGUMENTS)
    if unknown or "looks" not in settings:
        raise ValueError(f"a design has the arguments of Design, looks among them; got {sorted(settings)}")
    rules = []
    for rule in settings.get("stopping", ()):
        if "function" in rule["settings"]:
            raise ValueError(
                f"the stopping rule {rule['name']!r} is a function, which the journal does not hold: build "
                "Bandit(..., design=) with it in Python"
            )
        threshold = tuple(rule["threshold"]) if isinstance(rule["threshold"], list) else rule["threshold"]
        rules.append(StoppingRule(rule["name"], threshold, dict(rule["settings"])))
    selector = settings.get("selector")
    others = {name: value for name, value in settings.items() if name not in ("looks", "selector", "stopping")}
    if selector is not None:
        others["selector"] = selector_from(selector)
    return Design(settings["looks"], stopping=rules, **others)


def _rule_settings(rule: StoppingRule) -> dict[str, Any]:
    return {"name": rule.name, "threshold": to_json(rule.threshold), "settings": to_json(rule.settings)}
