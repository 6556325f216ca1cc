"""What is kept of the data, so that its statistics can be had at any outer value: sums that do not grow with the rows.

*Shared*: no outer site reaches the likelihood, and one sum serves all outer values. *Separable*: every statistic is a sum of
few products of a function of the outer value and a function of the row, eta(y, psi) = sum_k f_k(psi) s_k(y): unknown noise, a
spread that scales standard deviations. Then eta(y, psi) = eta(Y, psi) G^-1 eta(y, P) with a few rows Y, a few outer values P,
and the matrix G of statistics of Y at P (a skeleton decomposition): it suffices to keep the sums of eta(y, P). Elsewhere rows
are read again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ppl_bandit.engines.collapsed.inspection import Split, trial_rows
from ppl_bandit.engines.collapsed.outer import given
from ppl_bandit.engines.collapsed.statistics import Statistics, recentre_statistics, statistics_of, zero_statistics
from ppl_bandit.engines.exact.families.families import Coordinates, latents_at
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction

__all__ = ["DataSummary", "WeightedRows", "prior_statistics", "row_statistics", "separable_summary", "shared_summary"]

_MAX_RANK = 16
_MAX_ENTRIES = 20_000_000  # statistics looked at when the engine is built
_RESOLUTION = 1e-9  # of a statistic's largest value: what is smaller counts as rounding


class WeightedRows(NamedTuple):
    """Rows, and what the log likelihood of each counts for."""

    rows: Interaction
    weights: Float[Array, " N"]


class DataSummary(NamedTuple):
    """Functions of a pytree `kept`, in which sums over rows are linear, and of what they need of outer values, `at`.

    Of many outer values at once, here C of them, the last axis of every array goes over these.

    Attributes:
        words: what is kept, for people.
        empty: centre -> kept, of no data.
        read: (centre, outer values, data) -> kept of rows, and per row how far its statistics at these outer values are from
            what the summary says of them, relatively.
        at: (centre, outer values) -> what the statistics of rows depend on, whatever the rows.
        total: (statistics of the prior, kept, at) -> those of prior and all rows, (..., C), without the common constant.
        size: (kept, at) -> how large the terms are of which the constant of these statistics is made, (C,) or (1,).
        common: kept -> the constant that all outer values share.
        recentred: (kept, old centre, new centre) -> kept; None where the centre must stay.
    """

    description: str
    empty: Callable[[Coordinates], Any]
    summarize: Callable[[Coordinates, Mapping[str, Array], WeightedRows], tuple[Any, Float[Array, " N"]]]
    at: Callable[[Coordinates, Mapping[str, Array]], Any]
    total: Callable[[Statistics, Any, Any], Statistics]
    constant_magnitude: Callable[[Any, Any], Float[Array, " C"]]
    common_constant: Callable[[Any], Float[Array, ""]]
    recentre: Callable[[Any, Coordinates, Coordinates], Any] | None


def prior_statistics(model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array]) -> Statistics:
    """Return the statistics of the prior of inner and outer sites, at outer values."""
    view = given(model, values)
    return statistics_of(split.layout, lambda point: view.log_prior(latents_at(split.layout, point)), centre)


def row_statistics(
    model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array], data: WeightedRows
) -> Statistics:
    """Return the statistics of weighted rows, all together, at outer values."""
    view = given(model, values)

    def log_likelihood(point: Coordinates) -> Float[Array, ""]:
        return data.weights @ view.log_likelihood(latents_at(split.layout, point), data.rows)

    return statistics_of(split.layout, log_likelihood, centre)


def shared_summary(model: RewardModel, split: Split) -> DataSummary:
    """Return the summary of a program whose likelihood no outer site reaches."""

    def read(centre: Coordinates, values: Mapping[str, Array], data: WeightedRows) -> tuple[Statistics, Array]:
        return row_statistics(model, split, centre, values, data), jnp.zeros(data.weights.shape, centre.real.dtype)

    return DataSummary(
        "one sum of statistics, shared by all particles",
        lambda centre: zero_statistics(split.layout, centre),
        read,
        lambda centre, values: (),
        # What all particles share is left out of their targets, where it would only cost digits.
        lambda prior, kept, at: Statistics(
            jax.tree.map(lambda own, shared: own + shared[..., None], prior.natural, kept.natural), prior.constant
        ),
        lambda kept, at: jnp.zeros_like(kept.constant)[None],
        lambda kept: kept.constant,
        lambda kept, old, new: recentre_statistics(split.layout, kept, old, new),
    )


def separable_summary(model: RewardModel, split: Split, examples: Interaction | None = None) -> DataSummary | None:
    """Return the summary of a program whose statistics are separable, or None where they are not; runs in float64.

    Args:
        examples: rows whose statistics have to be, too.
    """
    values, per_arm = split.values, 6
    num_values = len(next(iter(values.values())))
    forms = jax.eval_shape(lambda: zero_statistics(split.layout, jax.tree.map(jnp.asarray, split.centre)))
    num_statistics = sum(form.size for form in jax.tree.leaves(forms))
    if num_values * per_arm * model.num_arms * num_statistics > _MAX_ENTRIES:
        return None

    def measure() -> tuple[Array, Interaction]:
        outer, centre = jax.tree.map(jnp.asarray, (values, split.centre))
        anywhere = {**latents_at(split.layout, centre), **{name: value[0] for name, value in outer.items()}}
        rows = trial_rows(model, anywhere, per_arm, seed=29, examples=examples)
        found = jax.lax.map(lambda own: _read_each(model, split, centre, own, rows), outer)
        return found, rows

    found, rows = run_once(measure)
    is_sound = np.asarray(rows.mask) & np.all(np.isfinite(found), axis=(0, 2))
    if len(set(rows.arm[is_sound].tolist())) < model.num_arms:
        return None
    # The last third of an arm's rows is held back.
    may_pick = np.arange(is_sound.size)[is_sound] < 2 * is_sound.size // 3
    pivots = _skeleton(found[:, is_sound], may_pick)
    if pivots is None:
        return None
    outer_picks, row_picks, weights = pivots
    chosen = np.flatnonzero(is_sound)[row_picks]
    anchors = jax.tree.map(lambda leaf: leaf[chosen], rows)
    outer = {name: value[outer_picks] for name, value in values.items()}

    def as_used(tree: Any, dtype: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf, dtype if np.issubdtype(leaf.dtype, np.floating) else None), tree
        )

    def combine(at_values: Array, sums: Array) -> Array:
        """Return statistics, given those of the chosen rows at outer values, (Y, J), and sums at the chosen values, (P, J)."""
        # The second product first: it is the same for all outer values.
        return jnp.einsum("yj,jy->j", at_values, jnp.einsum("jyp,pj->jy", jnp.asarray(weights, sums.dtype), sums))

    def read(centre: Coordinates, own: Mapping[str, Array], data: WeightedRows) -> tuple[Array, Array]:
        dtype = centre.real.dtype
        refs = as_used(outer, dtype)
        kept = jax.vmap(lambda at: _read_each(model, split, centre, at, data.rows), out_axes=1)(refs)  # (N, P, J)
        there = _read_each(model, split, centre, own, as_used(anchors, dtype))
        expected = jax.vmap(lambda sums: combine(there, sums))(kept)
        actual = _read_each(model, split, centre, own, data.rows)
        # Relative to the largest terms that were combined: what they lose in cancelling is rounding.
        sizes = jnp.einsum("yj,jyp,npj->nj", jnp.abs(there), jnp.abs(jnp.asarray(weights, dtype)), jnp.abs(kept))
        gap = jnp.abs(expected - actual) / jnp.maximum(sizes + jnp.abs(actual), jnp.finfo(dtype).tiny)
        residual = jnp.max(jnp.where(sizes + jnp.abs(actual) > 0, gap, 0.0), axis=1)
        counted = data.weights > 0
        total = jnp.einsum("n,npj->pj", data.weights, jnp.where(counted[:, None, None], kept, 0.0))
        limit = 1e-10 if dtype == jnp.float64 else 3e-3  # of a relative deviation that rounding explains
        return total, jnp.where(counted, jnp.where(jnp.isnan(residual), jnp.inf, residual / limit), 0.0)

    # Of the table of statistics of the chosen rows, entries (row, statistic) that count: for most statistics a row or none.
    entry_j, entry_y = np.nonzero(np.any(weights != 0.0, axis=2))
    entry_weights = weights[entry_j, entry_y]
    last = entry_j == num_statistics - 1  # the constant is the last of the statistics

    def at(centre: Coordinates, own: Mapping[str, Array]) -> Array:
        return _read_each(model, split, centre, own, as_used(anchors, centre.real.dtype))[entry_y, entry_j]

    def total(prior: Statistics, kept: Array, at: Array) -> Statistics:
        factors = jnp.einsum("ep,pe->e", jnp.asarray(entry_weights, kept.dtype), kept[:, entry_j])
        terms = factors[:, None] * at
        leaves, treedef = jax.tree.flatten(prior)
        ends = np.cumsum([leaf.size // at.shape[-1] for leaf in leaves])
        found = []
        for leaf, start, end in zip(leaves, [0, *ends], ends, strict=False):
            own = (entry_j >= start) & (entry_j < end)
            # Added to the few entries that rows reach: a sum of whole matrices takes three times as long.
            flat = leaf.reshape(end - start, at.shape[-1])
            found.append(flat.at[entry_j[own] - start].add(terms[own]).reshape(leaf.shape) if own.any() else leaf)
        return jax.tree.unflatten(treedef, found)

    def size(kept: Array, at: Array) -> Array:
        sizes = jnp.asarray(np.abs(entry_weights[last]), kept.dtype) @ jnp.abs(kept[:, -1])
        return sizes @ jnp.abs(at[last])

    return DataSummary(
        f"sums of statistics at {len(outer_picks)} outer values, from which those at any other follow by linear algebra",
        lambda centre: jnp.zeros((len(outer_picks), num_statistics), centre.real.dtype),
        read,
        at,
        total,
        size,
        lambda kept: jnp.zeros((), kept.dtype),
        None,
    )


def _read_each(
    model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array], rows: Interaction
) -> Float[Array, "N J"]:
    """Return each row's statistics as a vector."""

    def one(row: Any) -> Array:
        single = jax.tree.map(lambda leaf: leaf[None], row._replace(mask=None))
        data = WeightedRows(single, jnp.ones(1, centre.real.dtype))
        return ravel_pytree(row_statistics(model, split, centre, values, data))[0]

    return jax.vmap(one)(rows)


