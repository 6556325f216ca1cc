"""The marginal law of each arm's expected reward: a mixture, over particles, of the closed forms of the exact engine.

Given the outer sites the law is that of the exact engine (`laws.marginals`), with the outer values as a part of the
context. The mixture has 64 components: one particle from each cell of a partition into cells of equal weight, which is cut at
medians of every outer coordinate in turn.

Arms whose expected reward has an infinite posterior expectation are found here, too. A lognormal spend has the mean exp(m + v /
2). Under an InverseGamma variance v, whose tail is a power, the expectation of that mean is infinite, after any number of
rewards: averages over draws do not converge. Its median, and which arm is best in a draw, remain well defined. The tails of the
families are exponential in their coordinates: the log density falls by `rate * s` at a distance s, so the expectation is
infinite where the log of the reward grows by as much.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.inner.density import Coordinates, Posterior, latents_at, standard_posterior
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, Layout
from ppl_bandit.engines.inner.registry import family_of_group
from ppl_bandit.engines.laws.marginals import marginals_of
from ppl_bandit.engines.proof.certificate import middle_of
from ppl_bandit.engines.proof.outer import given
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once, traced_once
from ppl_bandit.types import Marginals

_NUM_COMPONENTS = 64  # particles that represent all; a power of 2, because cells are halved
_DRAWS_PER_CELL = 16  # resampled draws in the cell of each, whose tails one middle draw would leave out
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

    return model.replaced(
        program=program,
        context={"outer": dict(example), "context": model.context},
        latent_shapes={name: shape for name, shape in model.latent_shapes.items() if name not in example},
    )


_NEAR, _FAR = (float(np.log(10.0) * decades) for decades in (6, 12))  # distances in a tail
_MANY_REWARDS = 1e6  # more than any tail is worth

INFINITE_MEAN_TEXT = (
    "its own expectation over the latents is infinite, so averages of it mean nothing: read medians, and maximise what has a "
    'mean, such as numpyro.deterministic("expected_reward", ...) of the mean of the logarithm or of a bounded utility'
)


def find_infinite_means(
    model: RewardModel, layout: Layout, prior: Posterior
) -> tuple[str, Callable[[Posterior, Any], Bool[np.ndarray, " A"]] | None]:
    """Return which expected rewards have an infinite expectation, in words and as (state, context) -> (A,); "" and None if
    none has.

    Where no number of rewards makes a mean finite, the answer is a constant.
    """

    def now_and_later() -> Bool[Array, "2 A"]:
        numbers = np.array([0.0, _MANY_REWARDS])
        return has_infinite_mean(model, layout, jax.tree.map(jnp.asarray, prior), num_more=numbers)

    first, always = run_once(now_and_later)
    if not first.any():
        return "", None
    if np.array_equal(first, always):
        return INFINITE_MEAN_TEXT, lambda state, context: np.asarray(first)
    compiled = jax.jit(lambda state, context: has_infinite_mean(model, layout, state, context))

    def infinite_means(state: Posterior, context: Any) -> Bool[np.ndarray, " A"]:
        with jax.enable_x64(True):
            return np.asarray(compiled(state, context))

    return f"before the first rewards of an arm {INFINITE_MEAN_TEXT}", infinite_means


def has_infinite_mean(
    model: RewardModel, layout: Layout, posterior: Posterior, context: Any = None, num_more: Any = 0.0
) -> Bool[Array, "*more A"]:
    """Return, per arm, whether the expectation of its expected reward is infinite because of some latent's tail.

    Args:
        context: of the decision, without a leading axis; by default the example.
        num_more: number, or numbers, of rewards by which every tail is taken to be lighter.
    """
    middle = middle_of(layout, posterior)

    @traced_once
    def rewards(points: Coordinates) -> Float[Array, "E A"]:
        return model.expected_rewards(jax.vmap(lambda point: latents_at(layout, point))(points), context)

    here = rewards(jax.tree.map(lambda leaf: leaf[None], middle))
    found: Any = np.zeros((*np.shape(num_more), model.num_arms), bool)
    for move, rates in _tails(layout, posterior, middle):
        near, far = (rewards(move(step)) - here for step in (_NEAR, _FAR))
        gain = jnp.log(jnp.abs(far)) - jnp.log(jnp.abs(near))
        allowed = (rates + np.asarray(num_more)[..., None]) * (_FAR - _NEAR) * (1.0 - 1e-6)
        grows = (far != 0) & ~(gain < allowed[..., None])
        found = found | jnp.any(grows | ~jnp.isfinite(far), axis=-2)
    return jnp.asarray(found)


def _tails(
    layout: Layout, posterior: Posterior, middle: Coordinates
) -> list[tuple[Callable[[float], Coordinates], Float[Array, " E"]]]:
    """Return (distance -> points (E, ...) with one element each in its tail, nats per unit of distance)."""

    def repeated(num: int) -> Coordinates:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), middle)

    tails: list[tuple[Callable[[float], Coordinates], Array]] = []
    for group, parameters in posterior.elements.items():
        for direction, rates in family_of_group(group).tails(parameters):

            def move(step: float, group: str = group, direction: float = direction) -> Coordinates:
                own = middle.elements[group]
                moved = own + direction * step * jnp.eye(own.size)
                return repeated(own.size)._replace(elements={**repeated(own.size).elements, group: moved})

            tails.append((move, rates))
    scaled = np.flatnonzero(layout.owner_of_real >= 0)
    if scaled.size:
        shape, rate = posterior.elements[POSITIVE][:, 0], posterior.elements[POSITIVE][:, 1]
        sd = jnp.sqrt(jnp.max(rate / shape, initial=0.0))
        for direction in (-1.0, 1.0):

            def move_real(step: float, direction: float = direction) -> Coordinates:
                away = direction * jnp.exp(step) * sd * jnp.eye(layout.count(REAL))[scaled]
                return repeated(scaled.size)._replace(real=middle.real + away)

            tails.append((move_real, 2.0 * shape[layout.owner_of_real[scaled]]))  # of a Student-t
    return tails
