"""The simulated world: a program with its latents fixed to the truth."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.program import RewardModel
from ppl_bandit.types import Key

__all__ = ["Environment"]


class Environment:
    """A world that answers plays with rewards.

    The world may be another program than the one that a bandit believes in; it must have the same arms, and the same
    outcomes and contexts as far as the bandit sees them.

    Args:
        reward_model: the program of the world.
        truth: {latent site: value}, all of its latents.
        contexts: key -> one context, for a program that takes one; None repeats the program's example context.
    """

    def __init__(
        self, reward_model: RewardModel, truth: Mapping[str, Any], contexts: Callable[[Key], Any] | None = None
    ):
        expected = reward_model.latent_shapes
        if set(truth) != set(expected):
            raise ValueError(
                f"truth has the sites {sorted(truth)}, expected {sorted(expected)}: all latents and no others"
            )
        for name, value in truth.items():
            if np.shape(value) != expected[name]:
                raise ValueError(f"truth[{name!r}] has shape {np.shape(value)}, expected {expected[name]}")
        if contexts is not None and reward_model.context is None:
            raise ValueError("contexts was given, but the program takes arm alone: leave it out")
        self.reward_model = reward_model
        self.truth = {name: np.asarray(value) for name, value in truth.items()}
        self._contexts = contexts

    def draw_context(self, key: Key) -> Any:
        """Draw the context of the next decision; None for a program without."""
        if self.reward_model.context is None:
            return None
        return self.reward_model.context if self._contexts is None else self._contexts(key)

    def draw_reward(self, key: Key, arm: Int[Array, ""], context: Any) -> Any:
        """Draw the outcomes of playing an arm."""
        return self.reward_model.draw_reward(key, self._latents(), arm, context)

    def expected_rewards(self, context: Any) -> Float[Array, " A"]:
        """Return the true expected reward of every arm."""
        draws = {name: value[None] for name, value in self._latents().items()}
        return self.reward_model.expected_rewards(draws, context)[0]

    def _latents(self) -> dict[str, Array]:
        return {name: jnp.asarray(value) for name, value in self.truth.items()}
