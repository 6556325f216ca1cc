"""The marginal law of each arm's expected reward: a mixture, over particles, of the closed forms of the exact engine.

Given the outer sites the law is that of the exact engine (`exact.laws.marginals`), with the outer values as a part of the
context. The mixture has 64 components: one particle from each cell of a partition into cells of equal weight, which is cut at
medians of every outer coordinate in turn.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.inner.density import Posterior, standard_posterior
from ppl_bandit.engines.inner.layout import Layout
from ppl_bandit.engines.laws.marginals import marginals_of
from ppl_bandit.engines.proof.outer import given
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Marginals

_NUM_COMPONENTS = 64
_DRAWS_PER_CELL = 16
_GRID_SIZE = 33  # points of the interval in which a quantile is bracketed
_NUM_SEARCHES = 3  # each search continues in the bracket of the one before


def mixture_of(
    model: RewardModel,
    layout: Layout,
    example: Mapping[str, Array],
    component_laws: Callable[[Any], tuple[Mapping[str, Array], Posterior]],
) -> Callable[[Any, Any], Marginals | None]:
    """Return (state, context) -> the law of every arm's expected reward, or None where it has no closed form.

    Args:
        example: one value of every outer site.
        component_laws: state -> outer values and laws of the inner sites, with a leading axis over components of equal weight.
    """
    view = _with_outer_as_context(model, example)
    marginals_given = marginals_of(view, layout)

    @functools.cache
    def closed_form() -> tuple[bool, bool]:
        """Return whether there is a closed form, and whether arms are independent given the outer sites."""
        found: list[Marginals | None] = []

        def trace(law: Posterior) -> None:
            found.append(marginals_given(law, view.context))

        jax.eval_shape(trace, standard_posterior(layout))
        return found[0] is not None, found[0] is not None and found[0].best_arm_probs is not None

    def marginals(state: Any, context: Any) -> Marginals | None:
        has_form, is_independent = closed_form()
        if not has_form:
            return None

        def each(read: Callable[[Marginals], Array]) -> Array:
            outer, components = component_laws(state)

            def one(values: Mapping[str, Array], law: Posterior) -> Array:
                own = marginals_given(law, {"outer": values, "context": context})
                assert own is not None
                return read(own)

            return jax.vmap(one)(outer, components)

        def cdf(x: Float[Array, " A"]) -> Float[Array, " A"]:
            return jnp.mean(each(lambda own: own.cdf(x)), axis=0)

        def quantile(order: Float[Array, ""]) -> Float[Array, " A"]:
            ends = each(lambda own: own.quantile(order))
            low, high = jnp.min(ends, axis=0), jnp.max(ends, axis=0)

            def narrow(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
                grid = bounds[0] + (bounds[1] - bounds[0]) * jnp.linspace(0.0, 1.0, _GRID_SIZE)[:, None]  # (G, A)
                heights = jnp.mean(each(lambda own: jax.vmap(own.cdf)(grid)), axis=0)
                index = jnp.clip(jnp.sum(heights < order, axis=0), 1, _GRID_SIZE - 1)
                low, high = (jnp.take_along_axis(grid, at[None], axis=0)[0] for at in (index - 1, index))
                return low, high

            low, high = jax.lax.fori_loop(0, _NUM_SEARCHES, narrow, (low, high))
            return 0.5 * (low + high)

        def best_arm_probs(allowed: Bool[Array, " A"] | None = None) -> Float[Array, " A"]:
            return jnp.mean(each(lambda own: own.best_arm_probs(allowed)), axis=0)  # type: ignore[misc]

        return Marginals(cdf, quantile, best_arm_probs if is_independent else None, is_mixture=True)

    return marginals


def representative_particles(positions: Float[Array, "M K"], log_weights: Float[Array, " M"]) -> Int[Array, " C"]:
    """Return indices of 64 particles, of equal weight, stratified over every coordinate."""
    num_dims = positions.shape[1]
    cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
    points = (
        (jnp.arange(_NUM_COMPONENTS * _DRAWS_PER_CELL) + 0.5) / (_NUM_COMPONENTS * _DRAWS_PER_CELL) * cumulative[-1]
    )
    cells = jnp.clip(jnp.searchsorted(cumulative, points), 0, positions.shape[0] - 1)[None]
    for cut in range(_NUM_COMPONENTS.bit_length() - 1):
        order = jnp.argsort(positions[cells, cut % num_dims], axis=1)
        cells = jnp.take_along_axis(cells, order, axis=1).reshape(2 ** (cut + 1), -1)
    # A different member of every cell: the middle members would leave out the tails of the outermost cells.
    member = np.floor(np.modf(0.5 + 0.618034 * np.arange(_NUM_COMPONENTS))[0] * _DRAWS_PER_CELL).astype(int)
    return cells[np.arange(_NUM_COMPONENTS), member]


def _with_outer_as_context(model: RewardModel, example: Mapping[str, Array]) -> RewardModel:
    """Return the model of the inner sites whose context contains the outer values beside the context of the program."""

    def program(arm: Array, context: Any) -> None:
        outer = jax.tree.map(lambda leaf: leaf[0], context["outer"])  # the same in every row
        own = () if context["context"] is None else (context["context"],)
        given(model, outer).program(arm, *own)

    view = copy.copy(model)
    view.program = program
    view.context = {"outer": dict(example), "context": model.context}
    view.latent_shapes = {name: shape for name, shape in model.latent_shapes.items() if name not in example}
    return view
