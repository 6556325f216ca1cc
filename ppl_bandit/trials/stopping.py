"""Stopping rules of an experiment: values that say when a look ends it, or drops an arm; and rules that a user writes.

Every rule reads the posterior of the arms' expected rewards theta and nothing else, so that it works with every engine. Here a
rule is only described; `looks.check_look` applies all rules of a design in a fixed order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bandit.inputs.numbers import as_plain_numbers
from ppl_bandit.program.fingerprints import function_fingerprint
from ppl_bandit.types import check_flag

__all__ = [
    "StoppingRule",
    "equivalence",
    "expected_loss",
    "futility",
    "inferiority",
    "rule",
    "superiority",
]


@dataclass(frozen=True)
class StoppingRule:
    """A stopping rule.

    Attributes:
        name: name of the factory; the ending of an experiment that the rule stops has the same name.
        threshold: what the criterion is compared with: one number, or one per look.
        settings: the other arguments of the factory by name.
        function: the criterion of a rule that `rule` made; None for the others.
    """

    name: str
    threshold: float | tuple[float, ...]
    settings: Mapping[str, Any]
    function: Callable[..., Any] | None = None

    def thresholds(self, num_looks: int) -> np.ndarray:
        """Return the threshold of each look.

        Raises:
            ValueError: if there is one threshold per look, and their number is another.
        """
        if isinstance(self.threshold, tuple) and len(self.threshold) != num_looks:
            raise ValueError(
                f"{self.name} has {len(self.threshold)} thresholds for {num_looks} looks: give one for all looks, or one each"
            )
        return np.broadcast_to(np.asarray(self.threshold, float), (num_looks,))

    def with_threshold(self, threshold: float | Sequence[float]) -> "StoppingRule":
        """Return the rule with another threshold, checked as in its factory."""
        if self.function is not None:
            return rule(self.function, self.name, **{self.settings["stops"]: threshold})
        return _FACTORIES[self.name](threshold, **self.settings)

    def describe(self) -> str:
        """Return the rule as a sentence of a protocol."""
        at, own = _words(self.threshold), self.settings
        by_look = " at the respective look" if isinstance(self.threshold, tuple) else ""
        if self.function is not None:
            return f"{self.name.replace('_', ' ').capitalize()}: {own['stops'].replace('_', ' ')} {at}{by_look}."
        if "margin" in own:
            return _NON_INFERIORITY.format(at=at, by_look=by_look, **own)
        return _DESCRIPTIONS[self.name].format(at=at, by_look=by_look, **own)

    def __str__(self) -> str:
        """Return the call of the factory, such as `equivalence(0.9, delta=0.05)`."""
        others = "".join(f", {name}={value!r}" for name, value in self.settings.items() if value is not None)
        return f"{self.name}({_words(self.threshold)}{others})"


def superiority(p: float | Sequence[float], margin: float = 0.0) -> StoppingRule:
    """Stop when an arm is best with probability at least p; with a control, when an arm beats the control so.

    With a control, the winner becomes the control, the old one is dropped, and all rules are checked again; the experiment ends
    when one arm is left.

    Args:
        p: a probability, such as 0.99, or one per look.
        margin: with a control, a non-inferiority margin in the unit of the reward: an arm replaces the first control if its
            expected reward exceeds the control's less the margin with probability p. Inferiority is judged so, too. A later
            control must be beaten.
    """
    own = {} if margin == 0 else {"margin": _positive(margin, "superiority", "margin", is_single=True)}
    return StoppingRule("superiority", _probability(p, "superiority", "p"), own)


def inferiority(p: float | Sequence[float]) -> StoppingRule:
    """Drop an arm that is best with probability below p; with a control, one that beats the control with less than p.

    Without a control the probabilities are computed again after each drop, until no arm is left to drop. The leader stays.

    Args:
        p: a small probability, such as 0.01, or one per look.
    """
    return StoppingRule("inferiority", _probability(p, "inferiority", "p"), {})


def equivalence(p: float | Sequence[float], delta: float, *, only_first: bool = False) -> StoppingRule:
    """Stop when the arms left differ by less than delta, all of them, with probability at least p.

    With a control, each arm within delta of the control with that probability is dropped, and the experiment ends when
    only the control is left.

    Args:
        p: a probability, or one per look.
        delta: a difference of expected rewards that does not matter, in the unit of the reward: .05 is five percentage points.
        only_first: with a control, whether arms are compared with the first control only.
    """
    settings = {
        "delta": _positive(delta, "equivalence", "delta", is_single=True),
        "only_first": check_flag(only_first, "only_first"),
    }
    return StoppingRule("equivalence", _probability(p, "equivalence", "p"), settings)


def futility(p: float | Sequence[float], delta: float, *, only_first: bool = False) -> StoppingRule:
    """Drop an arm that exceeds the control by less than delta with probability at least p; needs a control.

    The experiment ends when only the control is left.

    Args:
        p: a probability, or one per look.
        delta: the smallest gain that matters, in the unit of the reward; 0 or more.
        only_first: whether arms are compared with the first control only.
    """
    if delta != 0:
        _positive(delta, "futility", "delta", is_single=True)
    settings = {"delta": float(delta), "only_first": check_flag(only_first, "only_first")}
    return StoppingRule("futility", _probability(p, "futility", "p"), settings)


def expected_loss(below: float | Sequence[float]) -> StoppingRule:
    """Stop when the arm with the least expected loss E[max theta - theta_a] loses at most `below`.

    Args:
        below: in the unit of the reward, or one per look.
    """
    return StoppingRule("expected_loss", _positive(below, "expected_loss", "below"), {})


def rule(
    function: Callable[[Any], Any],
    name: str,
    *,
    at_least: float | Sequence[float] | None = None,
    at_most: float | Sequence[float] | None = None,
) -> StoppingRule:
    """Stop when a function of the posterior at a look is at least, or at most, a threshold.

    Args:
        function: (look) -> number, with `look.posterior` (a `trials.arm_posterior.ArmPosterior`), `look.active` (the arms that
            are left, (A,)), `look.leader` (the one most likely best), `look.control` (-1 without one) and `look.num_decisions`.
            It is compiled: write it with `jax.numpy`.
        name: of the rule, and of the ending of an experiment that it stops.
        at_least, at_most: the threshold, or one per look; give one of the two.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
        raise ValueError(f"name must be a new name such as 'precision', other than {', '.join(RESERVED)}, got {name!r}")
    if not callable(function):
        raise ValueError(f"{name}: function must be a function of the look, got {function!r}")
    if (at_least is None) == (at_most is None):
        raise ValueError(f"{name}: give at_least= or at_most=, one of the two")
    stops = "at_most" if at_least is None else "at_least"
    numbers = _numbers(at_most if at_least is None else at_least, name, stops)
    threshold = numbers.tolist() if numbers.ndim == 0 else tuple(numbers.tolist())
    return StoppingRule(name, threshold, {"stops": stops, "function": function_fingerprint(function)}, function)


