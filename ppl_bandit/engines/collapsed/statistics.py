"""Conjugate densities of the inner sites: natural parameters, a constant, and the integral over the inner sites.

Given the outer sites psi, a prior and rows of data are conjugate in the inner sites theta:

    log p(theta, psi) = <eta_0(psi), T(theta)> + c_0(psi),    log p(y | theta, psi) = <eta(y, psi), T(theta)> + c(y, psi)

so that theta is integrated out in closed form: log p(psi, y) = A(eta_0 + sum eta) + c_0 + sum c, with A(eta) the logarithm of
the integral of exp <eta, T(theta)> over theta.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.families.derivation import derive
from ppl_bandit.engines.exact.families.families import Coordinates, Layout, Natural, blocks_of, by_owner
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow
from ppl_bandit.numerics.log_gamma import betaln, gammaln

__all__ = [
    "Statistics",
    "add_statistics",
    "one_element_change",
    "changes_one_element",
    "has_only_elements",
    "log_normalizer",
    "zero_statistics",
    "precision_of",
    "recentre_statistics",
    "statistics_of",
]


class Statistics(NamedTuple):
    """A log density of the inner sites, <natural, T(theta)> + constant; real sites are relative to a centre."""

    natural: Natural
    constant: Float[Array, ""]


def statistics_of(layout: Layout, log_density: Callable[[Coordinates], Array], centre: Coordinates) -> Statistics:
    """Return the statistics of a log density that is proved affine in the sufficient statistics."""
    natural = derive(layout, log_density, centre, as_arrow=True)
    return Statistics(natural, log_density(centre) - _at_centre(natural, centre))


def _at_centre(natural: Natural, centre: Coordinates) -> Array:
    """Return <natural, T(centre)>; the terms of real sites vanish there."""
    terms = [
        natural.unit[:, 0] @ jax.nn.log_sigmoid(centre.unit) + natural.unit[:, 1] @ jax.nn.log_sigmoid(-centre.unit),
        natural.log_scale @ centre.positive + natural.scale @ jnp.exp(centre.positive),
        *(
            jnp.sum(eta * jax.nn.log_softmax(logits, axis=-1))
            for eta, logits in zip(natural.simplex, centre.simplex, strict=True)
        ),
    ]
    return sum(terms, start=jnp.zeros((), centre.real.dtype))


def zero_statistics(layout: Layout, centre: Coordinates) -> Statistics:
    """Return the statistics of no data."""
    num_positive, (num_blocks, size) = layout.power.size, layout.members.shape
    dtype = centre.real.dtype
    quadratic = arrow_matrices.as_arrow(np.zeros((num_blocks, size, size)), *layout.leaves)
    natural = Natural(
        jnp.zeros((centre.unit.size, 2), dtype),
        tuple(jnp.zeros_like(logits) for logits in centre.simplex),
        jnp.zeros(num_positive, dtype),
        jnp.zeros(num_positive, dtype),
        jnp.zeros((num_blocks, size), dtype),
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), quadratic),
    )
    return Statistics(natural, jnp.zeros((), dtype))


def add_statistics(*parts: Statistics) -> Statistics:
    """Return the statistics of a product of densities with the same centre."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *parts)


def recentre_statistics(layout: Layout, statistics: Statistics, old: Coordinates, new: Coordinates) -> Statistics:
    """Return the same density with its real sites relative to another centre."""
    natural, constant = statistics
    x = blocks_of(layout, new.real - old.real)
    bend = arrow_matrices.times(natural.quadratic, x)
    gain = jnp.sum((natural.linear - 0.5 * bend) * x, axis=-1)
    return Statistics(
        natural._replace(scale=natural.scale + by_owner(layout, gain), linear=natural.linear - bend),
        constant + jnp.sum(gain[layout.owner < 0]),
    )


