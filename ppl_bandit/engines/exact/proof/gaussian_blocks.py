"""The block structure of the joint Gaussian law of the real latents.

Two reals that never share a term of the prior or of the likelihood have a 0 in the precision matrix, whatever is observed. The
terms are found by element-level dependence analysis (`program.jaxpr.entry_reads`), and reals that no chain of terms connects
are separate Gaussian blocks. The certificates do not rely on this: a missing entry would be a deviation from the affine form.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact.families.layout import REAL, Layout
from ppl_bandit.program.jaxpr.entry_reads import MAX_ENTRIES, connected_components, entries_read
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import is_prior_term, log_prob, log_prob_terms

_MAX_LEAF = 8  # reals of one leaf of an arrow


def split_gaussian_blocks(model: RewardModel, layout: Layout, *, around_cores: bool = False) -> Layout:
    """Split the Gaussian blocks of a layout into blocks that are independent given the other latents, for any data.

    Args:
        around_cores: whether to look in each block for an arrow structure: a core (the common mean of a hierarchy) without
            which the block falls into small independent leaves (the arms).
    """
    if layout.members.shape[1] <= 1 or layout.count(REAL) > MAX_ENTRIES:
        return layout
    groups = _terms_of_reals(model, layout)
    if model.moving_sites:
        groups = np.concatenate([groups, _terms_of_step(model, layout)])
    finer = in_blocks(layout, layout.owner_of_real, connected_components(groups))
    # Blocks are padded to the largest: one large and many small blocks would take more memory than a single block.
    layout = finer if _num_entries(finer) <= _num_entries(layout) else layout
    return _around_cores(layout, groups) if around_cores else layout


def in_blocks(layout: Layout, owner: Int[np.ndarray, " D"], label: Int[np.ndarray, " D"]) -> Layout:
    """Put reals into one block if they have the same owner (the positive element that scales them) and the same label."""
    pairs = list(zip(owner.tolist(), label.tolist(), strict=True))
    kinds = sorted(set(pairs), key=lambda kind: (kind[0] < 0, kind[0], pairs.index(kind)))
    found = [[number for number, pair in enumerate(pairs) if pair == kind] for kind in kinds]
    size = max(map(len, found), default=0)
    # int32 and not int64: JAX caches indices across a change of its precision.
    members, is_member = np.zeros((len(kinds), size), np.int32), np.zeros((len(kinds), size), bool)
    for row, mask, own in zip(members, is_member, found, strict=True):
        row[: len(own)], mask[: len(own)] = own, True
    return layout._replace(members=members, is_member=is_member, owner=np.array([kind[0] for kind in kinds], np.int32))


def _num_entries(layout: Layout) -> int:
    return layout.members.size * layout.members.shape[1]


def _around_cores(layout: Layout, groups: Bool[np.ndarray, "terms D"]) -> Layout:
    """Order the members of each block as an arrow matrix, leaves first, if that saves work."""
    read = groups.astype(np.float32)
    is_connected = read.T @ read > 0
    blocks = [members[inside] for members, inside in zip(layout.members, layout.is_member, strict=True)]
    plans = [_leaves_and_core(is_connected[np.ix_(block, block)]) for block in blocks]
    num_leaves = max(len(leaves) for leaves, _ in plans)
    leaf_size = max((len(leaf) for leaves, _ in plans for leaf in leaves), default=0)
    num_core = max(len(core) for _, core in plans)
    if _work(num_leaves, leaf_size, num_core) >= _work(0, 0, layout.members.shape[1]):
        return layout
    shape = len(blocks), num_leaves * leaf_size + num_core
    members, is_member = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for row, mask, block, (leaves, core) in zip(members, is_member, blocks, plans, strict=True):
        starts = [*(leaf_size * number for number in range(len(leaves))), num_leaves * leaf_size]
        for start, own in zip(starts, [*leaves, core], strict=True):
            row[start : start + len(own)], mask[start : start + len(own)] = block[own], True
    return layout._replace(members=members, is_member=is_member, leaves=(num_leaves, leaf_size))


def _leaves_and_core(is_connected: Bool[np.ndarray, "n n"]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return leaves and core of a block: the core is the set of reals with the most neighbours that minimises the work."""
    degree, everything = is_connected.sum(axis=1), np.arange(len(is_connected))
    best: tuple[list[np.ndarray], np.ndarray] = [], everything
    least = _work(0, 0, len(is_connected))
    for level in np.unique(degree):
        rest, core = everything[degree <= level], everything[degree > level]
        label = connected_components(is_connected[np.ix_(rest, rest)])
        leaves = [rest[label == own] for own in np.unique(label)]
        size = max(map(len, leaves))
        if size <= _MAX_LEAF and _work(len(leaves), size, len(core)) < least:
            best, least = (leaves, core), _work(len(leaves), size, len(core))
    return best


def _work(num_leaves: int, leaf_size: int, num_core: int) -> int:
    """Return the number of multiplications of eliminating an arrow matrix."""
    return num_leaves * leaf_size * (leaf_size + num_core) ** 2 + num_core**3


def _terms_of_reals(model: RewardModel, layout: Layout) -> Bool[np.ndarray, "terms D"]:
    """Return which reals each term of the prior, and the likelihood of a row of each arm, depends on."""
    sites = layout.of(REAL)
    arms = np.arange(model.num_arms)

    def terms(
        real: Float[Array, " D"], others: Mapping[str, Array], outcomes: Mapping[str, Array], context: Any
    ) -> Float[Array, " terms"]:
        own = {site.name: real[site.start : site.start + site.size].reshape(site.shape) for site in sites}
        trace = model.trace({**others, **own}, jnp.asarray(arms), context, outcomes)
        prior = [log_prob_terms(site) for name, site in trace.items() if is_prior_term(name, site, model.outcomes)]
        return jnp.concatenate([*prior, *(jnp.ravel(log_prob(trace[name])) for name in model.outcomes)])

    def data() -> tuple[Any, ...]:
        others = {site.name: jnp.ones(site.shape) for site in layout.sites if site.kind != REAL}
        outcomes = model.zero_outcomes(model.num_arms)
        return others, outcomes, model.context_rows(model.num_arms)

    return entries_read(terms, layout.count(REAL), jax.eval_shape(data))


def _terms_of_step(model: RewardModel, layout: Layout) -> Bool[np.ndarray, "terms D"]:
    """Return which reals each term of a step depends on, before or after it."""
    sites, num_real = layout.of(REAL), layout.count(REAL)

    def terms(both: Float[Array, " 2D"], others: Mapping[str, Array], context: Any) -> Float[Array, " terms"]:
        before, after = (
            {site.name: real[site.span].reshape(site.shape) for site in sites} for real in both.reshape(2, num_real)
        )
        previous = {**others, **before}
        present = {**previous, **{name: after[name] for name in model.moving_sites if name in after}}
        trace = model.trace(present, jnp.zeros(1, int), context, previous=previous)
        return jnp.concatenate([log_prob_terms(trace[name]) for name in model.moving_sites])

    def data() -> tuple[Any, ...]:
        return {site.name: jnp.ones(site.shape) for site in layout.sites if site.kind != REAL}, model.context_rows(1)

    return np.logical_or(*np.split(entries_read(terms, 2 * num_real, jax.eval_shape(data)), 2, axis=1))
