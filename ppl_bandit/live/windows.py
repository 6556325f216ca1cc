"""How long the decision of a unit stands, and how long a reward may take."""

from typing import Any

from ppl_bandit.inputs.checks import check_rewards
from ppl_bandit.inputs.numbers import as_seconds
from ppl_bandit.posterior.task import Windows
from ppl_bandit.program.model.reward_model import RewardModel


def check_windows(
    model: RewardModel, late: tuple[str, ...], unit_window: Any, reward_window: Any, default_reward: Any
) -> Windows:
    """Return the windows of a bandit; the arguments are its arguments.

    Raises:
        ValueError: for a window of zero, or a default reward that is never used or cannot be one.
    """
    default = None
    if default_reward is not None:
        if reward_window is None:
            raise ValueError(
                "default_reward was given without reward_window: give the time after which it is the reward"
            )
        if late:
            raise ValueError(
                f"default_reward was given, but late={list(late)} come with each reward: call expire(older_than, reward, "
                "context={...}) instead"
            )
        checked = check_rewards(model, default_reward, None, "default_reward")
        default = {name: float(values[0]) for name, values in checked.items()}
    return Windows(_window(unit_window, "unit_window"), _window(reward_window, "reward_window"), default)


def _window(span: Any, argument: str) -> float | None:
    seconds = None if span is None else as_seconds(span, argument)
    if seconds == 0:
        raise ValueError(f"{argument} is 0, expected a time of more than 0 seconds: leave it out for no limit")
    return seconds