def _skeleton(found: Float[Array, "V N J"], may_row: np.ndarray) -> tuple[list[int], list[int], np.ndarray] | None:
    """Return outer values and rows from which all statistics follow, and how; None where no few of them do.

    Cross approximation, one statistic after another, with complete pivoting, but a pivot that others use already is taken where
    it is nearly as large. Some rows and outer values are not used for pivots: what was found has to hold there too.

    Returns:
        Indices of outer values (P) and of rows (Y), and weights (J, Y, P).
    """
    num_values, _, num_statistics = found.shape
    may_value = np.arange(num_values) % 3 != 2
    picks_v: list[int] = []
    picks_y: list[int] = []
    parts: list[tuple[list[int], list[int], np.ndarray]] = []
    for j in range(num_statistics):
        matrix = found[:, :, j]
        rest = matrix.copy()
        scale = np.abs(matrix).max()
        own_v: list[int] = []
        own_y: list[int] = []
        while np.abs(rest).max() > _RESOLUTION * scale and scale > 0:
            if len(own_v) == _MAX_RANK:
                return None
            usable = np.abs(rest) * may_value[:, None] * may_row
            known = np.zeros_like(usable)
            known[np.ix_(picks_v, picks_y)] = usable[np.ix_(picks_v, picks_y)]
            known_v = np.zeros_like(usable)
            known_v[picks_v] = usable[picks_v]
            largest = usable.max()
            best = next(
                option for option in (known, known_v, usable) if option.max() > 0.05 * largest or option is usable
            )
            if not best.max() > _RESOLUTION * scale:
                return None
            v, y = np.unravel_index(np.argmax(best), best.shape)
            rest = rest - np.outer(rest[:, y], rest[v]) / rest[v, y]
            own_v.append(int(v))
            own_y.append(int(y))
            picks_v += [int(v)] if int(v) not in picks_v else []
            picks_y += [int(y)] if int(y) not in picks_y else []
        parts.append((own_v, own_y, np.linalg.inv(matrix[np.ix_(own_v, own_y)]) if own_v else np.zeros((0, 0))))
    if not picks_v:
        return None
    weights = np.zeros((num_statistics, len(picks_y), len(picks_v)))
    for j, (own_v, own_y, inverse) in enumerate(parts):
        at = np.ix_([picks_y.index(y) for y in own_y], [picks_v.index(v) for v in own_v])
        weights[j][at] = inverse
    return picks_v, picks_y, weights
