"""How time passes in an engine of a program whose latents move.

Every learnt row is one step, in the order in which rows are learnt. Without a clock a step takes one unit of time. With a
clock, `context["time"]`, it takes the time since the latest row so far; a row from before it is learnt at that latest time.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ppl_bandit.program.model.reward_model import RewardModel


class Clock(NamedTuple):
    """The time of a state.

    Attributes:
        time: that of the latest row so far; 0 without a clock.
        is_due: whether the latents must take a step before they are read again: true once a row was learnt.
    """

    time: Float[Array, ""]
    is_due: Bool[Array, ""]

    def after_row(self) -> "Clock":
        """Return the clock once a row of this time was learnt."""
        return self._replace(is_due=jnp.ones_like(self.is_due))


def first_clock() -> Clock:
    """Return the clock before the first row."""
    return Clock(jnp.zeros(()), jnp.array(False))


def elapsed_until(
    model: RewardModel, clock: Clock, context: Any, shortest: float = 0.0
) -> tuple[Float[Array, ""], Clock]:
    """Return the time from a state to a decision or a row, 0 for no step, and the clock then.

    Args:
        context: of the decision or row; None reads the next step, and with a clock the latest time.
        shortest: up to this time, a clock stands still; a later step takes that time too.
    """
    if not model.has_clock:
        return jnp.where(clock.is_due, 1.0, 0.0), clock._replace(is_due=jnp.zeros_like(clock.is_due))
    given = clock.time if context is None else jnp.asarray(context["time"], clock.time.dtype)
    time = jnp.where(clock.is_due & (given - clock.time <= shortest), clock.time, given)
    return jnp.where(clock.is_due, time - clock.time, 0.0), Clock(time, jnp.zeros_like(clock.is_due))


def time_text(model: RewardModel) -> str:
    """Return how time passes in a program, for an explanation."""
    step = 'context["time"] is the time of a step' if model.has_clock else "every learnt reward is one step"
    return f"{step}; a decision predicts to its own time, then reads the table"


def require_moving(model: RewardModel, engine: str) -> None:
    """Check that a latent of a program moves.

    Raises:
        ValueError: if none does.
    """
    if not model.moving_sites:
        raise ValueError(
            f"{engine} is for programs whose latents move, and this one does not take the keyword `previous`: use "
            "engines.choose"
        )
