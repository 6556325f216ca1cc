"""Natural parameters and posterior parameters of all latents of a program, and the conjugate update.

A log density of the latents is <eta, T(z)> plus a constant. `Natural` holds eta and the constant, `Posterior` the parameters of
the distribution with that density, `Coordinates` a point. The coefficients of real elements are relative to a centre, usually
the current mean: sums of squares about a distant origin would lose all digits of a variance. Densities need not integrate to 1:
the density of prior and rows together integrates to the probability of the rows (`log_mass`).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.inner.gaussian import (
    blocks_of,
    by_block,
    log_determinants,
    padding,
    reals_of,
    solve_blocks,
    sum_by_owner,
    times_blocks,
    zero_padding,
)
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, SIMPLEX, UNIT, Layout, SiteBlock
from ppl_bandit.engines.inner.registry import FAMILIES, family_of_group, groups_of
from ppl_bandit.numerics import arrow_matrices, sampling
from ppl_bandit.numerics.arrow_matrices import Arrow
from ppl_bandit.types import Draws, Key


class Coordinates(NamedTuple):
    """A point in latent space.

    Attributes:
        elements: coordinates of the elements of each group, (E,) or (E, K).
        real: real elements.
    """

    elements: dict[str, Any]
    real: Float[Array, " D"]


class Natural(NamedTuple):
    """A log density: coefficients of the sufficient statistics, and a constant. Those of a product of densities add up.

    Attributes:
        elements: coefficients of each group's statistics, (E, n).
        linear: coefficients of u (x - centre), per Gaussian block.
        quadratic: coefficients of -u (x - centre)(x - centre)' / 2, (R, S, S) or an `Arrow`.
    """

    elements: dict[str, Any]
    linear: Float[Array, "R S"]
    quadratic: Any
    constant: Float[Array, ""]


class Posterior(NamedTuple):
    """Parameters of the distribution of all latents, and the constant of its density: the state of the exact engine.

    Attributes:
        elements: parameters of each group, (E, n): Beta (alpha, beta), Gamma (shape, rate) of u, Dirichlet concentrations.
        mean, precision: x | u ~ Normal(mean, inverse(u precision)) per Gaussian block, where the precision is (R, S, S) or an
            `Arrow`; padding has mean 0 and precision 1.
        num_rows: rows of data absorbed.
        constant: of the log density, whose coefficients are those of `natural_of`; see `log_mass`.
    """

    elements: dict[str, Any]
    mean: Float[Array, "R S"]
    precision: Any
    num_rows: Int[Array, ""]
    constant: Float[Array, ""]


def latents_at(layout: Layout, point: Coordinates) -> dict[str, Array]:
    """Return the program's latents at a point."""
    latents: dict[str, Array] = {}
    for site in layout.sites:
        if site.kind == REAL:
            latents[site.name] = point.real[site.span].reshape(site.shape)
        else:
            value = FAMILIES[site.kind].value(point.elements[site.group][site.span])
            latents[site.name] = latent_of_value(layout, site, value).reshape(site.shape)
    return latents


def latent_of_value(layout: Layout, site: SiteBlock, value: Array) -> Array:
    """Return the latents of a site given their values on its family's standard support, (*batch, E)."""
    # With an explicit dtype: jax may cache a NumPy constant across a change of its precision.
    low, high = (np.broadcast_to(np.asarray(bound, value.dtype), site.shape).ravel() for bound in (site.low, site.high))
    power = np.asarray(layout.power[site.span], value.dtype) if site.kind == POSITIVE else None
    return FAMILIES[site.kind].latent(value, low, high, power)


def coordinates_at(layout: Layout, posterior: Posterior) -> Coordinates:
    """Return the point at which likelihoods are differentiated: the means of real elements and precisions, and fixed
    coordinates of other elements.
    """
    points = {
        group: family_of_group(group).reading_point(parameters) for group, parameters in posterior.elements.items()
    }
    return Coordinates(points, reals_of(layout, posterior.mean))


def generic_point(layout: Layout) -> Coordinates:
    """Return a point inside every support, at no special value, at which nothing is known yet."""
    standard = standard_posterior(layout)
    elements = dict(standard.elements)
    if POSITIVE in elements:
        elements[POSITIVE] = elements[POSITIVE] * np.array([1.3, 1.0])
    return coordinates_at(layout, standard._replace(elements=elements))


