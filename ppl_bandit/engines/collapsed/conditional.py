"""The state of the collapsed engine, and the density of the outer sites with the inner ones integrated out."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.approximate.buffer import Buffer, empty_buffer
from ppl_bandit.engines.collapsed.inspection import Split
from ppl_bandit.engines.collapsed.particles import squared_error
from ppl_bandit.engines.collapsed.statistics import Statistics, add, log_normalizer, no_statistics
from ppl_bandit.engines.collapsed.stores import Store, read_prior
from ppl_bandit.engines.exact.families import Coordinates, Posterior, posterior_of
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Key

__all__ = ["MAX_ROUNDING", "CollapsedState", "Conditional", "first_state", "law_of", "rounding_of"]

MAX_ROUNDING = 0.02  # nats of a log target


class CollapsedState(NamedTuple):
    """Particles of the outer sites, and what is kept of the data.

    Attributes:
        buffer: the rows, where they must be read again; otherwise without room, and only the number of rows counts.
        kept: sums of statistics, or where rows are read again, each particle's own sum.
        centre: the point at which densities of the inner sites are read.
        particles: outer sites, unconstrained.
        log_targets: log density, inner sites integrated out, of which the particles are an equally weighted sample.
        log_weights: from there to the posterior.
        log_evidence: log p(data); with forgetting, the sum of log predictive densities.
        squared_error: of the log evidence, up to the last refresh.
        memory, acceptance: of the last refresh; see `particles`.
        num_refreshes: refreshes so far.
    """

    buffer: Buffer
    kept: Any
    centre: Coordinates
    particles: Float[Array, "M K"]
    log_targets: Float[Array, " M"]
    log_weights: Float[Array, " M"]
    log_evidence: Float[Array, ""]
    squared_error: Float[Array, ""]
    memory: Float[Array, ""]
    acceptance: Float[Array, ""]
    num_refreshes: Int[Array, ""]

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Standard error of the log evidence, as if the particles of each refresh were independent and exact."""
        return jnp.sqrt(self.squared_error + squared_error(self.log_weights))


class Conditional(NamedTuple):
    """A split program and how its data are kept; no store means rows, which are read again."""

    model: RewardModel
    split: Split
    store: Store | None
    discount: float

    def log_target(self, centre: Coordinates, position: Array, read: Callable[[Any], Statistics]) -> Float[Array, ""]:
        """Return the log density of an unconstrained outer value, inner sites integrated out.

        Args:
            read: outer values -> the statistics of the data.
        """
        values, log_jacobian = self.split.space.constrain(position)
        total = self.total(centre, values, read(values))
        return log_normalizer(self.split.layout, total.natural) + total.constant + log_jacobian

    def total(self, centre: Coordinates, values: Any, data: Statistics) -> Statistics:
        """Return the statistics of prior and data."""
        return add(read_prior(self.model, self.split, centre, values), data)


def first_state(posterior: Conditional, key: Key, num_particles: int, capacity: int) -> CollapsedState:
    """Return particles from the prior."""
    model, split = posterior.model, posterior.split
    centre = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), split.centre)
    prior = model.sample_prior(key, num_particles)
    particles = jax.vmap(split.space.unconstrain)({name: prior[name] for name in split.space.names})
    nothing = no_statistics(split.layout, centre)
    targets = jax.vmap(lambda x: posterior.log_target(centre, x, lambda _: nothing))(particles)
    generated = targets
    extra = model.terms_beside_draws()
    if extra:  # particles come from the program without its factors and observed constants: weigh with those
        view = copy.copy(model)
        view.outcomes = (*model.outcomes, *extra)
        without = posterior._replace(model=view)
        generated = jax.vmap(lambda x: without.log_target(centre, x, lambda _: nothing))(particles)
    is_finite = jnp.isfinite(targets) & jnp.isfinite(generated)
    zero = jnp.zeros((), particles.dtype)
    if posterior.store is None:
        kept = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_particles, *leaf.shape)), nothing)
    else:
        kept = posterior.store.empty(centre)
    return CollapsedState(
        empty_buffer(model, capacity if posterior.store is None else 0),
        kept,
        centre,
        particles,
        # What this precision cannot resolve has no weight.
        jnp.where(is_finite, generated, 0.0),
        jnp.where(is_finite, targets - generated, -jnp.inf),
        zero,
        zero,
        zero,
        zero + 1.0,
        jnp.zeros((), int),
    )


def law_of(posterior: Conditional, state: CollapsedState, which: Int[Array, ""]) -> tuple[dict[str, Array], Posterior]:
    """Return the outer values of a particle and the law of the inner sites given them."""
    split, store = posterior.split, posterior.store
    values, _ = split.space.constrain(state.particles[which])
    if store is None:
        data = jax.tree.map(lambda leaf: leaf[which], state.kept)
    else:
        data = store.statistics(state.kept, state.centre, values)
    total = posterior.total(state.centre, values, data)
    return values, posterior_of(split.layout, total.natural, state.centre)


def rounding_of(posterior: Conditional, state: CollapsedState, which: Int[Array, ""]) -> Float[Array, ""]:
    """Return how many nats of a particle's log target may be rounding: constants may be large, and the integral undo them."""
    store, centre = posterior.store, state.centre
    values, _ = posterior.split.space.constrain(state.particles[which])
    prior = read_prior(posterior.model, posterior.split, centre, values).constant
    size = jnp.abs(state.kept.constant[which]) if store is None else store.size(state.kept, centre, values)
    return jnp.finfo(state.particles.dtype).eps * (size + jnp.abs(prior))
