"""NumPyro's NUTS kernel on a posterior that moves: several chains in step, with adaptation carried from run to run.

`MCMC.run` compiles and adapts afresh on every call. Here the kernel runs inside a scan of our own; its mass matrix and step
size come from the run before, are pooled over the chains and are corrected in short windows; its potential energy is that
of the data now, because every run builds its states anew.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int
from numpyro.infer import NUTS
from numpyro.infer.hmc_util import dual_averaging

from ppl_bandit.engines.approximate.diagnostics import chain_ess, finite_weights, resample, weight_ess
from ppl_bandit.types import Key

__all__ = ["Adaptation", "ChainEvidence", "Chains", "first_adaptation", "refresh", "run_chains"]

Potential = Callable[[Float[Array, " K"]], Float[Array, ""]]

TARGET_ACCEPT = 0.9  # above NumPyro's 0.8: scales with few rows make funnels, which larger steps fall out of
CAREFUL_ACCEPT = 0.98  # of a second attempt, where the first was not sound
MAX_DIVERGENT_SHARE = 0.01  # of the transitions that yield draws
MIN_ESS_SHARE = 0.05  # of the number of draws: 50 of 1,000 leave p-hat off by 0.07 at most, one standard error
MIN_ACCEPT = 0.5  # chains that hardly move would pass for independent draws if they began far apart


class Adaptation(NamedTuple):
    """What one run of the chains teaches the next: the integrator's step size and the posterior's covariance."""

    step_size: Float[Array, ""]
    inverse_mass: Float[Array, "K K"]


class ChainEvidence(NamedTuple):
    """How a run of the chains went.

    Attributes:
        ess: smallest effective sample size over the coordinates.
        num_divergences: trajectories that lost the energy they should keep.
        is_sound: whether every potential energy was finite, divergences were rare, the chains moved and the sample is
            large enough.
    """

    ess: Float[Array, ""]
    num_divergences: Int[Array, ""]
    is_sound: Bool[Array, ""]


class Chains(NamedTuple):
    """Draws of C chains of S states each, chain by chain.

    Attributes:
        draws: (C S, K).
        log_density: (C S,), the log density of each draw when it was drawn, up to a constant.
        adaptation: for the next run.
        evidence: of this run.
    """

    draws: Float[Array, "M K"]
    log_density: Float[Array, " M"]
    adaptation: Adaptation
    evidence: ChainEvidence


def first_adaptation(draws: Float[Array, "M K"]) -> Adaptation:
    """Return an adaptation for the prior, from draws of it; quantiles, because a prior may have no variance."""
    low, high = jnp.quantile(draws, jnp.array([0.16, 0.84]), axis=0)
    size = draws.shape[1]
    scale = jnp.maximum((high - low) / 2, 1e-6)
    return Adaptation(jnp.asarray(size**-0.25, float), jnp.diag(jnp.square(scale)))


def refresh(
    key: Key,
    potential: Potential,
    draws: Float[Array, "M K"],
    log_weights: Float[Array, " M"],
    adaptation: Adaptation,
    num_chains: int,
    num_warmup: int,
) -> Chains:
    """Replace weighted draws by as many fresh ones, from chains that start at the draws with the largest share of weight.

    The more the weights agree, the less there is to warm up: with half of the effective sample size left the chains start
    in their stationary law and know its covariance; below a tenth they warm up in full. A run that was not sound is run once
    more, warmed up in full and to smaller steps: the steps of the run before may be too large for the posterior of now.

    Args:
        potential: negative log density of the data of now.
        log_weights: of the draws, for that density.
        num_warmup: transitions of each chain in a full warm-up.
    """
    key_start, key_run = jr.split(key)
    num_draws = draws.shape[0]
    ess = weight_ess(log_weights)
    log_weights = finite_weights(log_weights)
    starts = draws[resample(key_start, log_weights, num_chains)]
    weights = jax.nn.softmax(log_weights)
    covariance = _covariance(draws, weights, ess, adaptation.inverse_mass)
    is_near = ess >= 0.1 * num_draws
    inverse_mass = jnp.where(is_near, covariance, adaptation.inverse_mass)
    num_steps, _ = _windows(num_draws // num_chains)
    in_full = -(-num_warmup // num_steps)
    # A third of the weight can be lost to a row that moves one coordinate alone, so the threshold is below a half.
    num_windows = jnp.where(ess >= 0.3 * num_draws, 0, jnp.where(is_near, 1, in_full))
    adaptation = adaptation._replace(inverse_mass=inverse_mass)

    def attempt(carry: tuple[Array, Chains]) -> tuple[Array, Chains]:
        number, _ = carry
        chains = run_chains(
            jnp.where(number == 0, key_run, jr.fold_in(key_run, number)),
            potential,
            starts,
            adaptation,
            jnp.where(number == 0, num_windows, in_full),
            num_draws // num_chains,
            jnp.where(number == 0, TARGET_ACCEPT, CAREFUL_ACCEPT),
        )
        return number + 1, chains

    def is_wanting(carry: tuple[Array, Chains]) -> Bool[Array, ""]:
        number, chains = carry
        return (number == 0) | (~chains.evidence.is_sound & (number < 2))

    none = ChainEvidence(jnp.zeros_like(ess), jnp.zeros((), int), jnp.array(False))
    start = Chains(draws, jnp.zeros_like(log_weights), adaptation, none)
    return jax.lax.while_loop(is_wanting, attempt, (jnp.zeros((), int), start))[1]


def run_chains(
    key: Key,
    potential: Potential,
    starts: Float[Array, "C K"],
    adaptation: Adaptation,
    num_windows: Int[Array, ""],
    num_draws: int,
    target_accept: Float[Array, ""] | float = TARGET_ACCEPT,
) -> Chains:
    """Warm up for some windows of transitions, then draw S = num_draws states of every chain.

    Drawing is done in windows too, without adaptation, so that the kernel is compiled once for both.

    Args:
        potential: negative log density, closed over the data of now.
        starts: where the chains begin.
        num_windows: how often step size and mass matrix are estimated anew; may be traced, may be 0.
        target_accept: probability that a proposal be accepted, which the step size is tuned to.
    """
    num_chains, size = starts.shape
    num_steps, num_drawing = _windows(num_draws)
    begin, follow = dual_averaging()

    def window(number: Array, carry: _Progress) -> _Progress:
        is_warm = number >= num_windows
        before = carry.adaptation
        kernel = NUTS(
            potential_fn=potential,
            step_size=before.step_size,
            inverse_mass_matrix=before.inverse_mass,
            dense_mass=True,
            adapt_step_size=False,
            adapt_mass_matrix=False,
        )
        # States are built from positions alone: the cached energy of a state from before would be that of older data.
        states = kernel.init(jr.split(jr.fold_in(key, number), num_chains), 0, init_params=carry.positions)

        def step(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], tuple[Array, Array, Array, Array]]:
            states, averaging = carry
            step_size = jnp.where(is_warm, before.step_size, jnp.exp(averaging[0]))
            adapt_state = states.adapt_state._replace(step_size=jnp.broadcast_to(step_size, (num_chains,)))
            states = kernel.sample(states._replace(adapt_state=adapt_state), (), {})
            accept = jnp.mean(jnp.nan_to_num(states.accept_prob))
            averaging = follow(target_accept - accept, averaging)
            return (states, averaging), (states.z, states.potential_energy, states.diverging, accept)

        log_step_size = jnp.log(before.step_size)
        averaging = (log_step_size, *begin(log_step_size)[1:])
        (states, averaging), (path, energies, diverging, accept) = jax.lax.scan(
            step, (states, averaging), None, length=num_steps
        )
        # The first half of a window still travels from where the last one left off.
        settled = path[num_steps // 2 :].reshape(-1, size)
        after = Adaptation(jnp.exp(averaging[1]), _covariance(settled, None, settled.shape[0], before.inverse_mass))
        # Until the chains are warm their paths go to the first slot, which the first warm window overwrites.
        slot = jnp.maximum(number - num_windows, 0)
        return _Progress(
            states.z,
            jax.tree.map(lambda old, new: jnp.where(is_warm, old, new), before, after),
            jax.lax.dynamic_update_index_in_dim(carry.paths, path, slot, 0),
            jax.lax.dynamic_update_index_in_dim(carry.energies, energies, slot, 0),
            carry.num_divergences + jnp.where(is_warm, jnp.sum(diverging), 0),
            carry.sum_accept + jnp.where(is_warm, jnp.mean(accept), 0.0),
        )

    progress = _Progress(
        starts,
        adaptation,
        jnp.zeros((num_drawing, num_steps, num_chains, size), starts.dtype),
        jnp.zeros((num_drawing, num_steps, num_chains), starts.dtype),
        jnp.zeros((), int),
        jnp.zeros((), starts.dtype),
    )
    progress = jax.lax.fori_loop(0, num_windows + num_drawing, window, progress)
    paths, energies = progress.paths.reshape(-1, num_chains, size), progress.energies.reshape(-1, num_chains)
    chains = jnp.swapaxes(paths[-num_draws:], 0, 1)
    draws = chains.reshape(-1, size)
    ess = jnp.min(chain_ess(chains))
    accept = progress.sum_accept / num_drawing
    is_sound = (
        jnp.all(jnp.isfinite(energies))
        & (progress.num_divergences <= MAX_DIVERGENT_SHARE * draws.shape[0])
        & (ess >= MIN_ESS_SHARE * draws.shape[0])
        & (accept >= MIN_ACCEPT)
    )
    # The drawing windows adapt nothing, but what they saw of acceptance corrects the step size of the next run.
    correction = jnp.clip(accept - target_accept, -0.5, 0.1)
    after = Adaptation(
        progress.adaptation.step_size * jnp.exp(correction),
        _covariance(draws, None, draws.shape[0], progress.adaptation.inverse_mass),
    )
    return Chains(
        draws,
        -jnp.swapaxes(energies[-num_draws:], 0, 1).reshape(-1),
        after,
        ChainEvidence(ess, progress.num_divergences, is_sound),
    )


def _windows(num_draws: int) -> tuple[int, int]:
    """Return the length of a window and how many of them yield at least num_draws states of a chain."""
    num_drawing = -(-num_draws // 25)
    return max(10, -(-num_draws // num_drawing)), num_drawing


class _Progress(NamedTuple):
    positions: Float[Array, "C K"]
    adaptation: Adaptation
    paths: Float[Array, "windows steps C K"]
    energies: Float[Array, "windows steps C"]
    num_divergences: Int[Array, ""]
    sum_accept: Float[Array, ""]


def _covariance(
    draws: Float[Array, "M K"], weights: Float[Array, " M"] | None, ess: Any, before: Float[Array, "K K"]
) -> Float[Array, "K K"]:
    """Estimate a covariance, drawn towards its diagonal with the weight of K + 5 draws; `before` if the draws stand still."""
    if weights is None:
        weights = jnp.full(draws.shape[0], 1.0 / draws.shape[0])
    centred = draws - weights @ draws
    covariance = (weights[:, None] * centred).T @ centred
    variance = jnp.diagonal(covariance)
    share = ess / (ess + draws.shape[1] + 5.0)
    estimate = share * covariance + (1.0 - share) * jnp.diag(variance)
    is_sound = jnp.all(jnp.isfinite(estimate)) & jnp.all(variance > 0)
    return jnp.where(is_sound, estimate, before)
