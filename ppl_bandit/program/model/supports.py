"""Supports of the distributions of a program: bounds that depend on latents, and arguments that must lie on a simplex."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution, biject_to, constraints

from ppl_bandit.program.model.tracing import Site, repeat_rows, run_program
from ppl_bandit.runtime.numpyro_adapter import inner_distribution

__all__ = ["extreme_latents", "simplex_errors"]

_EXTREMES = (3.0, 30.0)  # distances from 0 in unconstrained space: e^30 is larger than any reward
_NUM_SIGNS = 8


def extreme_latents(program: Callable, latents: tuple[str, ...], context: Any) -> dict[str, Array]:
    """Return values far out in the support of every latent, {site: (P, ...)}.

    The union of an outcome's supports at these values covers every reward that the program can produce.
    """
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


def simplex_errors(fn: Distribution) -> Iterator[tuple[str, Float[Array, "..."]]]:
    """Yield the arguments of a distribution, and of those inside it, that must lie on a simplex, with their error."""
    for name, constraint in fn.arg_constraints.items():
        if constraint is constraints.simplex and name in vars(fn):
            value = jnp.asarray(vars(fn)[name])
            yield name, jnp.abs(value.sum(axis=-1) - 1.0) + jnp.maximum(-value.min(axis=-1), 0.0)
    inner = inner_distribution(fn)
    if inner is not None:
        yield from simplex_errors(inner)
