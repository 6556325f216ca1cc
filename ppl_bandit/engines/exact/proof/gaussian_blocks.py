"""Which reals the prior or any datum may tie to each other: the blocks in which their joint Gaussian law is kept.

A precision matrix has an entry for every pair of reals, and most programs fill few of them: the weights of one arm say nothing
of another's. Which entries stay 0, whatever is observed, is followed through the program's jaxpr (`program.entries`). The
certificates do not rely on it: a tie that blocks leave out would be a deviation from the affine form.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact.families.layout import REAL, Layout
from ppl_bandit.program.jaxpr.entry_reads import connected_components, entries_read
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import is_prior_term, log_prob, log_prob_terms

__all__ = ["in_blocks", "tie"]

_MAX_LEAF = 8  # reals of one piece
_MAX_REALS = 2000  # beyond which a table of who reads whom is too large to be worth it


def tie(model: RewardModel, layout: Layout, *, around_cores: bool = False) -> Layout:
    """Cut the Gaussian blocks of a layout where no datum can tie their reals, given the other latents.

    Args:
        around_cores: whether to look, in each block, for a core without which it falls into small pieces, its leaves: the
            common mean of a hierarchy, and the arms that it ties.
    """
    if layout.members.shape[1] <= 1 or layout.count(REAL) > _MAX_REALS:
        return layout
    groups = _read_together(model, layout)
    finer = in_blocks(layout, layout.owner_of_real, connected_components(groups))
    # Blocks are filled up to the largest: one large among many small ones would take more room than all in one.
    layout = finer if _room(finer) <= _room(layout) else layout
    return _around_cores(layout, groups) if around_cores else layout


def in_blocks(layout: Layout, owner: Int[np.ndarray, " D"], label: Int[np.ndarray, " D"]) -> Layout:
    """Put reals into blocks of those that have the same owner, the positive element that scales them, and the same label."""
    pairs = list(zip(owner.tolist(), label.tolist(), strict=True))
    kinds = sorted(set(pairs), key=lambda kind: (kind[0] < 0, kind[0], pairs.index(kind)))
    found = [[place for place, pair in enumerate(pairs) if pair == kind] for kind in kinds]
    size = max(map(len, found), default=0)
    # Not int64: jax caches indices across a change of its precision.
    members, is_member = np.zeros((len(kinds), size), np.int32), np.zeros((len(kinds), size), bool)
    for row, mask, own in zip(members, is_member, found, strict=True):
        row[: len(own)], mask[: len(own)] = own, True
    return layout._replace(members=members, is_member=is_member, owner=np.array([kind[0] for kind in kinds], np.int32))


def _room(layout: Layout) -> int:
    return layout.members.size * layout.members.shape[1]


def _around_cores(layout: Layout, groups: Bool[np.ndarray, "terms D"]) -> Layout:
    """Put the members of each block into the order of an arrow, leaves first, where that saves work."""
    read = groups.astype(np.float32)
    ties = read.T @ read > 0
    blocks = [members[inside] for members, inside in zip(layout.members, layout.is_member, strict=True)]
    plans = [_leaves_and_core(ties[np.ix_(block, block)]) for block in blocks]
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


def _leaves_and_core(ties: Bool[np.ndarray, "n n"]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the pieces into which a block falls without those of its reals that have the most ties, and these."""
    degree, everything = ties.sum(axis=1), np.arange(len(ties))
    best: tuple[list[np.ndarray], np.ndarray] = [], everything
    least = _work(0, 0, len(ties))
    for level in np.unique(degree):
        rest, core = everything[degree <= level], everything[degree > level]
        label = connected_components(ties[np.ix_(rest, rest)])
        leaves = [rest[label == own] for own in np.unique(label)]
        size = max(map(len, leaves))
        if size <= _MAX_LEAF and _work(len(leaves), size, len(core)) < least:
            best, least = (leaves, core), _work(len(leaves), size, len(core))
    return best


def _work(num_leaves: int, leaf_size: int, num_core: int) -> int:
    """Return what eliminating an arrow takes, in multiplications."""
    return num_leaves * leaf_size * (leaf_size + num_core) ** 2 + num_core**3


def _read_together(model: RewardModel, layout: Layout) -> Bool[np.ndarray, "terms D"]:
    """Return which reals each term of the prior, or of the likelihood of an arm's rows, reads."""
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
        outcomes = model.outcome_values({name: jnp.zeros(model.num_arms) for name in model.outcomes})
        return others, outcomes, model.context_rows(model.num_arms)

    return entries_read(terms, layout.count(REAL), jax.eval_shape(data))
