"""Which reals the prior or any datum may tie to each other: the blocks in which their joint Gaussian law is kept.

A precision matrix has an entry for every pair of reals, and most programs fill few of them: the weights of one arm say nothing
of another's. Which entries stay 0, whatever is observed, is followed through the program's jaxpr (`program.entries`). The
certificates do not rely on it: a tie that blocks leave out would be a deviation from the affine form.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.exact.families import REAL, Layout
from ppl_bandit.program.entries import entries_read, tied_together
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.program.tracing import is_prior_term, log_prob, log_prob_terms

__all__ = ["in_blocks", "tie"]

_MAX_REALS = 2000  # beyond which a table of who reads whom is too large to be worth it


def tie(model: RewardModel, layout: Layout) -> Layout:
    """Cut the Gaussian blocks of a layout where no datum can tie their reals, given the other latents."""
    if layout.members.shape[1] <= 1 or layout.count(REAL) > _MAX_REALS:
        return layout
    finer = in_blocks(layout, layout.owner_of_real, _ties(model, layout))
    # Blocks are filled up to the largest: one large among many small ones would take more room than all in one.
    return finer if _room(finer) <= _room(layout) else layout


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


def _ties(model: RewardModel, layout: Layout) -> Int[np.ndarray, " D"]:
    """Return a label for each real, the same where a term of the prior, or of the likelihood of an arm's rows, reads both."""
    sites = layout.of(REAL)
    arms = jnp.arange(model.num_arms)

    def terms(
        real: Float[Array, " D"], others: Mapping[str, Array], outcomes: Mapping[str, Array], context: Any
    ) -> Float[Array, " terms"]:
        own = {site.name: real[site.start : site.start + site.size].reshape(site.shape) for site in sites}
        trace = model.trace({**others, **own}, arms, context, outcomes)
        prior = [log_prob_terms(site) for name, site in trace.items() if is_prior_term(name, site, model.outcomes)]
        return jnp.concatenate([*prior, *(jnp.ravel(log_prob(trace[name])) for name in model.outcomes)])

    others = {site.name: jnp.ones(site.shape) for site in layout.sites if site.kind != REAL}
    outcomes = model.outcome_values({name: jnp.zeros(model.num_arms) for name in model.outcomes})
    data = (others, outcomes, model.context_rows(model.num_arms))
    return tied_together(entries_read(terms, layout.count(REAL), data))
