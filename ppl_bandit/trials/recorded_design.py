"""A design as JSON values, for the journal and for files."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ppl_bandit.journal.identity import selector_from, to_json
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.stopping import StoppingRule

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
