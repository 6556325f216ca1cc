"""Tell whether an arm's expected reward has itself an expectation under a posterior in closed form.

A lognormal spend has the mean exp(m + v / 2); under an InverseGamma variance v, whose tail is a power, the expectation of that
is infinite, however many rewards were seen. Averages over draws of it settle nowhere; its median, and which arm is best in a
draw, are as well defined as ever. Tails of the families are exponential in their coordinates: going out from the middle by s
costs `rate * s` nats, so the expectation is infinite where the reward grows by as much.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.certificate.points import typical_point
from ppl_bandit.engines.exact.families.families import Coordinates, Layout, Posterior, latents_at
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once

__all__ = ["INFINITE_WORDS", "has_infinite_mean", "watch_means"]

_NEAR, _FAR = (float(np.log(10.0) * decades) for decades in (6, 12))
_ANY_NUMBER = 1e6  # of rewards, more than which no tail is worth

INFINITE_WORDS = (
    "its own expectation over the latents is infinite, so averages of it mean nothing: read medians, and maximise what has a "
    'mean, such as numpyro.deterministic("expected_reward", ...) of the mean of the logarithm or of a bounded utility'
)


def watch_means(
    model: RewardModel, layout: Layout, prior: Posterior
) -> tuple[str, Callable[[Posterior, Any], Bool[np.ndarray, " A"]] | None]:
    """Say what is infinite of a program's expected rewards, and return what tells the arms; "" and None if nothing is.

    Where no number of rewards makes a mean finite, which arms these are is known once and for all. Elsewhere it is read off the
    posterior of the moment.
    """

    def both() -> Bool[Array, "2 A"]:
        return has_infinite_mean(model, layout, jax.tree.map(jnp.asarray, prior), num_more=np.array([0.0, _ANY_NUMBER]))

    first, for_ever = run_once(both)
    if not first.any():
        return "", None
    if np.array_equal(first, for_ever):
        return INFINITE_WORDS, lambda state, context: np.asarray(first)
    now = jax.jit(lambda state, context: has_infinite_mean(model, layout, state, context))

    def tell(state: Posterior, context: Any) -> Bool[np.ndarray, " A"]:
        with jax.enable_x64(True):
            return np.asarray(now(state, context))

    return f"before the first rewards of an arm {INFINITE_WORDS}", tell


def has_infinite_mean(
    model: RewardModel, layout: Layout, posterior: Posterior, context: Any = None, num_more: Any = 0.0
) -> Bool[Array, "*more A"]:
    """Tell, per arm, whether the expectation of its expected reward is infinite, along some latent's tail.

    Args:
        context: of the decision, without a leading axis; the example by default.
        num_more: rewards by which every tail may become lighter than it is; one number, or several.
    """
    middle = typical_point(layout, posterior)
    here = _rewards(model, layout, jax.tree.map(lambda leaf: leaf[None], middle), context)
    found: Any = np.zeros((*np.shape(num_more), model.num_arms), bool)
    for kind, direction, rates in _tails(layout, posterior):
        if rates.size:
            near, far = (
                _rewards(model, layout, _gone(layout, posterior, middle, kind, direction, step), context) - here
                for step in (_NEAR, _FAR)
            )
            gain = jnp.log(jnp.abs(far)) - jnp.log(jnp.abs(near))
            allowed = (rates + np.asarray(num_more)[..., None]) * (_FAR - _NEAR) * (1.0 - 1e-6)
            grows = (far != 0) & ~(gain < allowed[..., None])
            found = found | jnp.any(grows | ~jnp.isfinite(far), axis=-2)
    return jnp.asarray(found)


def _tails(layout: Layout, posterior: Posterior) -> list[tuple[str, float, Float[Array, " E"]]]:
    """Return (kind, direction, nats per unit) of the tails that are exponential in their coordinates."""
    owner = layout.owner_of_real
    scaled = np.flatnonzero(owner >= 0)
    heavy = 2.0 * posterior.shape[owner[scaled]] if scaled.size else jnp.zeros(0)  # a Student-t
    return [
        ("unit", -1.0, posterior.beta[:, 0]),
        ("unit", 1.0, posterior.beta[:, 1]),
        ("positive", -1.0, posterior.shape),
        ("real", -1.0, heavy),
        ("real", 1.0, heavy),
    ]


def _gone(
    layout: Layout, posterior: Posterior, middle: Coordinates, kind: str, direction: float, step: float
) -> Coordinates:
    """Return points, (E, ...), each with one element out in its tail."""
    if kind != "real":
        block = getattr(middle, kind)
        moved = block + direction * step * jnp.eye(block.size)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (block.size, *leaf.shape)), middle)._replace(
            **{kind: moved}
        )
    scaled = np.flatnonzero(layout.owner_of_real >= 0)
    sd = jnp.sqrt(jnp.max(posterior.rate / posterior.shape, initial=0.0))
    away = direction * jnp.exp(step) * sd * jnp.eye(layout.count("real"))[scaled]
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (scaled.size, *leaf.shape)), middle)._replace(
        real=middle.real + away
    )


def _rewards(model: RewardModel, layout: Layout, points: Coordinates, context: Any) -> Float[Array, "E A"]:
    return model.expected_rewards(jax.vmap(lambda point: latents_at(layout, point))(points), context)
