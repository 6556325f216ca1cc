"""Laplace's approximation: Newton's method to the mode in unconstrained space, and a Gaussian there."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.account import explain
from ppl_bandit.engines.approximate.buffer import Buffer, append, empty_buffer, fits, read, reserve, row_mask
from ppl_bandit.engines.approximate.chains import Potential
from ppl_bandit.engines.approximate.diagnostics import (
    MAX_K_HAT,
    MAX_MEAN_SHIFT,
    MAX_SD_SHIFT,
    moment_shifts,
    pareto_k_hat,
    weight_ess,
)
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Interaction, Key

__all__ = ["LaplaceInfo", "LaplaceState", "laplace"]

_MAX_STEPS = 50
_TOLERANCE = 1e-5  # of the Newton decrement: the mode is found to about 0.004 posterior standard deviations
_NUM_HALVINGS = 12
_DAMPING = (0.0, 0.01, 1.0)  # least eigenvalue of a step relative to the largest
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


class Mode(NamedTuple):
    """Where Newton's method ended: the inverse Hessian is root @ root.T."""

    position: Float[Array, " K"]
    root: Float[Array, "K K"]
    is_converged: Bool[Array, ""]
    num_steps: Int[Array, ""]


def laplace(model: RewardModel, *, capacity: int = 64, discount: float = 1.0) -> Engine:
    """Return the engine that approximates the posterior by a Gaussian at its mode, in unconstrained space.

    Fast, and right in the limit of many rows; before that, skewness and tails are lost. k-hat says how much that matters.

    Args:
        capacity: rows of data that the first state has room for.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.
    """
    check_settings(discount, capacity=capacity)
    space = unconstrained_space(model)

    def climb(buffer: Buffer, start: Float[Array, " K"]) -> Mode:
        data = read(buffer, discount)
        return find_mode(lambda position: -space.log_joint(position, data), start)

    def init(key: Key) -> LaplaceState:
        del key  # the mode of the prior is not random
        buffer = empty_buffer(model, capacity)
        mode = climb(buffer, jnp.zeros(space.size))
        return LaplaceState(buffer, mode.position, mode.root)

    def update(key: Key, state: LaplaceState, interaction: Interaction) -> tuple[LaplaceState, LaplaceInfo]:
        has_room = fits(state.buffer, interaction)
        mask = row_mask(interaction) & has_room
        buffer = append(model, state.buffer, interaction._replace(mask=mask))
        mode = climb(buffer, state.mode)
        data = read(buffer, discount)
        noise = jr.normal(key, (_NUM_CHECKS, space.size))
        positions = mode.position + noise @ mode.root.T
        target = jax.vmap(lambda position: space.log_joint(position, data))(positions)
        log_weights = target + 0.5 * jnp.sum(jnp.square(noise), axis=1)
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
    return Engine(init, update, sample, explanation, reserve=reserve, settings=settings)


def find_mode(potential: Potential, start: Float[Array, " K"]) -> Mode:
    """Minimise a potential by Newton's method with the absolute values of the Hessian's eigenvalues.

    Their absolute values make every step go downhill, and among 1, 1/2, 1/4, ... of a step, with and without the smallest of
    them raised, the lowest point is taken, so that a start far from the mode, or where the potential is flat or not convex,
    is no trap.
    """
    gradient, hessian = jax.grad(potential), jax.hessian(potential)
    lengths, damping = 0.5 ** jnp.arange(_NUM_HALVINGS), jnp.array(_DAMPING)

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        position, _, number = carry
        values, vectors = _spectrum(hessian(position))
        slope = vectors.T @ gradient(position)
        directions = -(slope / jnp.maximum(values, damping[:, None] * jnp.max(values))) @ vectors.T
        tried = (position + lengths[:, None, None] * directions).reshape(-1, position.shape[0])
        energies = jnp.append(jax.vmap(potential)(tried), potential(position))
        best = jnp.argmin(jnp.where(jnp.isfinite(energies), energies, jnp.inf))
        position = _off_zero(jnp.append(tried, position[None], axis=0)[best])
        return position, jnp.sum(jnp.square(slope) / values), number + 1

    def is_moving(carry: tuple[Array, Array, Array]) -> Array:
        _, decrement, number = carry
        return (decrement > _TOLERANCE) & (number < _MAX_STEPS)

    begin = (_off_zero(start), jnp.asarray(jnp.inf, start.dtype), jnp.zeros((), int))
    position, decrement, num_steps = jax.lax.while_loop(is_moving, step, begin)
    curvature = hessian(position)
    values, vectors = _spectrum(curvature)
    is_convex = jnp.linalg.eigvalsh(curvature)[0] > 0
    is_converged = (decrement <= _TOLERANCE) & is_convex & jnp.all(jnp.isfinite(position))
    return Mode(position, vectors / jnp.sqrt(values), is_converged, num_steps)


def _off_zero(position: Float[Array, " K"]) -> Float[Array, " K"]:
    """Move coordinates off an exact zero, each by its own small amount.

    A logit of 0 is a kink of the stable formulas of Bernoulli log densities: its derivatives there are wrong, and the mode
    of a symmetric prior is just there.
    """
    size = position.shape[0]
    return jnp.where(position == 0, 1e-4 * (1.0 + jnp.arange(size) / size), position)


def _spectrum(hessian: Float[Array, "K K"]) -> tuple[Float[Array, " K"], Float[Array, "K K"]]:
    """Return eigenvalues, as absolute values kept away from 0, and eigenvectors."""
    values, vectors = jnp.linalg.eigh(hessian)
    values = jnp.abs(values)
    floor = jnp.maximum(jnp.max(values) * 10 * jnp.finfo(values.dtype).eps, jnp.finfo(values.dtype).tiny)
    return jnp.maximum(values, floor), vectors