def standard_posterior(layout: Layout) -> Posterior:
    """Return a distribution of all families with parameters 1 and means 0."""
    elements = {
        group: jnp.ones((sites[-1].span.stop, *(sites[0].event_shape or (2,))))
        for group, sites in groups_of(layout).items()
    }
    num_blocks, size = layout.members.shape
    precision = jnp.broadcast_to(jnp.eye(size), (num_blocks, size, size))
    return Posterior(elements, jnp.zeros((num_blocks, size)), precision, jnp.zeros((), int), jnp.zeros(()))


def natural_of(layout: Layout, posterior: Posterior) -> Natural:
    """Return the natural parameters of a distribution, relative to its own means."""
    elements = {
        group: _constant(family_of_group(group).sign, parameters)
        * (parameters - _constant(family_of_group(group).base(layout), parameters))
        for group, parameters in posterior.elements.items()
    }
    quadratic = zero_padding(layout.is_pair, posterior.precision)
    return Natural(elements, jnp.zeros_like(posterior.mean), quadratic, posterior.constant)


def log_mass(layout: Layout, posterior: Posterior) -> Float[Array, ""]:
    """Return the log of the integral of a density over all latents; the precision is a matrix.

    For the density of prior and rows it is the log probability of the rows, plus that of whatever the prior's density includes.
    """
    log_dets = log_determinants(posterior.precision) if layout.members.size else None
    return posterior.constant + log_integral(layout, posterior.elements, log_dets)


def log_integral(
    layout: Layout, elements: dict[str, Array], log_dets: Float[Array, "R ..."] | None
) -> Float[Array, "*batch"]:
    """Return the log of the integral of a density whose constant is 0.

    Args:
        elements: parameters of each group, (E, n, *batch).
        log_dets: of the precision of each Gaussian block; None without blocks.
    """
    volumes = [FAMILIES[site.kind].log_volume(site, layout) for site in layout.sites if site.kind in FAMILIES]
    total = jnp.asarray(sum(volumes) + 0.5 * math.log(2.0 * math.pi) * layout.count(REAL), float)
    if log_dets is not None:
        total = total - 0.5 * jnp.sum(log_dets, axis=0)
    families = (jnp.sum(family_of_group(group).log_normalizer(own), axis=0) for group, own in elements.items())
    return sum(families, start=total)


def posterior_of(
    layout: Layout, natural: Natural, centre: Coordinates, shift: Float[Array, "R S"] | None = None
) -> Posterior:
    """Return the distribution whose log density is <natural, T(z)> plus a constant.

    Args:
        centre: the point to which the coefficients of real elements are relative.
        shift: the means less the centre, if known.
    """
    blocks = padding(layout, centre.real.dtype)
    start = Posterior(
        {
            group: jnp.broadcast_to(_constant(family_of_group(group).base(layout), own), own.shape)
            for group, own in natural.elements.items()
        },
        blocks_of(layout, centre.real),
        arrow_matrices.as_arrow(blocks, *layout.leaves) if isinstance(natural.quadratic, Arrow) else blocks,
        jnp.zeros((), int),
        jnp.zeros((), centre.real.dtype),
    )
    return absorb(layout, start, natural, 0, shift)


def absorb(
    layout: Layout,
    posterior: Posterior,
    natural: Natural,
    num_rows: Int[Array, ""] | int,
    shift: Float[Array, "R S"] | None = None,
) -> Posterior:
    """Add natural parameters, relative to the posterior's means, to a posterior.

    For a Gaussian block: precision' = precision + quadratic and mean' = mean + inverse(precision') linear; completing the
    square subtracts linear' inverse(precision') linear / 2 from the rate of u, or adds it to the constant of a block without u.

    Args:
        shift: inverse(precision') linear, if known.
    """
    elements = {
        group: old + _constant(family_of_group(group).sign, old) * natural.elements[group]
        for group, old in posterior.elements.items()
    }
    mean, precision, constant = posterior.mean, posterior.precision, posterior.constant + natural.constant
    if layout.members.size:
        precision = jax.tree.map(jnp.add, precision, natural.quadratic)
        shift = solve_blocks(precision, natural.linear) if shift is None else shift
        mean = mean + shift
        gain = 0.5 * jnp.sum(natural.linear * shift, axis=-1)
        constant = constant + _sum_without_owner(layout, gain)
        if layout.is_scaled:
            elements[POSITIVE] = elements[POSITIVE] - _in_rate(sum_by_owner(layout, gain))
    return Posterior(elements, mean, precision, posterior.num_rows + num_rows, constant)


