"""The locations of an outcome's law: its centre or, for a mixture, the centre of each component.

A component of a mixture can be narrow. Where another component dominates, the likelihood does not show in which direction the
narrow one lies: its density underflows. Its location is a smooth function of the latents everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from ppl_bandit.program.jaxpr.entry_reads import entries_read
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.numpyro_adapter import locations_of
from ppl_bandit.types import Interaction

__all__ = ["outcome_locations"]

_MAX_LOCATIONS = 8


def outcome_locations(
    model: RewardModel, constrain: Callable[[Float[Array, " K"]], Any], size: int
) -> Callable[[Mapping[str, Array], Interaction], tuple[Float[Array, "N L"], Float[Array, "N L"]]] | None:
    """Return the function (latents, rows) -> locations that depend on latents, and the outcome that belongs to each.

    Returns:
        None if there is no such location. Outcomes that are integers have none, unless they are mixtures: their likelihood is
        at most 1, so no single row can concentrate the posterior where there are no draws.
    """

    def all_locations(latents: Mapping[str, Array], rows: Interaction) -> tuple[Array, Array]:
        outcomes = model.outcome_values(rows.reward)
        trace = model.trace(latents, rows.arm, rows.context, outcomes)
        found, values = [], []
        for name in model.outcomes:
            fn: Distribution = trace[name]["fn"]
            own = locations_of(fn)
            if len(own) == 1 and model.outcome_kinds[name] == "i":
                continue
            found += [jnp.broadcast_to(location, rows.arm.shape) for location in own[:_MAX_LOCATIONS]]
            values += [outcomes[name].astype(float)] * len(own[:_MAX_LOCATIONS])
        none = jnp.zeros((*rows.arm.shape, 0))
        return (jnp.stack(found, axis=-1), jnp.stack(values, axis=-1)) if found else (none, none)

    arms = np.arange(model.num_arms)

    def of_every_arm(flat: Array, reward: Any, context: Any) -> Array:
        return all_locations(constrain(flat), Interaction(jnp.asarray(arms), reward, context))[0]

    def data() -> tuple[Any, Any]:
        reward = model.outcome_values({name: jnp.zeros(model.num_arms) for name in model.outcomes})
        return reward, model.context_rows(model.num_arms)

    reads = entries_read(of_every_arm, size, jax.eval_shape(data))
    columns = np.flatnonzero(reads.any(axis=(0, 2)))
    if not columns.size:
        return None

    def locations(latents: Mapping[str, Array], rows: Interaction) -> tuple[Array, Array]:
        found, values = all_locations(latents, rows)
        return found[:, columns], values[:, columns]

    return locations