def log_normalizer(layout: Layout, natural: Natural) -> Float[Array, "*batch"]:
    """Return A, the log integral of exp <natural, T(theta)> over theta; it is not finite if there is no integral.

    Args:
        natural: batch axes are the last axes of every array.
    """
    batch = natural.linear.shape[2:]
    terms = []
    if natural.unit.size:
        terms.append(jnp.sum(_units(natural.unit[:, 0], natural.unit[:, 1]), axis=0))
    for site in layout.of("unit"):
        terms.append(jnp.sum(jnp.log(jnp.broadcast_to(jnp.asarray(site.high - site.low, float), site.shape))))
    for rows in natural.simplex:
        whole = gammaln(jnp.sum(rows + 1.0, axis=1))
        terms.append(jnp.sum(gammaln(rows + 1.0), axis=(0, 1)) - jnp.sum(whole, axis=0))
    gain = jnp.zeros((0, *batch))
    if layout.members.size:
        gain, log_det = arrow_matrices.gaussian_integral(precision_of(layout, natural), natural.linear)
        constant = 0.5 * np.log(2.0 * np.pi) * layout.is_member.sum()
        terms.append(constant + jnp.sum(gain[layout.owner < 0], axis=0) - 0.5 * jnp.sum(log_det, axis=0))
    if layout.power.size:
        # With u = z^power, dz contributes u^(1/power - 1), and each real site that u scales contributes u^(-1/2).
        shape = natural.log_scale + _append_axes(1.0 / layout.power - 0.5 * layout.num_scaled, batch)
        terms.append(jnp.sum(_scales(shape, -natural.scale - by_owner(layout, gain)), axis=0))
        terms.append(jnp.asarray(-np.sum(np.log(np.abs(layout.power))), float))
    return sum(terms, start=jnp.zeros(batch))


def precision_of(layout: Layout, natural: Natural) -> Arrow:
    """Return the precisions of the Gaussian blocks, with 1 on the diagonal of padding; batch axes come last."""
    padding = arrow_matrices.as_arrow(np.eye(layout.members.shape[1]) * ~layout.is_member[:, :, None], *layout.leaves)
    batch = natural.linear.shape[2:]
    return jax.tree.map(
        lambda own, more: own + _append_axes(more, batch) if more.any() else own, natural.quadratic, padding
    )


def _append_axes(values: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
    """Append axes of length 1 for the axes of a batch."""
    return values.reshape(*values.shape, *(1 for _ in batch))


def has_only_elements(layout: Layout) -> bool:
    """Tell whether A is a sum over single elements: the inner sites are probabilities and rates alone."""
    return not layout.members.size and not layout.of("simplex")


def changes_one_element(fresh: Natural) -> Bool[Array, ""]:
    """Tell whether rows inform at most one probability and one rate."""
    return (jnp.sum(_changed_units(fresh)) <= 1) & (jnp.sum(_changed_scales(fresh)) <= 1)


def one_element_change(layout: Layout, before: Natural, fresh: Natural) -> Float[Array, ""]:
    """Return the change of A by rows that inform one element of each kind, in constant time.

    Args:
        before: natural parameters without the rows.
        fresh: natural parameters of the rows, of a layout that has only elements.
    """
    terms = []
    if fresh.unit.size:
        index = jnp.argmax(_changed_units(fresh))
        terms.append(_change_of_unit(before.unit[index], fresh.unit[index]))
    if layout.power.size:
        index = jnp.argmax(_changed_scales(fresh))
        shape, rate = before.log_scale[index] + 1.0 / jnp.asarray(layout.power)[index], -before.scale[index]
        after = _scales(shape + fresh.log_scale[index], rate - fresh.scale[index])
        terms.append(after - _scales(shape, rate))
    return sum(terms, start=jnp.zeros(()))


def _change_of_unit(old: Float[Array, " 2"], new: Float[Array, " 2"]) -> Float[Array, ""]:
    """Return the change by new successes and failures; for one trial it is the log of its predictive probability."""
    successes, failures = old[0] + 1.0, old[1] + 1.0
    is_success, is_failure = (jnp.all(new == np.array(trial)) for trial in ((1.0, 0.0), (0.0, 1.0)))

    def of_one_trial() -> Array:
        return jnp.log(jnp.where(is_success, successes, failures) / (successes + failures))

    return jax.lax.cond(is_success | is_failure, of_one_trial, lambda: _units(*(old + new)) - _units(*old))


def _changed_units(fresh: Natural) -> Bool[Array, " U"]:
    return jnp.any(fresh.unit != 0, axis=1)


def _changed_scales(fresh: Natural) -> Bool[Array, " G"]:
    return (fresh.log_scale != 0) | (fresh.scale != 0)


def _units(successes: Float[Array, "*U"], failures: Float[Array, "*U"]) -> Float[Array, "*U"]:
    return betaln(successes + 1.0, failures + 1.0)


def _scales(shape: Float[Array, "*G"], rate: Float[Array, "*G"]) -> Float[Array, "*G"]:
    # For a negative shape log gamma is finite, and the integral does not exist.
    return jnp.where(shape > 0, gammaln(shape) - shape * jnp.log(rate), jnp.nan)
