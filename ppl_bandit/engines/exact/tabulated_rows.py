"""Add a few kinds of rows to the posterior many times over: natural parameters are read once, then multiplied by counts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.exact.certificate.rows import read_rows
from ppl_bandit.engines.exact.families.layout import Layout
from ppl_bandit.engines.exact.families.posterior import Natural, Posterior, absorb, coordinates_at, relative_to
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import outside_trace
from ppl_bandit.types import Interaction

__all__ = ["tabulate_rows"]


def tabulate_rows(
    model: RewardModel, layout: Layout, prior: Posterior, rows: Interaction
) -> Callable[[Posterior, Float[Array, " N"], Int[Array, ""]], Posterior] | None:
    """Return (posterior, weights, number of rows) -> the posterior with each row added as often as its weight says.

    The rows are read at the prior's means, and certificates are left out: this is for simulated rows. A weight may be negative
    where the sum over all rows is a likelihood.

    Returns:
        None if the program cannot produce a row, or its likelihood is not proved analytic.
    """
    with outside_trace(), jax.enable_x64(True):

        def read() -> tuple[Natural, Array]:
            centre = coordinates_at(layout, jax.tree.map(jnp.asarray, prior))
            readings = read_rows(model, layout, centre, rows)
            return jax.tree.map(lambda leaf: leaf.sum(axis=1), readings.naturals), readings.is_sound

        naturals, is_sound = run_once(read)
        start = jax.tree.map(np.asarray, coordinates_at(layout, prior))
        naturals = jax.tree.map(np.asarray, naturals)
    if not np.all(is_sound):
        return None

    def add(posterior: Posterior, weights: Float[Array, " N"], num_rows: Int[Array, ""]) -> Posterior:
        dtype = posterior.mean.dtype
        total = jax.tree.map(lambda leaf: jnp.tensordot(weights, jnp.asarray(leaf, dtype), axes=1), naturals)
        origin = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), start)
        total = relative_to(layout, total, origin, coordinates_at(layout, posterior))
        return absorb(layout, posterior, total, num_rows)

    return add
