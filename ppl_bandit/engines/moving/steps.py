"""How time passes in an engine of a program whose latents move.

Every learnt row is one step, in the order in which rows are learnt. Without a clock a step takes one unit of time. With a
clock, `context["time"]`, it takes the time since the latest row so far; a row from before it is learnt at that latest time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, Key

__all__ = ["Clock", "elapsed_until", "first_clock", "learn_in_order", "require_moving"]


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


def learn_in_order(
    learn: Callable[[Key, Any, Interaction], tuple[Any, Any]], key: Key, state: Any, interaction: Interaction
) -> tuple[Any, Any]:
    """Learn rows one after another, and return the state and the measures of the last row; masked rows pass no time.

    Args:
        learn: (key, state, one row without a leading axis) -> (state, info).
    """
    rows, num_rows = jax.tree.map(jnp.asarray, interaction), interaction.arm.shape[0]
    if num_rows == 1 and interaction.mask is None:
        return learn(key, state, jax.tree.map(lambda leaf: leaf[0], rows))
    mask = jnp.ones(num_rows, bool) if interaction.mask is None else rows.mask

    def step(carry: tuple[Any, Any], place: tuple[Array, Array, Interaction]) -> tuple[tuple[Any, Any], None]:
        number, is_counted, row = place
        return jax.lax.cond(is_counted, lambda: learn(jr.fold_in(key, number), carry[0], row), lambda: carry), None

    blank = jax.eval_shape(learn, key, state, jax.tree.map(lambda leaf: leaf[0], rows._replace(mask=None)))[1]
    info = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), blank)
    return jax.lax.scan(step, (state, info), (jnp.arange(num_rows), mask, rows._replace(mask=None)))[0]


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
