"""Summaries of the data of constant size, from which its statistics at any outer value follow.

*Shared*: the likelihood does not depend on outer sites, and one sum of statistics serves all outer values. *Separable*: every
statistic is a short sum of products of a function of the outer value and a function of the row, eta(y, psi) = sum_k f_k(psi)
s_k(y), as with unknown noise or a scale of standard deviations. Then eta(y, psi) = eta(Y, psi) G^-1 eta(y, P) with a few rows
Y, a few outer values P, and the matrix G of statistics of Y at P (a skeleton decomposition), so that the sums of eta(y, P)
suffice. For other programs there is no summary, and rows are read again.

Conjugate densities of the inner sites: natural parameters, a constant, and the integral over the inner sites.

Given the outer sites psi, a prior and rows of data are conjugate in the inner sites theta:

    log p(theta, psi) = <eta_0(psi), T(theta)> + c_0(psi),    log p(y | theta, psi) = <eta(y, psi), T(theta)> + c(y, psi)

so that theta is integrated out in closed form: log p(psi, y) = A(eta_0 + sum eta) + c_0 + sum c, with A(eta) the logarithm of
the integral of exp <eta, T(theta)> over theta.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.inner.density import Coordinates, Natural, latents_at, log_integral, relative_to
from ppl_bandit.engines.inner.gaussian import padding, sum_by_owner
from ppl_bandit.engines.inner.layout import POSITIVE, UNIT, Layout
from ppl_bandit.engines.inner.reading import derive
from ppl_bandit.engines.inner.registry import family_of_group
from ppl_bandit.engines.proof.inspection import Split, masked_trial_rows
from ppl_bandit.engines.proof.outer import given
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow
from ppl_bandit.numerics.sampling import betaln
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction


def no_rows(layout: Layout, centre: Coordinates) -> Natural:
    """Return the natural parameters of no data."""
    (num_blocks, size), dtype = layout.members.shape, centre.real.dtype
    elements = {
        group: jnp.zeros(own.shape if family_of_group(group).num_event_dims else (*own.shape, 2), dtype)
        for group, own in centre.elements.items()
    }
    quadratic = arrow_matrices.as_arrow(np.zeros((num_blocks, size, size)), *layout.leaves)
    return Natural(
        elements,
        jnp.zeros((num_blocks, size), dtype),
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), quadratic),
        jnp.zeros((), dtype),
    )


def log_normalizer(
    layout: Layout, natural: Natural, gaussian: tuple[Array, Array] | None = None
) -> Float[Array, "*batch"]:
    """Return A, the log integral of exp <natural, T(theta)> over theta, without the constant; not finite if there is none.

    Args:
        natural: batch axes are the last axes of every array.
        gaussian: the result of `gaussian_integral` for the Gaussian blocks, if known; `natural.quadratic` is not read then.
    """
    batch = natural.linear.shape[2:]
    elements, total, log_dets = _parameters(layout, natural, batch), jnp.zeros(batch), None
    if layout.members.size:
        if gaussian is None:
            gaussian = arrow_matrices.gaussian_integral(precision_of(layout, natural), natural.linear)
        gain, log_dets = gaussian
        total = jnp.sum(gain[layout.owner < 0], axis=0)
        if layout.is_scaled:
            shape, rate = elements[POSITIVE][:, 0], elements[POSITIVE][:, 1] - sum_by_owner(layout, gain)
            elements[POSITIVE] = jnp.stack([shape, rate], axis=1)
    return total + log_integral(layout, elements, log_dets)


def _parameters(layout: Layout, natural: Natural, batch: tuple[int, ...] = ()) -> dict[str, Array]:
    """Return the parameters of the elements, without the Gaussian blocks; batch axes come last."""
    found = {}
    for group, own in natural.elements.items():
        family = family_of_group(group)
        base, sign = (
            np.asarray(np.broadcast_to(value, own.shape[: own.ndim - len(batch)]), own.dtype)
            for value in (family.base(layout), family.sign)
        )
        found[group] = _append_axes(base, batch) + _append_axes(sign, batch) * own
    return found


def precision_of(layout: Layout, natural: Natural) -> Arrow:
    """Return the precisions of the Gaussian blocks, with 1 on the diagonal of padding; batch axes come last."""
    blocks = arrow_matrices.as_arrow(padding(layout, float), *layout.leaves)
    batch = natural.linear.shape[2:]
    return jax.tree.map(
        lambda own, more: own + _append_axes(more, batch) if more.any() else own, natural.quadratic, blocks
    )


def _append_axes(values: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
    """Append axes of length 1 for the axes of a batch."""
    return values.reshape(*values.shape, *(1 for _ in batch))


def has_only_elements(layout: Layout) -> bool:
    """Tell whether A is a sum over elements that have an integral each: probabilities and rates alone."""
    return not layout.members.size and all(site.kind in (UNIT, POSITIVE) for site in layout.sites)


def changes_one_element(fresh: Natural) -> Bool[Array, ""]:
    """Tell whether rows change at most one element of each group."""
    return jnp.all(jnp.stack([jnp.sum(_is_changed(own)) <= 1 for own in fresh.elements.values()]))


def one_element_change(layout: Layout, before: Natural, fresh: Natural) -> Float[Array, ""]:
    """Return how A changes by rows that change one element of each group: two integrals of each, however many elements.

    Args:
        before: natural parameters without the rows.
        fresh: natural parameters of the rows, of a layout that has only elements.
    """
    old = _parameters(layout, before)
    new = _parameters(layout, jax.tree.map(jnp.add, before, fresh))
    terms = []
    for group, own in fresh.elements.items():
        index = jnp.argmax(_is_changed(own))
        if group == UNIT:
            terms.append(_beta_change(old[group][index], own[index]))
        else:
            log_normalizer = family_of_group(group).log_normalizer
            terms.append((log_normalizer(new[group][index][None]) - log_normalizer(old[group][index][None]))[0])
    return sum(terms, start=jnp.zeros(()))


def _beta_change(old: Float[Array, " 2"], new: Float[Array, " 2"]) -> Float[Array, ""]:
    """Return the change by new successes and failures: for one trial the log of its probability, without log gammas."""
    is_success, is_failure = (jnp.all(new == np.array(trial)) for trial in ((1.0, 0.0), (0.0, 1.0)))

    def of_one_trial() -> Array:
        return jnp.log(jnp.where(is_success, old[0], old[1]) / (old[0] + old[1]))

    return jax.lax.cond(is_success | is_failure, of_one_trial, lambda: betaln(*(old + new)) - betaln(*old))


def _is_changed(fresh: Float[Array, "E n"]) -> Bool[Array, " E"]:
    return jnp.any(fresh != 0, axis=1)


_MAX_RANK = 16  # products, of a function of outer values and one of a row, into which a statistic is separated
_MAX_ENTRIES = 20_000_000  # statistics that are evaluated when the engine is built
_MIN_ROWS_PER_ARM = 6  # four of them may be pivots, two test the decomposition
_ROWS_PER_OUTCOME = 64  # outcomes may mask each other: a pattern that one row in 16 has is missed with probability 3e-4
_RESOLUTION = 1e-9  # relative to the largest value of a statistic; smaller residuals are rounding


class WeightedRows(NamedTuple):
    """Rows, and the weights of their log likelihoods."""

    rows: Interaction
    weights: Float[Array, " N"]


class DataSummary(NamedTuple):
    """Functions of a summary of the data, a pytree in which sums over rows are linear.

    With C outer values at once, C is the last axis of every array.

    Attributes:
        description: what the summary contains, for `explain()`.
        empty: centre -> the summary of no data.
        summarize: (centre, outer values, data) -> the summary of rows, and for each row how far its statistics at these outer
            values are from those that follow from its summary, relative to the tolerance.
        at: (centre, outer values) -> what the statistics of any rows depend on.
        total: (statistics of the prior, summary, at) -> those of prior and all rows, (..., C), without the common constant,
            and without precisions if those of the prior are None.
        constant_magnitude: (summary, at) -> sum of the absolute terms in the constant of these statistics, (C,) or (1,).
        common_constant: summary -> the constant that all outer values share.
        recentre: (summary, old centre, new centre) -> summary; None if the centre must stay.
    """

    description: str
    empty: Callable[[Coordinates], Any]
    summarize: Callable[[Coordinates, Mapping[str, Array], WeightedRows], tuple[Any, Float[Array, " N"]]]
    at: Callable[[Coordinates, Mapping[str, Array]], Any]
    total: Callable[[Natural, Any, Any], Natural]
    constant_magnitude: Callable[[Any, Any], Float[Array, " C"]]
    common_constant: Callable[[Any], Float[Array, ""]]
    recentre: Callable[[Any, Coordinates, Coordinates], Any] | None


def prior_statistics(model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array]) -> Natural:
    """Return the statistics of the prior of all sites at outer values."""
    view = given(model, values)
    return derive(split.layout, lambda point: view.log_prior(latents_at(split.layout, point)), centre, as_arrow=True)


def row_statistics(
    model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array], data: WeightedRows
) -> Natural:
    """Return the sum of the statistics of weighted rows at outer values."""
    view = given(model, values)

    def log_likelihood(point: Coordinates) -> Float[Array, ""]:
        return data.weights @ view.log_likelihood(latents_at(split.layout, point), data.rows)

    return derive(split.layout, log_likelihood, centre, as_arrow=True)


def shared_summary(model: RewardModel, split: Split) -> DataSummary:
    """Return the summary of a program whose likelihood does not depend on outer sites."""

    def summarize(centre: Coordinates, values: Mapping[str, Array], data: WeightedRows) -> tuple[Natural, Array]:
        return row_statistics(model, split, centre, values, data), jnp.zeros(data.weights.shape, centre.real.dtype)

    def total(prior: Natural, summary: Natural, at: Any) -> Natural:
        shared = summary if prior.quadratic is not None else summary._replace(quadratic=None)
        # The common constant is left out of the targets, where it would only cost digits.
        return jax.tree.map(lambda own, all_: own + all_[..., None], prior, shared)._replace(constant=prior.constant)

    return DataSummary(
        "one sum of statistics, shared by all particles",
        lambda centre: no_rows(split.layout, centre),
        summarize,
        lambda centre, values: (),
        total,
        lambda summary, at: jnp.zeros_like(summary.constant)[None],
        lambda summary: summary.constant,
        lambda summary, old, new: relative_to(split.layout, summary, old, new),
    )


def separable_summary(model: RewardModel, split: Split, examples: Interaction | None = None) -> DataSummary | None:
    """Return the summary of a program with separable statistics, or None for other programs; it runs in float64.

    Args:
        examples: further rows whose statistics must be separable.
    """
    values, num_outcomes = split.values, len(model.outcomes)
    num_values = len(next(iter(values.values())))
    forms = jax.eval_shape(lambda: no_rows(split.layout, jax.tree.map(jnp.asarray, split.centre)))
    num_statistics = sum(form.size for form in jax.tree.leaves(forms))
    most = _MAX_ENTRIES // (num_values * model.num_arms * num_statistics)
    if most < _MIN_ROWS_PER_ARM:
        return None
    per_arm = _MIN_ROWS_PER_ARM if num_outcomes == 1 else min(most, _ROWS_PER_OUTCOME * num_outcomes)

    def measure() -> tuple[Array, Interaction]:
        outer, centre = jax.tree.map(jnp.asarray, (values, split.centre))
        latents = {**latents_at(split.layout, centre), **{name: value[0] for name, value in outer.items()}}
        rows = masked_trial_rows(model, latents, per_arm, seed=29, examples=examples, is_systematic=True)
        found = jax.lax.map(lambda own: _statistics_of_each(model, split, centre, own, rows), outer)
        return found, rows

    found, rows = run_once(measure)
    is_usable = np.asarray(rows.mask) & np.all(np.isfinite(found), axis=(0, 2))
    if len(set(rows.arm[is_usable].tolist())) < model.num_arms:
        return None
    # The last third of the rows is held out to test the decomposition.
    may_be_pivot = np.arange(is_usable.size)[is_usable] < 2 * is_usable.size // 3
    pivots = _skeleton(found[:, is_usable], may_be_pivot)
    if pivots is None:
        return None
    outer_picks, row_picks, weights = pivots
    chosen = np.flatnonzero(is_usable)[row_picks]
    anchors = jax.tree.map(lambda leaf: leaf[chosen], rows)
    outer = {name: value[outer_picks] for name, value in values.items()}

    def combine(at_values: Array, sums: Array) -> Array:
        """Return statistics, given those of the chosen rows at outer values, (Y, J), and sums at the chosen values, (P, J)."""
        # The inner product does not depend on the outer value.
        return jnp.einsum("yj,jy->j", at_values, jnp.einsum("jyp,pj->jy", jnp.asarray(weights, sums.dtype), sums))

    def summarize(centre: Coordinates, own: Mapping[str, Array], data: WeightedRows) -> tuple[Array, Array]:
        dtype = centre.real.dtype
        refs = _cast(outer, dtype)
        summary = jax.vmap(lambda at: _statistics_of_each(model, split, centre, at, data.rows), out_axes=1)(
            refs
        )  # (N, P, J)
        there = _statistics_of_each(model, split, centre, own, _cast(anchors, dtype))
        expected = jax.vmap(lambda sums: combine(there, sums))(summary)
        actual = _statistics_of_each(model, split, centre, own, data.rows)
        # Relative to the sum of absolute terms: cancellation is rounding. The constant is what remains of the log likelihood.
        sizes = jnp.einsum("yj,jyp,npj->nj", jnp.abs(there), jnp.abs(jnp.asarray(weights, dtype)), jnp.abs(summary))
        log_likelihood = given(model, own).log_likelihood(latents_at(split.layout, centre), data.rows)
        sizes = (sizes + jnp.abs(actual)).at[:, -1].add(jnp.abs(log_likelihood))
        gap = jnp.abs(expected - actual) / jnp.maximum(sizes, jnp.finfo(dtype).tiny)
        residual = jnp.max(jnp.where(sizes > 0, gap, 0.0), axis=1)
        counted = data.weights > 0
        total = jnp.einsum("n,npj->pj", data.weights, jnp.where(counted[:, None, None], summary, 0.0))
        limit = 1e-10 if dtype == jnp.float64 else 3e-3  # largest relative deviation by rounding
        return total, jnp.where(counted, jnp.where(jnp.isnan(residual), jnp.inf, residual / limit), 0.0)

    # Entries (statistic, row) with a nonzero weight: for most statistics one row or none.
    entry_j, entry_y = np.nonzero(np.any(weights != 0.0, axis=2))
    entry_weights = weights[entry_j, entry_y]
    last = entry_j == num_statistics - 1  # the constant is the last of the statistics

    def at(centre: Coordinates, own: Mapping[str, Array]) -> Array:
        return _statistics_of_each(model, split, centre, own, _cast(anchors, centre.real.dtype))[entry_y, entry_j]

    def total(prior: Natural, summary: Array, at: Array) -> Natural:
        factors = jnp.einsum("ep,pe->e", jnp.asarray(entry_weights, summary.dtype), summary[:, entry_j])
        terms = factors[:, None] * at
        leaves, treedef = jax.tree.flatten(prior)
        ends = np.cumsum([leaf.size // at.shape[-1] for leaf in leaves])
        found = []
        for leaf, start, end in zip(leaves, [0, *ends], ends, strict=False):
            own = (entry_j >= start) & (entry_j < end)
            # Add to the few entries that rows change: adding whole matrices takes three times as long.
            flat = leaf.reshape(end - start, at.shape[-1])
            found.append(flat.at[entry_j[own] - start].add(terms[own]).reshape(leaf.shape) if own.any() else leaf)
        return jax.tree.unflatten(treedef, found)

    def constant_magnitude(summary: Array, at: Array) -> Array:
        sizes = jnp.asarray(np.abs(entry_weights[last]), summary.dtype) @ jnp.abs(summary[:, -1])
        return sizes @ jnp.abs(at[last])

    return DataSummary(
        f"sums of statistics at {len(outer_picks)} outer values, from which those at any other follow by linear algebra",
        lambda centre: jnp.zeros((len(outer_picks), num_statistics), centre.real.dtype),
        summarize,
        at,
        total,
        constant_magnitude,
        lambda summary: jnp.zeros((), summary.dtype),
        None,
    )


def _cast(tree: Any, dtype: Any) -> Any:
    """Return arrays with another floating-point precision."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype if np.issubdtype(leaf.dtype, np.floating) else None), tree)


def _statistics_of_each(
    model: RewardModel, split: Split, centre: Coordinates, values: Mapping[str, Array], rows: Interaction
) -> Float[Array, "N J"]:
    """Return the statistics of each row as a vector."""

    def one(row: Any) -> Array:
        single = jax.tree.map(lambda leaf: leaf[None], row._replace(mask=None))
        data = WeightedRows(single, jnp.ones(1, centre.real.dtype))
        return ravel_pytree(row_statistics(model, split, centre, values, data))[0]

    return jax.vmap(one)(rows)


def _skeleton(found: Float[Array, "V N J"], may_be_pivot: np.ndarray) -> tuple[list[int], list[int], np.ndarray] | None:
    """Return a skeleton decomposition of all statistics, or None if the rank is too large.

    Adaptive cross approximation with complete pivoting, one statistic after another. A pivot that earlier statistics use is
    preferred if it is nearly as large. A third of the rows and outer values is never a pivot and tests the decomposition.

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
            usable = np.abs(rest) * may_value[:, None] * may_be_pivot
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
