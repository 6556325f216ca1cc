"""A program's latents as one real vector, in which gradients, Newton steps and Hamiltonian trajectories are computed.

Every latent site is mapped to the reals by NumPyro's bijection for its support, and the log density includes the log Jacobian
of the bijection. The support of a site may depend on other latents, so the map is computed by running the program. The prior
is a list of terms, as many as the program allows, from which `blocks` finds the latents that are independent.

In a hierarchy the location m and the scale s of a latent x may themselves be latents. Then x can be replaced by a coordinate v,

    x = m + s^(1 - c) (v - c m),

with a centredness c: 1 is the centred form, v = x, and 0 is the non-centred form, v = (x - m) / s. With little data on x the
non-centred form removes the funnel of x and s; with much data the centred form is better, and values in between suit
intermediate cases (Papaspiliopoulos, Roberts and Skold 2007).

Also here: the locations of an outcome's law: its centre or, for a mixture, the centre of each component.

A component of a mixture can be narrow. Where another component dominates, the likelihood does not show in which direction the
narrow one lies: its density underflows. Its location is a smooth function of the latents everywhere.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, Independent, MaskedDistribution, biject_to
from numpyro.distributions.transforms import IndependentTransform

from ppl_bandit.engines.rows import BufferedRows
from ppl_bandit.program.jaxpr.entry_reads import MAX_ENTRIES, entries_read
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import Site, Trace, is_prior_term, log_prob_terms, run_program
from ppl_bandit.runtime.compile_ahead import traced_once
from ppl_bandit.runtime.numpyro_adapter import locations_of
from ppl_bandit.types import Draws, Interaction, Key

_MAX_LOCATIONS = 8  # of one outcome: as many starts as `importance` searches from


class OutcomeLocations(NamedTuple):
    """Locations of the laws of N rows.

    Attributes:
        locations: those that depend on latents.
        outcomes: the outcome that belongs to each location.
        log_peak: log likelihood of a row at the most likely of its locations, in place of its outcomes.
    """

    locations: Float[Array, "N L"]
    outcomes: Float[Array, "N L"]
    log_peak: Float[Array, " N"]


def outcome_locations(
    model: RewardModel, constrain: Callable[[Float[Array, " K"]], Any], size: int
) -> Callable[[Mapping[str, Array], Interaction], OutcomeLocations] | None:
    """Return the function (latents, rows) -> locations of the outcomes' laws.

    Returns:
        None if there is no such location. Outcomes that are integers have none, unless they are mixtures: their likelihood is
        at most 1, so no single row can concentrate the posterior where there are no draws.
    """

    def all_locations(latents: Mapping[str, Array], rows: Interaction) -> OutcomeLocations:
        outcomes = model.outcome_values(rows.reward)
        trace = model.trace(latents, rows.arm, rows.context, outcomes)
        found, values = [], []
        log_peak = jnp.zeros(rows.arm.shape)
        for name in model.outcomes:
            fn: Distribution = trace[name]["fn"]
            own = locations_of(fn)
            if not own or (len(own) == 1 and model.outcome_kinds[name] == "i"):
                log_peak += fn.log_prob(outcomes[name])
                continue
            own = [jnp.broadcast_to(location, rows.arm.shape) for location in own[:_MAX_LOCATIONS]]
            found += own
            values += [outcomes[name].astype(float)] * len(own)
            log_peak += jnp.max(jnp.stack([fn.log_prob(location) for location in own]), axis=0)
        none = jnp.zeros((*rows.arm.shape, 0))
        if not found:
            return OutcomeLocations(none, none, log_peak)
        return OutcomeLocations(jnp.stack(found, axis=-1), jnp.stack(values, axis=-1), log_peak)

    arms = np.arange(model.num_arms)

    def of_every_arm(flat: Array, reward: Any, context: Any) -> Array:
        return all_locations(constrain(flat), Interaction(jnp.asarray(arms), reward, context)).locations

    def data() -> tuple[Any, Any]:
        reward = model.zero_outcomes(model.num_arms)
        return reward, model.context_rows(model.num_arms)

    reads = entries_read(of_every_arm, size, jax.eval_shape(data))
    columns = np.flatnonzero(reads.any(axis=(0, 2)))
    if not columns.size:
        return None

    def locations(latents: Mapping[str, Array], rows: Interaction) -> OutcomeLocations:
        found = all_locations(latents, rows)
        return found._replace(locations=found.locations[:, columns], outcomes=found.outcomes[:, columns])

    return locations


_LOCATION_SCALE = (dist.Normal, dist.LogNormal, dist.StudentT, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel)


class PartialCentring(NamedTuple):
    """Partially non-centred coordinates of the latents whose prior has a latent scale, given a centredness (K,) in [0, 1].

    Attributes:
        has_latent_scale: (K,), the latents to which it applies; the centredness of all others is 1.
        location_and_log_scale: (K,) -> location and log scale of the prior of each latent, (K,) each.
        to_latents: (coordinates, centredness) -> (K,), the unconstrained latents.
        constrain, log_prior: (coordinates, centredness) -> those of `Space`.
    """

    has_latent_scale: np.ndarray
    location_and_log_scale: Callable[[Float[Array, " K"]], tuple[Float[Array, " K"], Float[Array, " K"]]]
    to_latents: Callable[[Float[Array, " K"], Float[Array, " K"]], Float[Array, " K"]]
    constrain: Callable[[Float[Array, " K"], Float[Array, " K"]], Draws]
    log_prior: Callable[[Float[Array, " K"], Float[Array, " K"]], Float[Array, " terms"]]


class Space(NamedTuple):
    """The unconstrained latents of a program: real vectors of K elements.

    Attributes:
        size: K.
        constrain: (K,) -> {site: ...}, the latents of the program.
        unconstrain: the inverse of constrain.
        log_prior: (K,) -> (terms,), whose sum is the log prior with the log Jacobian.
        log_likelihood: (constrained latents, N rows) -> (N,).
        log_joint: ((K,), data) -> log prior + log likelihood.
        draw_prior: (key, M) -> (M, K) draws by running the program, and the log density terms that running it ignores,
            (M, terms): factors and observed constants. Their sum is the log weight of a draw.
        partial_centring: other coordinates for hierarchies; None for programs without a latent scale.
        locations: (constrained latents, N rows) -> centres of the outcomes' laws; see `outcome_locations`.
    """

    size: int
    constrain: Callable[[Float[Array, " K"]], Draws]
    unconstrain: Callable[[Mapping[str, Array]], Float[Array, " K"]]
    log_prior: Callable[[Float[Array, " K"]], Float[Array, " terms"]]
    log_likelihood: Callable[[Mapping[str, Array], Interaction], Float[Array, " N"]]
    log_joint: Callable[[Float[Array, " K"], BufferedRows], Float[Array, ""]]
    draw_prior: Callable[[Key, int], tuple[Float[Array, "M K"], Float[Array, "M terms"]]]
    partial_centring: PartialCentring | None = None
    locations: Callable[[Mapping[str, Array], Interaction], OutcomeLocations] | None = None


class _Sites(NamedTuple):
    """The latent sites of a program.

    Attributes:
        shapes: of every site in unconstrained space.
        scaled: the sites whose prior has a latent scale.
    """

    model: RewardModel
    shapes: dict[str, tuple[int, ...]]
    scaled: frozenset[str] = frozenset()

    @property
    def ends(self) -> list[int]:
        """The end of every site in the real vector."""
        return list(itertools.accumulate(math.prod(shape) for shape in self.shapes.values()))

    def split(self, flat: Float[Array, " K"]) -> dict[str, Array]:
        """Return the part of each site."""
        pieces = jnp.split(flat, self.ends[:-1])
        return {name: piece.reshape(self.shapes[name]) for name, piece in zip(self.shapes, pieces, strict=True)}

    def prior_terms(self, trace: Trace) -> dict[str, Float[Array, " terms"]]:
        """Return the log densities of the sites of the prior."""
        outcomes = self.model.outcomes
        return {name: log_prob_terms(site) for name, site in trace.items() if is_prior_term(name, site, outcomes)}


def unconstrained_space(model: RewardModel) -> Space:
    """Return the unconstrained space of a program; `RewardModel` has checked that every support has a bijection."""
    sites = _Sites(model, _shapes(model))
    size = sites.ends[-1]
    constrain, log_prior = (traced_once(partial(own, sites)) for own in (_constrain, _log_prior))

    def finite_log_likelihood(latents: Mapping[str, Array], rows: Interaction) -> Float[Array, " N"]:
        # The normalizing constant of a law that is truncated far out in a tail underflows to 0: such latents would win.
        found = model.log_likelihood(latents, rows)
        return jnp.where(found == jnp.inf, -jnp.inf, found)

    log_likelihood = traced_once(finite_log_likelihood)

    def log_joint(flat: Float[Array, " K"], data: BufferedRows) -> Float[Array, ""]:
        return jnp.sum(log_prior(flat)) + data.weights @ log_likelihood(constrain(flat), data.rows)

    def draw_prior(key: Key, num_samples: int) -> tuple[Float[Array, "M K"], Float[Array, "M terms"]]:
        latents = model.sample_prior(key, num_samples)
        # No Jacobians: the terms that running the program ignores are a density of constrained latents.
        num_terms = jax.eval_shape(log_prior, jnp.zeros(size)).shape[0]
        terms = jax.vmap(partial(_ignored_terms, sites))(latents)
        return jax.vmap(unconstrain)(latents), jnp.pad(terms, ((0, 0), (0, num_terms - terms.shape[1])))

    unconstrain = partial(_unconstrain, sites)
    space = Space(size, constrain, unconstrain, log_prior, log_likelihood, log_joint, draw_prior)
    if size > MAX_ENTRIES:
        return space
    locations = outcome_locations(model, constrain, size)
    space = space._replace(locations=None if locations is None else traced_once(locations))
    return space._replace(partial_centring=_partial_centring(sites))


def _partial_centring(sites: _Sites) -> PartialCentring | None:
    location_and_log_scale = traced_once(partial(_location_and_log_scale, sites))
    # A scale that is constant makes no funnel.
    has_latent_scale = np.any(entries_read(lambda flat: location_and_log_scale(flat)[1], sites.ends[-1], ()), axis=1)
    by_site = np.split(has_latent_scale, sites.ends[:-1])
    scaled = frozenset(name for name, own in zip(sites.shapes, by_site, strict=True) if own.any())
    if not scaled:
        return None
    centred = sites._replace(scaled=scaled)
    to_latents, constrain, log_prior = (
        traced_once(partial(own, centred)) for own in (_to_latents, _constrain, _log_prior)
    )
    return PartialCentring(has_latent_scale, location_and_log_scale, to_latents, constrain, log_prior)


def _run(
    sites: _Sites, flat: Float[Array, " K"], centredness: Float[Array, " K"] | None = None
) -> tuple[Trace, list[Array], dict[str, Any]]:
    """Run the program at a point; with a centredness, at a point of partially non-centred coordinates.

    Returns:
        Its trace, log Jacobians, and {site: (unconstrained value, location and log scale)}.
    """
    parts, shapes = sites.split(flat), sites.shapes
    own_centredness = None if centredness is None else sites.split(centredness)
    log_jacobians, found = [], {}

    def choose(site: Site) -> Array | None:
        name = site["name"]
        if name not in parts or site["type"] != "sample":
            return None
        real, loc_scale = parts[name], _loc_scale_of(site["fn"], shapes[name])
        log_stretch = jnp.zeros(())
        if own_centredness is not None and name in sites.scaled:
            assert loc_scale is not None
            location, log_scale = loc_scale
            log_stretch = (1.0 - own_centredness[name]) * log_scale
            real = location + jnp.exp(log_stretch) * (real - own_centredness[name] * location)
        transform = biject_to(site["fn"].support)
        value = transform(real)
        while isinstance(transform, IndependentTransform):
            transform = transform.base_transform
        log_jacobians.append(jnp.ravel(transform.log_abs_det_jacobian(real, value) + log_stretch))
        found[name] = real, loc_scale
        return value

    trace = run_program(sites.model.program, *_one_row(sites.model), choose=choose)
    return trace, log_jacobians, found


def _constrain(sites: _Sites, flat: Float[Array, " K"], *centredness: Float[Array, " K"]) -> Draws:
    trace, _, _ = _run(sites, flat, *centredness)
    return {name: trace[name]["value"] for name in sites.shapes}


def _log_prior(sites: _Sites, flat: Float[Array, " K"], *centredness: Float[Array, " K"]) -> Float[Array, " terms"]:
    trace, log_jacobians, _ = _run(sites, flat, *centredness)
    return jnp.concatenate([*sites.prior_terms(trace).values(), *log_jacobians])


def _location_and_log_scale(sites: _Sites, flat: Float[Array, " K"]) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
    _, _, found = _run(sites, flat)
    pairs = [found[name][1] or (jnp.zeros(shape),) * 2 for name, shape in sites.shapes.items()]
    locations, log_scales = zip(*pairs, strict=True)
    return jnp.concatenate([*map(jnp.ravel, locations)]), jnp.concatenate([*map(jnp.ravel, log_scales)])


def _to_latents(sites: _Sites, flat: Float[Array, " K"], centredness: Float[Array, " K"]) -> Float[Array, " K"]:
    _, _, found = _run(sites, flat, centredness)
    return jnp.concatenate([jnp.ravel(found[name][0]) for name in sites.shapes])


def _unconstrain(sites: _Sites, latents: Mapping[str, Array]) -> Float[Array, " K"]:
    trace = run_program(sites.model.program, *_one_row(sites.model, latents))
    return jnp.concatenate(
        [jnp.ravel(biject_to(trace[name]["fn"].support).inv(trace[name]["value"])) for name in sites.shapes]
    )


def _ignored_terms(sites: _Sites, latents: Mapping[str, Array]) -> Float[Array, " terms"]:
    """Return the terms of the prior with 0 for those of the latents."""
    terms = sites.prior_terms(run_program(sites.model.program, *_one_row(sites.model, latents)))
    return jnp.concatenate([jnp.zeros_like(own) if name in sites.shapes else own for name, own in terms.items()])


def _loc_scale_of(fn: Distribution, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
    """Return location and log scale of the prior of an unconstrained latent; None for other families."""
    while isinstance(fn, Independent | dist.ExpandedDistribution | MaskedDistribution):
        fn = fn.base_dist
    if not isinstance(fn, _LOCATION_SCALE):
        return None
    return jnp.broadcast_to(fn.loc, shape), jnp.broadcast_to(jnp.log(fn.scale), shape)


def _one_row(model: RewardModel, latents: Mapping[str, Array] | None = None) -> tuple[Any, Any, dict[str, Array]]:
    """Return the arguments of a run for its latents alone, with fixed outcomes."""
    outcomes = model.zero_outcomes(1)
    return jnp.zeros(1, int), model.context_rows(1), {**outcomes, **(latents or {})}


def _shapes(model: RewardModel) -> dict[str, tuple[int, ...]]:
    """Return the unconstrained shape of every latent site, without running the program."""
    shapes: dict[str, tuple[int, ...]] = {}

    def body() -> None:
        trace = run_program(model.program, *_one_row(model), key=jr.key(0))
        for name, shape in model.latent_shapes.items():
            shapes[name] = tuple(biject_to(trace[name]["fn"].support).inverse_shape(shape))

    jax.eval_shape(body)
    return shapes
