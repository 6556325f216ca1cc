"""Independent blocks of latents, proved on the program's jaxpr.

A posterior is a product over blocks of latents if every term of the prior, and the likelihood of every row given its arm,
depends on latents of one block only. The blocks come from element-level dependence analysis (`program.jaxpr.entry_reads`),
which holds for all contexts and rewards; they may be too large, never too small.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.approximate.unconstrained import Space
from ppl_bandit.program.jaxpr.entry_reads import MAX_ENTRIES, connected_components, entries_read
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


class Blocks(NamedTuple):
    """A partition of the K unconstrained latents into B blocks that are independent given any data.

    Attributes:
        coordinates: (B, k), the latents of each block; k is the size of the largest block, and smaller ones are padded with K.
        is_latent: (B, k), false for padding.
        of_arm: (A,), the block that the likelihood of an arm's rows depends on.
        terms: (B, terms), the terms of the prior that belong to each block.
    """

    coordinates: np.ndarray
    is_latent: np.ndarray
    of_arm: np.ndarray
    terms: np.ndarray


def one_block(model: RewardModel, space: Space) -> Blocks:
    """Return all latents as one block."""
    num_terms = jax.eval_shape(space.log_prior, jnp.zeros(space.size)).shape[0]
    return Blocks(
        np.arange(space.size)[None],
        np.ones((1, space.size), bool),
        np.zeros(model.num_arms, int),
        np.ones((1, num_terms), bool),
    )


def independent_blocks(model: RewardModel, space: Space) -> Blocks:
    """Return the finest partition that is proved; latents that no likelihood depends on are one block together."""
    if space.size > MAX_ENTRIES:
        return one_block(model, space)
    terms = entries_read(space.log_prior, space.size, ())
    if space.partial_centring is not None:  # a term may be constant in the latents and not in non-centred coordinates
        half, log_prior = np.full(space.size, 0.5), space.partial_centring.log_prior
        terms = terms | entries_read(lambda flat: log_prior(flat, jnp.asarray(half, flat.dtype)), space.size, ())
    arms = np.arange(model.num_arms)

    def likelihood(flat: Array, reward: Any, context: Any) -> Array:
        return model.log_likelihood(space.constrain(flat), Interaction(jnp.asarray(arms), reward, context))

    def data() -> tuple[Any, Any]:
        reward = model.zero_outcomes(model.num_arms)
        return reward, model.context_rows(model.num_arms)

    rows = entries_read(likelihood, space.size, jax.eval_shape(data))
    label = connected_components(np.concatenate([terms, rows]))
    of_arm = np.array([label[np.argmax(row)] if row.any() else -1 for row in rows])
    is_read = np.isin(label, of_arm[of_arm >= 0])
    label = np.where(is_read, label, space.size)  # latents that no likelihood depends on stay together
    names = np.unique(label)
    members = [np.flatnonzero(label == name) for name in names]
    size = max(len(member) for member in members)
    coordinates = np.full((len(names), size), space.size)
    for row, member in zip(coordinates, members, strict=True):
        row[: len(member)] = member
    of_term = np.array([label[np.argmax(row)] if row.any() else names[0] for row in terms])
    return Blocks(
        coordinates,
        coordinates < space.size,
        np.array([int(np.flatnonzero(names == name)[0]) if name >= 0 else 0 for name in of_arm]),
        of_term == names[:, None],
    )
