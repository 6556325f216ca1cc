"""Which latents the expected reward of each arm reads, if it is affine in them, for every context at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.exact.families.layout import Layout
from ppl_bandit.program.jaxpr.affine_reads import affine_reads
from ppl_bandit.program.model.reward_model import RewardModel

__all__ = ["reads_of_rewards"]


def reads_of_rewards(model: RewardModel, layout: Layout) -> tuple[np.ndarray, int]:
    """Return which elements the expected reward of each arm reads, (A, E), in the order of the layout's sites, and its power.

    Returns:
        The elements, and 1 for an affine function or -1 for a multiple of the reciprocal of one element.

    Raises:
        NotAffine: if the expected reward is not proved to be either.
    """
    shapes = {site.name: jax.ShapeDtypeStruct(site.shape, jnp.result_type(float)) for site in layout.sites}

    def rewards(latents: dict[str, Array], context: Any) -> Array:
        return model.expected_rewards({name: value[None] for name, value in latents.items()}, context)[0]

    closed = jax.make_jaxpr(rewards)(shapes, model.context)
    sizes = [site.size for site in layout.sites]
    elements = dict(zip(shapes, np.split(np.eye(sum(sizes), dtype=bool), np.cumsum(sizes)[:-1]), strict=True))
    # A dict is flattened in the order of its sorted keys.
    out = affine_reads(closed, [elements[name].reshape(*shapes[name].shape, -1) for name in sorted(shapes)])
    return out.reads, out.power
