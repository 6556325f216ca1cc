"""Conjugate densities of the inner sites: natural parameters, a constant, and the integral over the inner sites.

Given the outer sites psi, a prior and rows of data are conjugate in the inner sites theta:

    log p(theta, psi) = <eta_0(psi), T(theta)> + c_0(psi),    log p(y | theta, psi) = <eta(y, psi), T(theta)> + c(y, psi)

so that theta is integrated out in closed form: log p(psi, y) = A(eta_0 + sum eta) + c_0 + sum c, with A(eta) the logarithm of
the integral of exp <eta, T(theta)> over theta.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.families.gaussian import padding, sum_by_owner
from ppl_bandit.engines.exact.families.layout import POSITIVE, UNIT, Layout
from ppl_bandit.engines.exact.families.posterior import Coordinates, Natural
from ppl_bandit.engines.exact.families.registry import FAMILIES, family_of_group
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow
from ppl_bandit.numerics.log_gamma import betaln


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
    terms = [
        jnp.asarray(FAMILIES[site.kind].log_volume(site, layout), float)
        for site in layout.sites
        if site.kind in FAMILIES
    ]
    elements = _parameters(layout, natural, batch)
    if layout.members.size:
        if gaussian is None:
            gaussian = arrow_matrices.gaussian_integral(precision_of(layout, natural), natural.linear)
        gain, log_det = gaussian
        constant = 0.5 * np.log(2.0 * np.pi) * layout.is_member.sum()
        terms.append(constant + jnp.sum(gain[layout.owner < 0], axis=0) - 0.5 * jnp.sum(log_det, axis=0))
        if layout.is_scaled:
            shape, rate = elements[POSITIVE][:, 0], elements[POSITIVE][:, 1] - sum_by_owner(layout, gain)
            elements[POSITIVE] = jnp.stack([shape, rate], axis=1)
    for group, parameters in elements.items():
        terms.append(jnp.sum(family_of_group(group).log_normalizer(parameters), axis=0))
    return sum(terms, start=jnp.zeros(batch))


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
