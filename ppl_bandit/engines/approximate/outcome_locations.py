"""The locations of an outcome's law: its centre or, for a mixture, the centre of each component.

A component of a mixture can be narrow. Where another component dominates, the likelihood does not show in which direction the
narrow one lies: its density underflows. Its location is a smooth function of the latents everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from ppl_bandit.program.jaxpr.entry_reads import entries_read
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.numpyro_adapter import locations_of
from ppl_bandit.types import Interaction

_MAX_LOCATIONS = 8  # of one outcome: as many starts as `importance` searches from


class OutcomeLocations(NamedTuple):
    """Locations of the laws of N rows.

    Attributes:
        locations: those that depend on latents.
        outcomes: the outcome that belongs to each location.
        log_peak: log likelihood of a row at the most likely of its locations, in place of its outcomes.
    """

    locations: Float[Array, "N L"]
    outcomes: Float[Array, "N L"]
    log_peak: Float[Array, " N"]


def outcome_locations(
    model: RewardModel, constrain: Callable[[Float[Array, " K"]], Any], size: int
) -> Callable[[Mapping[str, Array], Interaction], OutcomeLocations] | None:
    """Return the function (latents, rows) -> locations of the outcomes' laws.

    Returns:
        None if there is no such location. Outcomes that are integers have none, unless they are mixtures: their likelihood is
        at most 1, so no single row can concentrate the posterior where there are no draws.
    """

    def all_locations(latents: Mapping[str, Array], rows: Interaction) -> OutcomeLocations:
        outcomes = model.outcome_values(rows.reward)
        trace = model.trace(latents, rows.arm, rows.context, outcomes)
        found, values = [], []
        log_peak = jnp.zeros(rows.arm.shape)
        for name in model.outcomes:
            fn: Distribution = trace[name]["fn"]
            own = locations_of(fn)
            if not own or (len(own) == 1 and model.outcome_kinds[name] == "i"):
                log_peak += fn.log_prob(outcomes[name])
                continue
            own = [jnp.broadcast_to(location, rows.arm.shape) for location in own[:_MAX_LOCATIONS]]
            found += own
            values += [outcomes[name].astype(float)] * len(own)
            log_peak += jnp.max(jnp.stack([fn.log_prob(location) for location in own]), axis=0)
        none = jnp.zeros((*rows.arm.shape, 0))
        if not found:
            return OutcomeLocations(none, none, log_peak)
        return OutcomeLocations(jnp.stack(found, axis=-1), jnp.stack(values, axis=-1), log_peak)

    arms = np.arange(model.num_arms)

    def of_every_arm(flat: Array, reward: Any, context: Any) -> Array:
        return all_locations(constrain(flat), Interaction(jnp.asarray(arms), reward, context)).locations

    def data() -> tuple[Any, Any]:
        reward = model.zero_outcomes(model.num_arms)
        return reward, model.context_rows(model.num_arms)

    reads = entries_read(of_every_arm, size, jax.eval_shape(data))
    columns = np.flatnonzero(reads.any(axis=(0, 2)))
    if not columns.size:
        return None

    def locations(latents: Mapping[str, Array], rows: Interaction) -> OutcomeLocations:
        found = all_locations(latents, rows)
        return found._replace(locations=found.locations[:, columns], outcomes=found.outcomes[:, columns])

    return locations
