"""A program's latents as one real vector: where gradients, Newton steps and Hamiltonian trajectories live.

Every latent site is mapped to the reals by NumPyro's bijection for its support, and the log density carries the bijection's
Jacobian. The support of a site may depend on other latents, so the map is read from a run of the program. The prior is kept
as a list of terms, as many as the program allows, so that it can be told which latents it ties to each other.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, Independent, MaskedDistribution, biject_to
from numpyro.distributions.transforms import IndependentTransform

from ppl_bandit.engines.approximate.buffer import Data
from ppl_bandit.program.recording import recorded
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.program.tracing import Site, Trace, is_prior_term, log_prob_terms, run_program
from ppl_bandit.types import Draws, Interaction, Key

__all__ = ["Space", "unconstrained_space"]


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
    """

    size: int
    constrain: Callable[[Float[Array, " K"]], Draws]
    unconstrain: Callable[[Mapping[str, Array]], Float[Array, " K"]]
    log_prior: Callable[[Float[Array, " K"]], Float[Array, " terms"]]
    log_likelihood: Callable[[Mapping[str, Array], Interaction], Float[Array, " N"]]
    log_joint: Callable[[Float[Array, " K"], Data], Float[Array, ""]]
    draw_prior: Callable[[Key, int], tuple[Float[Array, "M K"], Float[Array, "M terms"]]]


def unconstrained_space(model: RewardModel) -> Space:
    """Return the unconstrained space of a program; that every support has a bijection was checked with the program."""
    shapes = _shapes(model)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = sum(sizes.values())

    def split(flat: Float[Array, " K"]) -> dict[str, Array]:
        pieces = jnp.split(flat, list(_running_sums(sizes.values()))[:-1])
        return {name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}

    def run(flat: Float[Array, " K"]) -> tuple[Trace, list[Array]]:
        parts = split(flat)
        log_jacobians = []

        def choose(site: Site) -> Array | None:
            if site["name"] not in parts or site["type"] != "sample":
                return None
            real = parts[site["name"]]
            transform = biject_to(site["fn"].support)
            value = transform(real)
            while isinstance(transform, IndependentTransform):
                transform = transform.base_transform
            log_jacobians.append(jnp.ravel(transform.log_abs_det_jacobian(real, value)))
            return value

        trace = run_program(model.program, *_one_row(model), choose=choose)
        return trace, log_jacobians

    def prior_sites(trace: Trace) -> list[Site]:
        return [site for name, site in trace.items() if is_prior_term(name, site, model.outcomes)]

    @recorded
    def constrain(flat: Float[Array, " K"]) -> Draws:
        trace, _ = run(flat)
        return {name: trace[name]["value"] for name in shapes}

    @recorded
    def log_prior(flat: Float[Array, " K"]) -> Float[Array, " terms"]:
        trace, log_jacobians = run(flat)
        return jnp.concatenate([*map(log_prob_terms, prior_sites(trace)), *log_jacobians])

    log_likelihood = recorded(model.log_likelihood)

    def log_joint(flat: Float[Array, " K"], data: Data) -> Float[Array, ""]:
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

    return Space(total, constrain, unconstrain, log_prior, log_likelihood, log_joint, draw_prior)


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