def relative_to(layout: Layout, natural: Natural, old: Coordinates, new: Coordinates) -> Natural:
    """Return the natural parameters of the same density relative to another centre."""
    if not layout.members.size:
        return natural
    x = blocks_of(layout, new.real - old.real)
    bend = times_blocks(natural.quadratic, x)
    elements = dict(natural.elements)
    gain = jnp.sum((natural.linear - 0.5 * bend) * x, axis=-1)
    if layout.is_scaled:
        elements[POSITIVE] = elements[POSITIVE] + _in_rate(sum_by_owner(layout, gain))
    constant = natural.constant + _sum_without_owner(layout, gain)
    return natural._replace(elements=elements, linear=natural.linear - bend, constant=constant)


def constant_after(
    layout: Layout, before: Posterior, after: Posterior, middle: Coordinates, log_density: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the constant of a posterior, given the log density that was added to it at its middle.

    Far from the mean before, as in the first rewards of a million, the terms that `absorb` adds up are large and cancel.

    Args:
        middle: of `after`, with its means.
    """
    total = before.constant + log_density
    for group, new in after.elements.items():
        family = family_of_group(group)
        added = _constant(family.sign, new) * (new - before.elements[group])
        total = total - jnp.sum(added * family.statistics(middle.elements[group]))
    if layout.members.size:
        shift = after.mean - before.mean
        bend = jnp.sum(shift * times_blocks(zero_padding(layout.is_pair, before.precision), shift), axis=-1)
        scale = by_block(layout, jnp.exp(middle.elements[POSITIVE]), 1.0) if layout.is_scaled else 1.0
        total = total - 0.5 * jnp.sum(scale * bend)
    return total


def discount_towards_prior(
    layout: Layout, posterior: Posterior, prior: Posterior, keep: Float[Array, ""]
) -> tuple[Posterior, Natural]:
    """Return a posterior with its natural parameters times `keep`, and (1 - keep) times the prior's, for `absorb` to add.

    The latter are relative to the posterior's means. Both together have the mass of the posterior: forgetting changes the
    probability of later rows alone.
    """
    gap = prior.mean - posterior.mean
    pull = jnp.einsum("rst,rt->rs", prior.precision, gap)
    share = {group: _constant(family_of_group(group).sign, own) * own for group, own in prior.elements.items()}
    if layout.is_scaled:
        share[POSITIVE] = share[POSITIVE] - _in_rate(0.5 * sum_by_owner(layout, jnp.sum(gap * pull, axis=-1)))
    natural = Natural(share, pull, zero_padding(layout.is_pair, prior.precision), jnp.zeros_like(posterior.constant))
    blocks = padding(layout, posterior.precision.dtype)
    kept = posterior._replace(
        elements=jax.tree.map(lambda leaf: keep * leaf, posterior.elements),
        precision=keep * zero_padding(layout.is_pair, posterior.precision) + blocks,
    )
    share_of_prior = jax.tree.map(lambda leaf: (1.0 - keep) * leaf, natural)
    lost = log_mass(layout, posterior) - log_mass(layout, absorb(layout, kept, share_of_prior, 0))
    return kept._replace(constant=kept.constant + lost), share_of_prior


def is_proper(posterior: Posterior) -> Bool[Array, ""]:
    """Return whether all parameters are finite and inside their domains."""
    reals = jax.tree.leaves((posterior.mean, posterior.precision))
    # The comparison with infinity is false for nan too.
    checks = [posterior.num_rows >= 0, *(jnp.all(jnp.abs(leaf) < jnp.inf) for leaf in reals if leaf.size)]
    checks += [jnp.all((own > 0) & (own < jnp.inf)) for own in posterior.elements.values()]
    return jnp.all(jnp.stack(checks))


def is_resolved(
    layout: Layout, before: Posterior, after: Posterior, natural: Natural, steps: Float[Array, "P D"]
) -> Bool[Array, ""]:
    """Return whether the floating-point precision holds a posterior.

    It does if the posterior is proper, at least 90% of each new count was added, and no precision matrix suffers from
    cancellation: its quadratic form, along typical steps, is no difference of terms whose rounding, once per row, could reach
    a fifth of a nat. Features that nearly repeat each other cause that, such as an intercept and a feature far from 0.

    Args:
        before, natural: a posterior, and what was added to it to make `after`.
        steps: displacements of the real elements by a few standard deviations of `after`.
    """
    roundings = jnp.finfo(after.mean.dtype).eps * jnp.sqrt(1.0 + after.num_rows)
    checks = [roundings < 1.0]
    for group, new in after.elements.items():
        columns = family_of_group(group).counts
        added = natural.elements[group][:, columns]
        missing = new[:, columns] - before.elements[group][:, columns] - added
        checks.append(jnp.all(jnp.abs(missing) - 0.1 * jnp.abs(added) <= 1e-6))
    if layout.members.size:
        x = jnp.abs(blocks_of(layout, steps))
        span = jnp.einsum("prs,rst,prt->r", x, jnp.abs(after.precision), x)
        if layout.is_scaled:
            span = span * by_block(layout, after.elements[POSITIVE][:, 0] / after.elements[POSITIVE][:, 1], 1.0)
        checks.append(jnp.all(roundings * span <= 0.2 * len(steps) * (1.0 + layout.is_member.sum(axis=1))))
        missing, added, typical = (
            jnp.diagonal(matrix, axis1=-2, axis2=-1)
            for matrix in (
                after.precision - before.precision - natural.quadratic,
                natural.quadratic,
                after.precision / (1.0 + after.num_rows),
            )
        )
        checks.append(jnp.all(jnp.abs(missing) <= 0.1 * (jnp.abs(added) + typical)))
    return is_proper(after) & jnp.all(jnp.stack(checks))


def where_finite(chosen: Any, otherwise: Any) -> Any:
    """Return one tree, with the entries of another where the first is not finite."""
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), chosen, otherwise)


def _sum_without_owner(layout: Layout, values: Float[Array, " R"]) -> Float[Array, ""]:
    """Return the sum over the blocks that no positive element scales."""
    return jnp.sum(values[np.flatnonzero(layout.owner < 0)])


def _in_rate(values: Float[Array, " G"]) -> Float[Array, "G 2"]:
    """Return values as a change of the second column, that of u."""
    return values[:, None] * np.array([0.0, 1.0], values.dtype)


def _constant(value: Any, like: Array) -> np.ndarray:
    # With an explicit dtype: jax may cache a NumPy constant across a change of its precision.
    return np.asarray(value, like.dtype)


_KEY_ORDER = [UNIT, POSITIVE, REAL, SIMPLEX]  # kinds after these get the keys after theirs, so that draws stay the same
_KEY_ORDER += [kind for kind in FAMILIES if kind not in _KEY_ORDER]


def sample(layout: Layout, key: Key, posterior: Posterior, num_samples: int) -> Draws:
    """Draw from a posterior: {site: (M, ...)}; the draws are independent."""
    return _draw(layout, key, posterior, (num_samples,), None)


def sample_each(layout: Layout, key: Key, posteriors: Posterior, steps: Float[Array, "K L R S"]) -> Draws:
    """Draw K times from each of L posteriors, (L, ...) each: {site: (K L, ...)}, in K rounds over all of them.

    Args:
        steps: draws of the real elements less their means, for u = 1.
    """
    return _draw(layout, key, posteriors, steps.shape[:2], steps)


def _draw(layout: Layout, key: Key, posterior: Posterior, shape: tuple[int, ...], steps: Array | None) -> Draws:
    """Draw values of each site.

    Args:
        shape: (M,) for draws from one posterior, (K, L) for K draws from each of L.
        steps: draws of the real elements less their means, for u = 1; None draws them.
    """
    keys = dict(zip(_KEY_ORDER, jax.random.split(key, len(_KEY_ORDER)), strict=True))
    values = {}
    for group, parameters in posterior.elements.items():
        family = family_of_group(group)
        own_key = keys[family.kind]
        if family.num_event_dims:
            own_key = jax.random.fold_in(
                own_key, [g for g in groups_of(layout) if family_of_group(g) is family].index(group)
            )
        values[group] = family.sample(own_key, parameters, shape[:1])
    if layout.members.size:
        if steps is None:
            steps = sampling.normal_vectors(keys[REAL], posterior.precision, shape)
        if layout.is_scaled:
            steps = jnp.exp(-0.5 * by_block(layout, values[POSITIVE], 0.0))[..., None] * steps
        real = reals_of(layout, posterior.mean + steps)
    draws: Draws = {}
    for site in layout.sites:
        if site.kind == REAL:
            own = real[..., site.span]
        else:
            span = (*(slice(None),) * len(shape), site.span)
            own = latent_of_value(layout, site, values[site.group][span])
        draws[site.name] = own.reshape(math.prod(shape), *site.shape)
    return draws
