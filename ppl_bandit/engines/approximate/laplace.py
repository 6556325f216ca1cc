"""Laplace's approximation: a Gaussian at the posterior mode, in unconstrained space."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from ppl_bandit.engines.approximate.block_posterior import block_posterior
from ppl_bandit.engines.approximate.blocks import one_block
from ppl_bandit.engines.approximate.fit_checks import FIT_CHECKS_TEXT, NUM_CHECK_DRAWS, measure_fit
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.checks import Info
from ppl_bandit.engines.explanation import explain_approximate
from ppl_bandit.engines.particles.log_density import LogDensity, find_mode
from ppl_bandit.engines.row_buffer import Buffer, append_rows, empty_buffer, reserve, rows_that_fit
from ppl_bandit.engines.settings import check_settings, refuse_moving
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key


class LaplaceState(NamedTuple):
    """The data, and the Gaussian at the mode: position = mode + root @ noise."""

    buffer: Buffer
    mode: Float[Array, " K"]
    root: Float[Array, "K K"]


def laplace(model: RewardModel, *, capacity: int = 64, discount: float = 1.0) -> Engine:
    """Return the engine that approximates the posterior by a Gaussian at its mode, in unconstrained space.

    It is fast, and correct in the limit of many rows; before that, skewness and tails are lost. k-hat measures the loss.

    Args:
        capacity: rows of data that the first state has room for.
        discount: weight of a row's log likelihood relative to the next row's; 1 discounts nothing.
    """
    check_settings(discount, capacity=capacity)
    refuse_moving(model, "laplace")
    space = unconstrained_space(model)
    blocks = one_block(model, space)

    def posterior_of(buffer: Buffer) -> LogDensity:
        return block_posterior(space, blocks, 0, buffer, jnp.zeros(space.size), discount)

    def init(key: Key) -> LaplaceState:
        del key  # the mode of the prior is not random
        buffer = empty_buffer(model, capacity)
        mode = find_mode(posterior_of(buffer), jnp.zeros(space.size))
        return LaplaceState(buffer, mode.position, mode.root)

    def update(key: Key, state: LaplaceState, interaction: Interaction) -> tuple[LaplaceState, Info]:
        rows, has_room = rows_that_fit(state.buffer, interaction)
        buffer = append_rows(model, state.buffer, rows, merges=discount == 1.0)
        target = posterior_of(buffer)
        mode = find_mode(target, state.mode)
        noise = jr.normal(key, (NUM_CHECK_DRAWS, space.size))
        positions = mode.position + noise @ mode.root.T
        log_weights = sum(jax.vmap(target.parts)(positions)) + 0.5 * jnp.sum(jnp.square(noise), axis=1)
        measures = measure_fit(positions, log_weights)
        return LaplaceState(buffer, mode.position, mode.root), measures.as_info(has_room, mode=mode.is_converged)

    def sample(key: Key, state: LaplaceState, num_samples: int) -> Draws:
        noise = jr.normal(key, (num_samples, space.size))
        return jax.vmap(space.constrain)(state.mode + noise @ state.root.T)

    explanation = explain_approximate(
        model,
        "laplace",
        "draws come from a Gaussian at the posterior's mode, in unconstrained space",
        "Gaussian after mapping to the reals",
        discount,
        {
            "approximated": "the form of the posterior; skewness and heavy tails are lost, and all modes but one",
            "checks": f"convergence, {FIT_CHECKS_TEXT}",
        },
    )
    settings = {"capacity": capacity, "discount": discount}
    capabilities = Capabilities(reserve=reserve)
    return Engine(init, update, sample, explanation, settings, capabilities)
