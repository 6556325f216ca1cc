"""Stopping rules of an experiment: values that say when a look ends it, or drops an arm.

Every rule reads the posterior of the arms' expected rewards theta and nothing else, so that it works with every engine. Here a
rule is only described; `looks.check_look` applies all rules of a design in a fixed order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppl_bandit.arguments import check_flag
from ppl_bandit.inputs.numbers import as_plain_numbers

__all__ = [
    "StoppingRule",
    "equivalence",
    "expected_loss",
    "futility",
    "inferiority",
    "precision",
    "predictive_success",
    "superiority",
    "value_remaining",
]


@dataclass(frozen=True)
class StoppingRule:
    """A stopping rule.

    Attributes:
        name: name of the factory; the ending of an experiment that the rule stops has the same name.
        threshold: what the criterion is compared with: one number, or one per look.
        settings: the other arguments of the factory by name.
    """

    name: str
    threshold: float | tuple[float, ...]
    settings: Mapping[str, Any]

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
        return _FACTORIES[self.name](threshold, **self.settings)

    def describe(self) -> str:
        """Return the rule as a sentence of a protocol."""
        at, own = _words(self.threshold), self.settings
        by_look = " at the respective look" if isinstance(self.threshold, tuple) else ""
        if self.name in _DESCRIPTIONS:
            return _DESCRIPTIONS[self.name].format(at=at, by_look=by_look, **own)
        ends = []
        if self.threshold != np.inf:
            ends.append(f"at least {at}{by_look} (stop for predicted success)")
        if own["below"] is not None:
            ends.append(f"at most {own['below']:g} (stop for futility)")
        return (
            f"Predictive probability of success: the probability that superiority at {own['success']:g} holds at {own['at']} "
            f"decisions is {' or '.join(ends)}."
        )

    def __str__(self) -> str:
        """Return the call of the factory, such as `equivalence(0.9, delta=0.05)`."""
        others = "".join(f", {name}={value!r}" for name, value in self.settings.items() if value is not None)
        return f"{self.name}({_words(self.threshold)}{others})"


def superiority(p: float | Sequence[float]) -> StoppingRule:
    """Stop when an arm is best with probability at least p; with a control, when an arm beats the control so.

    With a control, the winner becomes the control, the old one is dropped, and all rules are checked again; the experiment ends
    when one arm is left.

    Args:
        p: a probability, such as 0.99, or one per look.
    """
    return StoppingRule("superiority", _probability(p, "superiority", "p"), {})


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


def value_remaining(below: float | Sequence[float] = 0.01, quantile: float = 0.95) -> StoppingRule:
    """Stop when the quantile of (max theta - theta_leader) / abs(theta_leader) is at most `below`.

    Args:
        below: a share of the leader's expected reward, .01 for one percent, or one per look.
        quantile: its order, strictly inside (0, 1).
    """
    order = _probability(quantile, "value_remaining", "quantile", is_single=True)
    return StoppingRule("value_remaining", _positive(below, "value_remaining", "below"), {"quantile": order})


def precision(width: float | Sequence[float], *, level: float = 0.95) -> StoppingRule:
    """Stop when the credible intervals of all arms left are at most `width` wide.

    Args:
        width: in the unit of the reward, or one per look.
        level: probability of an interval.
    """
    order = _probability(level, "precision", "level", is_single=True)
    return StoppingRule("precision", _positive(width, "precision", "width"), {"level": order})


def predictive_success(
    p: float | Sequence[float] | None, at: int, *, success: float = 0.975, below: float | None = None
) -> StoppingRule:
    """Stop when the predictive probability that superiority holds at `at` decisions is at least p, or at most `below`.

    The rest of the experiment is simulated from the posterior, with the present allocation (equal shares where a selector
    decides each time). An experiment that stops because the probability is at most `below` ends with futility.

    Args:
        p: a probability, or one per look; None never stops for predicted success.
        at: number of decisions after which success is judged, when all their outcomes are known.
        success: success is an arm that is best, or beats the control, with at least this probability.
        below: a small probability; None never stops for predicted failure.
    """
    if p is None and below is None:
        raise ValueError("predictive_success has neither p nor below: give at least one of them")
    if isinstance(at, bool) or not isinstance(at, int | np.integer) or at < 1:
        raise ValueError(f"predictive_success: at must be a number of decisions, got {at!r}")
    settings = {
        "at": int(at),
        "success": _probability(success, "predictive_success", "success", is_single=True),
        "below": None if below is None else _probability(below, "predictive_success", "below", is_single=True),
    }
    # A probability is never above 1: this threshold is never reached.
    threshold = np.inf if p is None else _probability(p, "predictive_success", "p")
    if below is not None and np.min(threshold) <= below:
        raise ValueError(f"predictive_success: below is {below:g}, and must be less than p, {np.min(threshold):g}")
    return StoppingRule("predictive_success", threshold, settings)


_FACTORIES: dict[str, Callable[..., StoppingRule]] = {
    rule.__name__: rule
    for rule in (
        superiority,
        inferiority,
        equivalence,
        futility,
        expected_loss,
        value_remaining,
        precision,
        predictive_success,
    )
}


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


_DESCRIPTIONS = {
    "superiority": "Superiority: an arm is best (or better than the control) with probability at least {at}{by_look}.",
    "inferiority": "Inferiority: an arm that is best (or better than the control) with probability below "
    "{at}{by_look} is dropped.",
    "equivalence": "Equivalence: the arms differ by less than {delta:g} with probability at least {at}{by_look}.",
    "futility": "Futility: an arm that exceeds the control by less than {delta:g} with probability at least "
    "{at}{by_look} is dropped.",
    "expected_loss": "Expected loss: the expected loss of the chosen arm is at most {at}{by_look}.",
    "value_remaining": "Value remaining: with probability {quantile:g}, the best arm exceeds the leader by at most {at} of its "
    "expected reward{by_look}.",
    "precision": "Precision: the {level:.0%} credible intervals of all arms are at most {at} wide{by_look}.",
}
