"""Markov transitions of all particles at once: Hamiltonian Monte Carlo and NumPyro's NUTS."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int
from numpyro.infer import NUTS

from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.numerics.random_bits import uniform_and_normal
from ppl_bandit.types import Key

_MAX_LEAPS = 64  # of one trajectory, for the same reason
_DIVERGENT_ENERGY = 1000.0  # energy error of a divergent trajectory, as in Stan
_MAX_TREE_DEPTH = 7  # all chains wait for the longest trajectory: of 127 steps here, of 1,023 with Stan's depth of 10


class Transition(NamedTuple):
    """The result of one transition of every particle.

    Attributes:
        positions: after the transition.
        energies: minus the log density there.
        accept_prob: acceptance probability of each proposal.
        is_divergent: whether the energy error of a trajectory exceeded 1,000.
        num_evaluations: of the density and its gradient at every particle.
    """

    positions: Float[Array, "M k"]
    energies: Float[Array, " M"]
    accept_prob: Float[Array, " M"]
    is_divergent: Bool[Array, " M"]
    num_evaluations: Int[Array, ""]


# (key, log density in whitened coordinates, positions there, step size) -> one transition of every particle
Kernel = Callable[[Key, LogDensity, Float[Array, "M k"], Float[Array, ""]], Transition]


def hamiltonian(
    key: Key, target: LogDensity, positions: Float[Array, "M k"], step_size: Float[Array, ""]
) -> Transition:
    """Move every particle by Hamiltonian Monte Carlo with a trajectory of about a quarter period.

    In whitened coordinates a quarter period makes the end of a Gaussian's trajectory independent of its start. The length
    varies by up to a half and the step size by a fifth, which prevents periodic trajectories. All particles make the same
    number of leapfrog steps.
    """
    num, dtype = positions.shape[0], positions.dtype
    uniform, normal = uniform_and_normal(key, 2 * num + 1, positions.size, dtype)
    momenta = normal.reshape(positions.shape)
    length = 0.5 * math.pi * (0.5 + uniform[-1])
    num_leaps = jnp.clip(jnp.ceil(length / step_size), 1, _MAX_LEAPS).astype(int)
    steps = step_size * (0.8 + 0.4 * uniform[:num, None])

    def leapfrog(number: Array, carry: Any) -> Any:
        x, p, gradient, first, _ = carry
        # Iteration 0 has step size 0 and evaluates the density at the start, so that the density is compiled once.
        step = jnp.where(number == 0, 0.0, steps)
        p = p + 0.5 * step * gradient
        x = x + step * p
        value, gradient = jax.vmap(target.value_and_grad)(x)
        return x, p + 0.5 * step * gradient, gradient, jnp.where(number == 0, value, first), value

    zeros = jnp.zeros(num, dtype)
    start = positions, momenta, jnp.zeros_like(positions), zeros, zeros
    x, p, _, log_start, log_end = jax.lax.fori_loop(0, num_leaps + 1, leapfrog, start)
    log_ratio = log_end - log_start + 0.5 * jnp.sum(jnp.square(momenta) - jnp.square(p), axis=1)
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    is_accepted = uniform[num : 2 * num] < accept_prob
    energies = -jnp.where(is_accepted, log_end, log_start)
    is_divergent = log_ratio < -_DIVERGENT_ENERGY
    positions = jnp.where(is_accepted[:, None], x, positions)
    return Transition(positions, energies, accept_prob, is_divergent, num_leaps + 1)


def no_u_turn(key: Key, target: LogDensity, positions: Float[Array, "M k"], step_size: Float[Array, ""]) -> Transition:
    """Move every particle by one transition of NumPyro's NUTS."""

    # `LogDensity` sums over rows in a loop of unknown length, which has no reverse-mode derivative of its own.
    @jax.custom_vjp
    def potential(x: Array) -> Array:
        log_prior, log_likelihood = target.parts(x)
        return -log_prior - log_likelihood

    def forward(x: Array) -> tuple[Array, Array]:
        value, gradient = target.value_and_grad(x)
        return -value, -gradient

    potential.defvjp(forward, lambda gradient, outer: (outer * gradient,))
    kernel = NUTS(
        potential_fn=potential,
        step_size=step_size,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        max_tree_depth=_MAX_TREE_DEPTH,
    )
    # A state is built from positions alone: one from an earlier update would hold the potential energy of older data.
    states = kernel.init(jr.split(key, positions.shape[0]), 0, init_params=positions)
    adapt_state = states.adapt_state._replace(step_size=jnp.broadcast_to(step_size, positions.shape[:1]))
    states = kernel.sample(states._replace(adapt_state=adapt_state), (), {})
    accept_prob, num_leaps = jnp.nan_to_num(states.accept_prob), jnp.max(states.num_steps).astype(int)
    return Transition(states.z, states.potential_energy, accept_prob, states.diverging, num_leaps + 1)
