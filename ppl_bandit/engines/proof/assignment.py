"""Assign each latent of a program to a family by its support, and find the scales of the Gaussian blocks in the prior.

Blocks of the joint Gaussian law of the real latents: two reals that never share a term of the prior or of the likelihood have a
0 in the precision matrix, whatever is observed. The terms are found by element-level dependence analysis
(`program.jaxpr.entry_reads`), and reals that no chain of terms connects are separate Gaussian blocks. The certificates do not
rely on this: a missing entry would be a deviation from the affine form.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpyro.distributions import constraints

from ppl_bandit.engines.inner.density import generic_point, latents_at
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, SIMPLEX, Layout, SiteBlock
from ppl_bandit.engines.inner.registry import FAMILIES
from ppl_bandit.engines.refusals import outcome_remedy, refusal
from ppl_bandit.program.jaxpr.entry_reads import MAX_ENTRIES, connected_components, entries_read
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import is_prior_term, log_prob, log_prob_terms
from ppl_bandit.runtime.compile_ahead import quick_jit, run_once, traced_once
from ppl_bandit.runtime.numpyro_adapter import class_name, element_support

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


# Of log z: units of z from 1e-15 to 1e15.
_SHIFTS = (0.0, 7.0, -7.0, 14.0, -14.0, 21.0, -21.0, 28.0, -28.0, 35.0, -35.0)


def supports_of(model: RewardModel) -> dict[str, Any]:
    """Return the support of every latent site, with its bounds; None for a support that depends on another latent."""
    found: dict[str, Any] = {}

    def bounds(seed: Array) -> dict[str, list[Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, seed)
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        found.update({name: trace[name]["fn"].support for name in model.latent_shapes})
        return {name: [jnp.asarray(leaf) for leaf in jax.tree.leaves(found[name])] for name in found}

    shapes = jax.eval_shape(bounds, 0)
    if not any(shapes.values()):
        return dict(found)
    trees = {name: jax.tree.structure(support) for name, support in found.items()}
    here, there = (jax.device_get(quick_jit(bounds)(seed)) for seed in (3, 4))
    return {
        name: jax.tree.unflatten(tree, here[name])
        if all(np.array_equal(a, b) for a, b in zip(here[name], there[name], strict=True))
        else None
        for name, tree in trees.items()
    }


def kind_of_support(support: Any) -> str | None:
    """Return the kind of latents with a support: `REAL`, that of a family, or None if no family has this support."""
    support = element_support(support)
    if isinstance(support, type(constraints.real)):
        return REAL
    return next((kind for kind, family in FAMILIES.items() if family.accepts(support)), None)


def read_supports(model: RewardModel) -> Layout:
    """Return a layout with the kind of each latent site, in which nothing is scaled and all reals are one block.

    Raises:
        NotConjugate: if a support depends on another latent or belongs to no family.
    """
    num_elements: dict[str, int] = {}
    sites = []
    for name, support in supports_of(model).items():
        if support is None:
            raise refusal(
                model,
                f"is not conjugate: the support of '{name}' depends on another latent",
                "give it a support that is fixed",
            )
        kind, support = kind_of_support(support), element_support(support)
        if kind is None:
            raise refusal(
                model,
                f"is not conjugate: '{name}' has support {class_name(support)}, which belongs to no conjugate family",
                "conjugate families live on (0, 1), on positive numbers, on the simplex and on the reals",
            )
        ends = (0.0, 1.0) if kind == SIMPLEX else (-np.inf, np.inf)
        low, high = getattr(support, "lower_bound", ends[0]), getattr(support, "upper_bound", ends[1])
        num_event_dims = 0 if kind == REAL else FAMILIES[kind].num_event_dims
        site = SiteBlock(name, kind, model.latent_shapes[name], 0, np.asarray(low), np.asarray(high), num_event_dims)
        site = site._replace(start=num_elements.get(site.group, 0))
        num_elements[site.group] = site.span.stop
        sites.append(site)
    layout = Layout(tuple(sites), np.ones(num_elements.get(POSITIVE, 0)), *(np.zeros(0),) * 3)
    num_real = layout.count(REAL)
    return in_blocks(layout, np.full(num_real, -1), np.zeros(num_real, int))


def find_scales(model: RewardModel, layout: Layout) -> Layout:
    """Find the power of each positive element that is Gamma under the prior, and the reals whose precision it scales.

    With s = log z, the log prior of a Gamma power is c s + d exp(power s) for any real elements that it scales, so the ratio
    of its third to its second derivative is the power. It is taken where d exp(power s) is near 1, whatever the unit of z:
    where that is 1e-12, the rounding of c s bends the ratio. Scaling all u by different factors then multiplies the prior
    precision of each real element by the factor of the u that scales it, if one does.

    Raises:
        NotConjugate: if a positive latent is not Gamma in any power, or a precision is not proportional to one u.
    """
    num_positive, num_real = layout.count(POSITIVE), layout.count(REAL)
    if num_positive == 0:
        return layout
    rng = np.random.default_rng(7)
    factors = np.exp(rng.permutation(np.linspace(0.3, 1.1, num_positive)))  # all different

    def measure() -> tuple[Array, Array]:
        start = generic_point(layout)
        log_z = start.elements[POSITIVE]

        @traced_once
        def log_prior(s: Array, real: Array) -> Array:
            return model.log_prior(
                latents_at(layout, start._replace(elements={**start.elements, POSITIVE: s}, real=real))
            )

        ones = jnp.ones(num_positive)

        def second_derivative(s: Array) -> Array:
            return jax.jvp(jax.grad(log_prior), (s, start.real), (ones, jnp.zeros(num_real)))[1]

        shifts = jnp.asarray(_SHIFTS)[:, None] * ones
        second, third = jax.vmap(lambda s: jax.jvp(second_derivative, (s,), (ones,)))(log_z + shifts)
        distance = jnp.abs(jnp.log(jnp.abs(second)))
        best = jnp.argmin(jnp.where(jnp.isfinite(distance), distance, jnp.inf), axis=0)[None]
        second, third, shift = (jnp.take_along_axis(leaf, best, axis=0)[0] for leaf in (second, third, shifts))
        log_z = log_z + shift
        power = _round_to_twelfths(third / second)

        def curvature(s: Array) -> Array:
            slope = jax.grad(log_prior, argnums=1)
            rows = jax.vmap(lambda v: jax.jvp(lambda x: slope(s, x), (start.real,), (v,))[1])(jnp.eye(num_real))
            return jnp.diagonal(rows)

        shifted = log_z + jnp.log(jnp.asarray(factors)) / power
        return power, curvature(shifted) / curvature(log_z)

    power, ratios = run_once(measure)
    for site in layout.of(POSITIVE):
        if not np.all(np.isfinite(power[site.span])):
            raise refusal(
                model,
                f"is not conjugate: the prior of '{site.name}' is not Gamma in any power of it",
                outcome_remedy(model),
            )
    owner = np.full(num_real, -1)
    for index, ratio in enumerate(ratios):
        matches = np.flatnonzero(np.isclose(factors, ratio, rtol=1e-7))
        if matches.size == 1:
            owner[index] = matches[0]
        elif not np.isclose(ratio, 1.0, rtol=1e-7):
            site = next(s for s in layout.of(REAL) if s.start <= index < s.span.stop)
            positives = [s.name for s in layout.of(POSITIVE)]
            raise refusal(
                model,
                f"is not conjugate: the prior precision of '{site.name}' is neither fixed nor proportional to a power of one "
                f"of {positives} that is Gamma",
                f"write '{site.name}' ~ Normal(m, s * sd) with sd the noise's standard deviation, or with a fixed scale",
            )
    return in_blocks(layout._replace(power=power), owner, np.zeros(num_real, int))


def _round_to_twelfths(power: Array) -> Array:
    """Round a power to a multiple of 1/12 from which it differs by rounding alone; nan for a power of 0."""
    near = jnp.round(power * 12.0) / 12.0
    return jnp.where(
        (jnp.abs(power - near) < 1e-6) & (near != 0), near, jnp.where(jnp.abs(power) < 1e-6, jnp.nan, power)
    )