_FACTORIES: dict[str, Callable[..., StoppingRule]] = {
    own.__name__: own for own in (superiority, inferiority, equivalence, futility, expected_loss)
}
RESERVED = ("continue", *_FACTORIES, "undecided")


def _probability(value: Any, rule: str, argument: str, *, is_single: bool = False) -> Any:
    numbers = _numbers(value, rule, argument)
    if is_single and numbers.ndim:
        raise ValueError(f"{rule}: {argument} must be one probability for all looks, got {value!r}")
    if not np.all((numbers > 0.0) & (numbers < 1.0)):
        hint = f"; {value} percent is {value / 100}" if numbers.ndim == 0 and 1.0 < numbers <= 100.0 else ""
        raise ValueError(f"{rule}: {argument} must be a probability strictly inside (0, 1), got {value!r}{hint}")
    return numbers.tolist() if numbers.ndim == 0 else tuple(numbers.tolist())


def _positive(value: Any, rule: str, argument: str, *, is_single: bool = False) -> Any:
    numbers = _numbers(value, rule, argument)
    if (is_single and numbers.ndim) or not np.all((numbers > 0.0) & (numbers < np.inf)):
        what = "one positive difference of expected rewards" if is_single else "positive"
        raise ValueError(f"{rule}: {argument} must be {what}, in the unit of the reward, got {value!r}")
    return numbers.tolist() if numbers.ndim == 0 else tuple(numbers.tolist())


def _numbers(value: Any, rule: str, argument: str) -> np.ndarray:
    try:
        numbers = as_plain_numbers(value, argument)
    except ValueError:
        numbers = np.zeros((0, 0))
    if numbers.ndim > 1 or numbers.size == 0 or np.any(np.isnan(numbers)):
        raise ValueError(f"{rule}: {argument} must be a number, or one per look, got {value!r}")
    return numbers


def _words(threshold: float | tuple[float, ...]) -> str:
    if isinstance(threshold, tuple):
        return "[" + ", ".join(f"{each:.7g}" for each in threshold) + "]"
    return f"{threshold:.7g}"


_NON_INFERIORITY = (
    "Non-inferiority: an arm is at most {margin:g} worse than the control with probability at least {at}{by_look}; it "
    "replaces the control."
)
_DESCRIPTIONS = {
    "superiority": "Superiority: an arm is best (or better than the control) with probability at least {at}{by_look}.",
    "inferiority": "Inferiority: an arm that is best (or better than the control) with probability below "
    "{at}{by_look} is dropped.",
    "equivalence": "Equivalence: the arms differ by less than {delta:g} with probability at least {at}{by_look}.",
    "futility": "Futility: an arm that exceeds the control by less than {delta:g} with probability at least "
    "{at}{by_look} is dropped.",
    "expected_loss": "Expected loss: the expected loss of the chosen arm is at most {at}{by_look}.",
}
