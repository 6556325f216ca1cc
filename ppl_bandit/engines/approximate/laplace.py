"""Laplace's approximation: Newton's method to the mode in unconstrained space, and a Gaussian there."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.block_posterior import block_posterior
from ppl_bandit.engines.approximate.blocks import one_block
from ppl_bandit.engines.approximate.explanation import explain
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.particles.diagnostics import (
    MAX_K_HAT,
    MAX_MEAN_SHIFT,
    MAX_SD_SHIFT,
    moment_shifts,
    pareto_k_hat,
    weight_ess,
)
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.engines.particles.modes import find_mode
from ppl_bandit.engines.row_buffer import Buffer, append_rows, empty_buffer, has_room_for, reserve, row_mask
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

__all__ = ["LaplaceInfo", "LaplaceState", "laplace"]

_NUM_CHECKS = 1000  # draws of the Gaussian that k-hat is read from


class LaplaceState(NamedTuple):
    """The data, and the Gaussian at the mode: position = mode + root @ noise."""

    buffer: Buffer
    mode: Float[Array, " K"]
    root: Float[Array, "K K"]


class LaplaceInfo(NamedTuple):
    """Evidence of an update.

    Attributes:
        is_trusted: whether a mode was found, k-hat and the shifts allow its Gaussian and the rows were absorbed.
        k_hat: Pareto k-hat of the posterior's density relative to the Gaussian's.
        mean_shift: largest error of a mean in posterior standard deviations, as importance weights show it.
        sd_shift: largest error of a standard deviation, relative to itself, as they show it.
        ess: effective sample size of 1,000 draws of the Gaussian, weighted to the posterior.
        is_converged: whether Newton's method found a point where the gradient vanishes and the curvature is positive.
        num_steps: Newton steps.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    k_hat: Float[Array, ""]
    mean_shift: Float[Array, ""]
    sd_shift: Float[Array, ""]
    ess: Float[Array, ""]
    is_converged: Bool[Array, ""]
    num_steps: Int[Array, ""]
    is_full: Bool[Array, ""]


def laplace(model: RewardModel, *, capacity: int = 64, discount: float = 1.0) -> Engine:
    """Return the engine that approximates the posterior by a Gaussian at its mode, in unconstrained space.

    Fast, and right in the limit of many rows; before that, skewness and tails are lost. k-hat says how much that matters.

    Args:
        capacity: rows of data that the first state has room for.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.
    """
    check_settings(discount, capacity=capacity)
    space = unconstrained_space(model)

    blocks = one_block(model, space)

    def target_of(buffer: Buffer) -> LogDensity:
        return block_posterior(space, blocks, 0, buffer, jnp.zeros(space.size), discount)

    def init(key: Key) -> LaplaceState:
        del key  # the mode of the prior is not random
        buffer = empty_buffer(model, capacity)
        mode = find_mode(target_of(buffer), jnp.zeros(space.size))
        return LaplaceState(buffer, mode.position, mode.root)

    def update(key: Key, state: LaplaceState, interaction: Interaction) -> tuple[LaplaceState, LaplaceInfo]:
        has_room = has_room_for(state.buffer, interaction)
        mask = row_mask(interaction) & has_room
        buffer = append_rows(model, state.buffer, interaction._replace(mask=mask), merges=discount == 1.0)
        target = target_of(buffer)
        mode = find_mode(target, state.mode)
        noise = jr.normal(key, (_NUM_CHECKS, space.size))
        positions = mode.position + noise @ mode.root.T
        log_weights = sum(jax.vmap(target.parts)(positions)) + 0.5 * jnp.sum(jnp.square(noise), axis=1)
        k_hat, (mean_shift, sd_shift) = pareto_k_hat(log_weights), moment_shifts(positions, log_weights)
        is_near = (mean_shift <= MAX_MEAN_SHIFT) & (sd_shift <= MAX_SD_SHIFT)
        info = LaplaceInfo(
            mode.is_converged & (k_hat <= MAX_K_HAT) & is_near & has_room,
            k_hat,
            mean_shift,
            sd_shift,
            weight_ess(log_weights),
            mode.is_converged,
            mode.num_steps,
            ~has_room,
        )
        return LaplaceState(buffer, mode.position, mode.root), info

    def sample(key: Key, state: LaplaceState, num_samples: int) -> Draws:
        noise = jr.normal(key, (num_samples, space.size))
        return jax.vmap(space.constrain)(state.mode + noise @ state.root.T)

    explanation = explain(
        model,
        "laplace",
        "draws come from a Gaussian at the posterior's mode, in unconstrained space",
        "Gaussian after mapping to the reals",
        discount,
        [
            "approximated: the form of the posterior; skewness and heavy tails are lost, and all modes but one",
            f"evidence: convergence, Pareto k-hat of the posterior relative to the Gaussian, at most {MAX_K_HAT}, the "
            f"largest error of a mean, at most {MAX_MEAN_SHIFT} standard deviations, and of a standard deviation, at most "
            f"{MAX_SD_SHIFT:.0%}",
        ],
    )
    settings = {"capacity": capacity, "discount": discount}
    capabilities = Capabilities(reserve=reserve, is_traceable_without_program=True)
    return Engine(init, update, sample, explanation, settings, capabilities)
