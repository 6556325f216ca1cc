"""What engines share: checks of their settings, and the reading of the log evidence from a state."""

from typing import Any

from ppl_bandit.program.model.reward_model import RewardModel


def check_settings(discount: float, **counts: int) -> None:
    """Check the settings of an engine: counts are positive integers, the discount lies in (0, 1].

    Raises:
        ValueError: with what was given, what was expected and what to do instead.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if not 0.0 < discount <= 1.0:
        raise ValueError(
            f"discount must lie in (0, 1], got {discount}; 1 forgets nothing, 0.99 halves a row in 69 rows"
        )


def refuse_moving(model: RewardModel, what: str) -> None:
    """Refuse a program whose latents move.

    Args:
        what: name of the engine that refuses it.

    Raises:
        ValueError: if a latent moves.
    """
    if model.moving_sites:
        raise ValueError(
            f"{what} is for latents that do not move, and this program samples {', '.join(model.moving_sites)} from "
            "`previous`: use engines.choose, engines.kalman or engines.particle_filter"
        )


def stored_evidence(state: Any) -> tuple[float, float]:
    """Return the log evidence that a state holds, and its standard error."""
    return float(state.log_evidence), float(state.log_evidence_error)
