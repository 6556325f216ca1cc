"""Where the distributions of a program live: supports that move with a latent, arguments that must lie on a simplex."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, biject_to, constraints

from ppl_bandit.program.jaxpr.dependence import dependencies
from ppl_bandit.program.model.tracing import Site, repeat_rows, run_program
from ppl_bandit.runtime.numpyro_adapter import inner_distribution

__all__ = ["extreme_latents", "has_moving_support", "simplex_gaps"]

_EXTREMES = (3.0, 30.0)  # in unconstrained space: e^30 is beyond any reward
_NUM_SIGNS = 8


def has_moving_support(supports: Callable[[Any], list[Any]], latents: Mapping[str, Any]) -> bool:
    """Tell whether a bound of an outcome's support depends on latents, on the jaxpr of latents -> supports."""

    def bounds(latents: Any) -> list[Array]:
        return [jnp.asarray(leaf) for leaf in jax.tree.leaves(supports(latents))]

    closed = jax.make_jaxpr(bounds)(latents)
    labels = [frozenset(["latents"])] * len(closed.jaxpr.invars)
    return any(dependencies(closed, labels))


def extreme_latents(program: Callable, latents: tuple[str, ...], context: Any) -> dict[str, Array]:
    """Return values of every latent far out in its support, {site: (P, ...)}: together their supports cover what can happen."""
    rng = np.random.default_rng(3)
    signs = rng.choice([-1.0, 1.0], size=(_NUM_SIGNS, len(latents)))
    signs[0], signs[1] = 1.0, -1.0
    steps = jnp.asarray(np.concatenate([reach * signs for reach in _EXTREMES]))

    def at(step: Array) -> dict[str, Array]:
        def choose(site: Site) -> Array | None:
            if site["name"] not in latents or site["type"] != "sample":
                return None
            fn = site["fn"]
            transform = biject_to(fn.support)
            shape = transform.inverse_shape(fn.shape(site["kwargs"]["sample_shape"]))
            return transform(jnp.full(shape, step[latents.index(site["name"])]))

        trace = run_program(program, jnp.zeros(1, int), repeat_rows(context, 1), {}, choose=choose)
        return {name: trace[name]["value"] for name in latents}

    return jax.vmap(at)(steps)


def simplex_gaps(fn: Distribution) -> Iterator[tuple[str, Float[Array, "..."]]]:
    """Yield the arguments of a distribution, and of those inside it, that must be probabilities, and how far they are off."""
    for name, constraint in fn.arg_constraints.items():
        if constraint is constraints.simplex and name in vars(fn):
            value = jnp.asarray(vars(fn)[name])
            yield name, jnp.abs(value.sum(axis=-1) - 1.0) + jnp.maximum(-value.min(axis=-1), 0.0)
    inner = inner_distribution(fn)
    if inner is not None:
        yield from simplex_gaps(inner)
