"""Draws from a prior that is wrong in scale: its latents lie some times as far from the middle of the prior as it says.

A real latent lies as many times as far from its median; a latent with one bound, a rate say, as many times as far from the
bound; any other, a probability say, as many times as far from its median in the unconstrained space of its support. Latents
that the expected rewards do not depend on, such as a variance of noise, stay as they are.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import biject_to, constraints

from ppl_bandit.program.jaxpr.dependence import dependencies
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import Site, run_program
from ppl_bandit.types import Draws

__all__ = ["middle_of", "moving_sites", "widened"]

_NUM_DRAWS = 1001  # behind a median: it is known to a twentieth of the prior's width
_HALF_LINES = (constraints.greater_than, constraints.less_than)


def middle_of(model: RewardModel) -> Draws:
    """Return the medians of the prior in unconstrained space, {site: value}, of the latents that move expected rewards."""
    moving = moving_sites(model)

    def coordinates(latents: Mapping[str, Array]) -> Draws:
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        return {name: biject_to(trace[name]["fn"].support).inv(trace[name]["value"]) for name in moving}

    with jax.enable_x64(True):
        found = jax.jit(lambda: jax.vmap(coordinates)(model.sample_prior(jr.key(0), _NUM_DRAWS)))()
    return {name: np.nanmedian(values, axis=0) for name, values in found.items()}


def widened(model: RewardModel, latents: Mapping[str, Array], middle: Draws, by: Float[Array, ""]) -> Draws:
    """Return latents as they would be, had the prior a scale `by` times as large.

    Args:
        middle: as `middle_of` returns it.
    """
    own = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))

    def choose(site: Site) -> Array | None:
        name = site["name"]
        if name not in middle:
            return latents.get(name)
        support = site["fn"].support  # its bounds may have moved with another latent
        place = biject_to(own[name]["fn"].support).inv(latents[name])
        if isinstance(_base(support), _HALF_LINES):  # in the space of logarithms
            return biject_to(support)(place + jnp.log(by))
        centre = jnp.asarray(middle[name], place.dtype)
        return biject_to(support)(centre + by * (place - centre))

    trace = run_program(model.program, jnp.zeros(1, int), model.context_rows(1), {}, choose=choose)
    return {name: jnp.asarray(trace[name]["value"]) for name in model.latent_shapes}


def moving_sites(model: RewardModel) -> list[str]:
    """Return the latents that the expected rewards depend on, by the jaxpr of the one to the other."""
    with jax.enable_x64(True):
        latents = {name: jnp.zeros((1, *shape)) for name, shape in model.latent_shapes.items()}
        closed = jax.make_jaxpr(lambda given: model.expected_rewards(given, model.context))(latents)
    labels = [frozenset([name]) for name in sorted(latents)]  # as jax orders the leaves of a dict
    return sorted(frozenset().union(*dependencies(closed, labels)))


def _base(support: Any) -> Any:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support
