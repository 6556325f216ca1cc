"""A program's latents as one real vector: where gradients, Newton steps and Hamiltonian trajectories live.

Every latent site is mapped to the reals by NumPyro's bijection for its support, and the log density carries the bijection's
Jacobian. The support of a site may depend on other latents, so the map is read from a run of the program. The prior is kept
as a list of terms, as many as the program allows, so that it can be told which latents it ties to each other.

In a hierarchy a latent x has a location m and a scale s that are latents too. It may also be measured in a frame of its own,

    x = m + s^(1 - c) (v - c m),

with a share c that is 1 for x itself and 0 for its distance from the location in units of the scale. While data say little of
x, the distance knows nothing of the scale, and the funnel that x itself makes with it is gone; where they say much it is the
other way around, and a share between the two suits what is between (Papaspiliopoulos, Roberts and Skold 2007).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, Independent, MaskedDistribution, biject_to
from numpyro.distributions.transforms import IndependentTransform

from ppl_bandit.engines.row_buffer import BufferedRows
from ppl_bandit.program.jaxpr.entry_reads import entries_read
from ppl_bandit.program.model.recorded_readings import recorded
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import Site, Trace, is_prior_term, log_prob_terms, run_program
from ppl_bandit.types import Draws, Interaction, Key

__all__ = ["PartialCentring", "Space", "unconstrained_space"]

_LOCATED = (dist.Normal, dist.LogNormal, dist.StudentT, dist.Cauchy, dist.Laplace, dist.Logistic, dist.Gumbel)
_MAX_SIZE = 2000  # latents beyond which it is not looked for what depends on what


class PartialCentring(NamedTuple):
    """Other coordinates of the latents whose prior has a scale that is a latent, by shares (K,): 1 is the latent itself.

    Attributes:
        is_framed: (K,), which latents have frames; the share of all others is 1.
        of: (K,) -> locations and log scales of the frames, (K,) each.
        back: (coordinates, shares) -> (K,), the latents themselves, unconstrained.
        constrain, log_prior: (coordinates, shares) -> those of `Space`.
    """

    is_framed: np.ndarray
    of: Callable[[Float[Array, " K"]], tuple[Float[Array, " K"], Float[Array, " K"]]]
    back: Callable[[Float[Array, " K"], Float[Array, " K"]], Float[Array, " K"]]
    constrain: Callable[[Float[Array, " K"], Float[Array, " K"]], Draws]
    log_prior: Callable[[Float[Array, " K"], Float[Array, " K"]], Float[Array, " terms"]]


class Space(NamedTuple):
    """The real vectors of `size` elements that stand for a program's latents, one letter `K` for their axis.

    Attributes:
        size: K.
        constrain: (K,) -> {site: ...}, the program's own latents.
        unconstrain: the inverse of constrain.
        log_prior: (K,) -> (terms,), which add up to the log prior with its Jacobian.
        log_likelihood: (latents, N rows) -> (N,), of the program's own latents.
        log_joint: ((K,), data) -> log prior + log likelihood.
        draw_prior: (key, M) -> (M, K) draws of the generative prior, and what the prior has beyond it, (M, terms): factors,
            observed constants, latents that are scaled or masked. Their sum is a draw's log weight.
        frames: other coordinates for hierarchies; None where there are none.
    """

    size: int
    constrain: Callable[[Float[Array, " K"]], Draws]
    unconstrain: Callable[[Mapping[str, Array]], Float[Array, " K"]]
    log_prior: Callable[[Float[Array, " K"]], Float[Array, " terms"]]
    log_likelihood: Callable[[Mapping[str, Array], Interaction], Float[Array, " N"]]
    log_joint: Callable[[Float[Array, " K"], BufferedRows], Float[Array, ""]]
    draw_prior: Callable[[Key, int], tuple[Float[Array, "M K"], Float[Array, "M terms"]]]
    frames: PartialCentring | None = None


def unconstrained_space(model: RewardModel) -> Space:
    """Return the unconstrained space of a program; that every support has a bijection was checked with the program."""
    shapes = _shapes(model)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())
    framed_names: set[str] = set()

    def split(flat: Float[Array, " K"]) -> dict[str, Array]:
        pieces = jnp.split(flat, list(_running_sums(sizes.values()))[:-1])
        return {name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}

    def run(flat: Float[Array, " K"], shares: Float[Array, " K"] | None = None) -> tuple[Trace, list[Array], dict]:
        """Return a run of the program, the log Jacobians of its latents, and these unconstrained with their frames."""
        parts = split(flat)
        own_shares = None if shares is None else split(shares)
        log_jacobians, framed = [], {}

        def choose(site: Site) -> Array | None:
            name = site["name"]
            if name not in parts or site["type"] != "sample":
                return None
            real, frame, stretch = parts[name], _frame(site["fn"], shapes[name]), jnp.zeros(())
            if own_shares is not None and name in framed_names:
                assert frame is not None
                location, log_scale = frame
                stretch = (1.0 - own_shares[name]) * log_scale
                real = location + jnp.exp(stretch) * (real - own_shares[name] * location)
            transform = biject_to(site["fn"].support)
            value = transform(real)
            while isinstance(transform, IndependentTransform):
                transform = transform.base_transform
            log_jacobians.append(jnp.ravel(transform.log_abs_det_jacobian(real, value) + stretch))
            framed[name] = real, frame
            return value

        trace = run_program(model.program, *_one_row(model), choose=choose)
        return trace, log_jacobians, framed

    def prior_sites(trace: Trace) -> list[Site]:
        return [site for name, site in trace.items() if is_prior_term(name, site, model.outcomes)]

    @recorded
    def constrain(flat: Float[Array, " K"], *shares: Float[Array, " K"]) -> Draws:
        trace, _, _ = run(flat, *shares)
        return {name: trace[name]["value"] for name in shapes}

    @recorded
    def log_prior(flat: Float[Array, " K"], *shares: Float[Array, " K"]) -> Float[Array, " terms"]:
        trace, log_jacobians, _ = run(flat, *shares)
        return jnp.concatenate([*map(log_prob_terms, prior_sites(trace)), *log_jacobians])

    @recorded
    def frames_of(flat: Float[Array, " K"]) -> tuple[Float[Array, " K"], Float[Array, " K"]]:
        _, _, framed = run(flat)
        found = [framed[name][1] or (jnp.zeros(shapes[name]),) * 2 for name in shapes]
        locations, log_scales = zip(*found, strict=True)
        return jnp.concatenate([*map(jnp.ravel, locations)]), jnp.concatenate([*map(jnp.ravel, log_scales)])

    @recorded
    def back(flat: Float[Array, " K"], shares: Float[Array, " K"]) -> Float[Array, " K"]:
        _, _, framed = run(flat, shares)
        return jnp.concatenate([jnp.ravel(framed[name][0]) for name in shapes])

    log_likelihood = recorded(model.log_likelihood)

    def log_joint(flat: Float[Array, " K"], data: BufferedRows) -> Float[Array, ""]:
        return jnp.sum(log_prior(flat)) + data.weights @ log_likelihood(constrain(flat), data.rows)

    def unconstrain(latents: Mapping[str, Array]) -> Float[Array, " K"]:
        trace = run_program(model.program, *_one_row(model, latents))
        return jnp.concatenate(
            [jnp.ravel(biject_to(trace[name]["fn"].support).inv(trace[name]["value"])) for name in shapes]
        )

    def excess(latents: Mapping[str, Array]) -> Float[Array, " terms"]:
        trace = run_program(model.program, *_one_row(model, latents))
        terms = []
        for site in prior_sites(trace):
            own = log_prob_terms(site)
            if site["name"] in shapes:
                is_plain = site["scale"] is None and not _is_masked(site["fn"])
                terms.append(jnp.zeros_like(own) if is_plain else own - log_prob_terms(site, is_plain=True))
            else:
                terms.append(own)
        num_terms = jax.eval_shape(log_prior, jnp.zeros(total)).shape[0]
        found = jnp.concatenate(terms)
        return jnp.pad(found, (0, num_terms - found.shape[0]))  # Jacobians are no part of a density of latents

    def draw_prior(key: Key, num_samples: int) -> tuple[Float[Array, "M K"], Float[Array, "M terms"]]:
        latents = model.sample_prior(key, num_samples)
        return jax.vmap(unconstrain)(latents), jax.vmap(excess)(latents)

    space = Space(total, constrain, unconstrain, log_prior, log_likelihood, log_joint, draw_prior)
    if total > _MAX_SIZE:
        return space
    # A frame whose scale is known stretches nothing.
    is_framed = np.any(entries_read(lambda flat: frames_of(flat)[1], total, ()), axis=1)
    ends = _running_sums(sizes.values())
    framed_names |= {name for name, end in zip(sizes, ends, strict=True) if is_framed[end - sizes[name] : end].any()}
    if not framed_names:
        return space
    return space._replace(frames=PartialCentring(is_framed, frames_of, back, constrain, log_prior))


def _frame(fn: Distribution, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
    """Return the location and the log scale of a latent, as it is unconstrained; None where its prior has none."""
    while isinstance(fn, Independent | dist.ExpandedDistribution | MaskedDistribution):
        fn = fn.base_dist
    if not isinstance(fn, _LOCATED):
        return None
    return jnp.broadcast_to(fn.loc, shape), jnp.broadcast_to(jnp.log(fn.scale), shape)


def _is_masked(fn: Distribution) -> bool:
    while isinstance(fn, Independent):
        fn = fn.base_dist
    return isinstance(fn, MaskedDistribution)


def _one_row(model: RewardModel, latents: Mapping[str, Array] | None = None) -> tuple[Any, Any, dict[str, Array]]:
    """Return the arguments of a run that reads latents alone: outcomes are fixed, so that none is drawn."""
    outcomes = model.outcome_values({name: jnp.zeros(1) for name in model.outcomes})
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


def _running_sums(sizes: Any) -> list[int]:
    sums, total = [], 0
    for size in sizes:
        total += size
        sums.append(total)
    return sums
