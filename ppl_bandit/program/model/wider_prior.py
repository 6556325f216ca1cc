"""Latents from a prior that is wider than the program's: tests of a bandit whose prior is misspecified in scale.

A factor c multiplies the distance of a real latent from its prior median, the distance of a latent with one bound (a rate)
from that bound, and the distance of any other latent (a probability) from its median in the unconstrained space of its
support. Latents that the expected rewards do not depend on, such as a noise variance, do not change.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import biject_to, constraints

from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import Site, run_program
from ppl_bandit.runtime.numpyro_adapter import element_support
from ppl_bandit.types import Draws

__all__ = ["prior_medians", "sites_of_expected_rewards", "widen_latents"]

_NUM_DRAWS = 1001  # for a median: its standard error is about a twentieth of the prior's width
_HALF_LINES = (constraints.greater_than, constraints.less_than)


def prior_medians(model: RewardModel) -> Draws:
    """Return the prior medians, in unconstrained space, of the latents that the expected rewards depend on: {site: value}."""
    moving = sites_of_expected_rewards(model)

    def coordinates(latents: Mapping[str, Array]) -> Draws:
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        return {name: biject_to(trace[name]["fn"].support).inv(trace[name]["value"]) for name in moving}

    with jax.enable_x64(True):
        found = jax.jit(lambda: jax.vmap(coordinates)(model.sample_prior(jr.key(0), _NUM_DRAWS)))()
    return {name: np.nanmedian(values, axis=0) for name, values in found.items()}


def widen_latents(model: RewardModel, latents: Mapping[str, Array], middle: Draws, by: Float[Array, ""]) -> Draws:
    """Return latents as draws from a prior that is `by` times as wide.

    Args:
        middle: the result of `prior_medians`.
    """
    own = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))

    def choose(site: Site) -> Array | None:
        name = site["name"]
        if name not in middle:
            return latents.get(name)
        support = site["fn"].support  # its bounds may depend on another latent
        position = biject_to(own[name]["fn"].support).inv(latents[name])
        if isinstance(element_support(support), _HALF_LINES):  # unconstrained space is the logarithm of the distance
            return biject_to(support)(position + jnp.log(by))
        centre = jnp.asarray(middle[name], position.dtype)
        return biject_to(support)(centre + by * (position - centre))

    trace = run_program(model.program, jnp.zeros(1, int), model.context_rows(1), {}, choose=choose)
    return {name: jnp.asarray(trace[name]["value"]) for name in model.latent_shapes}


def sites_of_expected_rewards(model: RewardModel) -> list[str]:
    """Return the latents that the expected rewards depend on, by dependence analysis."""
    with jax.enable_x64(True):
        latents = {name: jnp.zeros((1, *shape)) for name, shape in model.latent_shapes.items()}
        closed = jax.make_jaxpr(lambda given: model.expected_rewards(given, model.context))(latents)
    labels = [frozenset([name]) for name in sorted(latents)]  # JAX sorts the keys of a dict
    return sorted(frozenset().union(*dependencies(closed, labels)))
