"""Find arms whose expected reward has an infinite posterior expectation.

A lognormal spend has the mean exp(m + v / 2). Under an InverseGamma variance v, whose tail is a power, the expectation of that
mean is infinite, after any number of rewards: averages over draws do not converge. Its median, and which arm is best in a draw,
remain well defined. The tails of the families are exponential in their coordinates: the log density falls by `rate * s` at a
distance s, so the expectation is infinite where the log of the reward grows by as much.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.inner.density import Coordinates, Posterior, latents_at
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, Layout
from ppl_bandit.engines.inner.registry import family_of_group
from ppl_bandit.engines.proof.certificate import middle_of
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once

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
    here = _rewards(model, layout, jax.tree.map(lambda leaf: leaf[None], middle), context)
    found: Any = np.zeros((*np.shape(num_more), model.num_arms), bool)
    for move, rates in _tails(layout, posterior, middle):
        near, far = (_rewards(model, layout, move(step), context) - here for step in (_NEAR, _FAR))
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


def _rewards(model: RewardModel, layout: Layout, points: Coordinates, context: Any) -> Float[Array, "E A"]:
    return model.expected_rewards(jax.vmap(lambda point: latents_at(layout, point))(points), context)
