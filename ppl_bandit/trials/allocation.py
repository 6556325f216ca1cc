"""Allocation probabilities between two looks: softened, with a rule for the control, within floors and caps."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.trials.design import Design

__all__ = ["allocation_probs", "check_limits"]


def allocation_probs(
    design: Design, probs: Float[Array, " A"], active: Bool[Array, " A"], control: Int[Array, ""] | int | None = None
) -> Float[Array, " A"]:
    """Return the probabilities with which arms are played until the next look.

    In order: "match" gives the control the largest probability of another arm; the probabilities are raised to the power
    `softening` and divided by their sum; a fixed or square-root share of the control is set aside. Then, as long as an arm is
    outside of its limits, all arms below their floors get their floors and all above their caps their caps, for good, and the
    others share the rest in proportion. If limits cannot be met, the probabilities are divided by their sum.

    Args:
        probs: the selector's probabilities; 0 for arms that are not active.
        active: the arms that are left; the others get 0.
        control: index of the present control; None or -1 without one.
    """
    num_arms, dtype = probs.shape[0], probs.dtype
    is_control = jnp.arange(num_arms) == (-1 if control is None else control)
    num_active = jnp.sum(active).astype(dtype)
    probs = jnp.where(active, probs, 0.0)
    if design.control_share == "match":
        most = jnp.max(jnp.where(active & ~is_control, probs, 0.0))
        probs = jnp.where(is_control & active & (num_active > 1), most, probs)
        probs = jnp.where(active & (jnp.sum(probs) == 0), 1.0, probs)
    weights = jnp.where(active, (probs / jnp.sum(probs)) ** design.softening, 0.0)
    fixed = jnp.full(num_arms, jnp.nan, dtype)
    if design.control_share not in (None, "match"):
        others = num_active - 1.0
        share: Any = design.control_share
        if share == "sqrt":
            share = jnp.sqrt(others) / (jnp.sqrt(others) + others)
        fixed = jnp.where(is_control & active & (others > 0), share, fixed)
    floors, caps = (jnp.asarray(_limits(values, num_arms), dtype) for values in (design.floors, design.caps))
    if design.rescale:
        factor = num_arms / num_active
        floors, caps = floors * factor, 1.0 - (1.0 - caps) * factor
    fixed = jnp.where(active, fixed, 0.0)

    def spread(fixed: Float[Array, " A"]) -> tuple[Float[Array, " A"], Bool[Array, " A"]]:
        is_free = jnp.isnan(fixed)
        rest = 1.0 - jnp.sum(jnp.where(is_free, 0.0, fixed))
        own = jnp.where(is_free, weights, 0.0)
        even = jnp.where(is_free, 1.0, 0.0) / jnp.maximum(jnp.sum(is_free), 1)
        parts = jnp.where(jnp.sum(own) > 0, own / jnp.where(jnp.sum(own) > 0, jnp.sum(own), 1.0), even)
        return jnp.where(is_free, rest * parts, fixed), is_free

    def tighten(_: int, fixed: Float[Array, " A"]) -> Float[Array, " A"]:
        found, is_free = spread(fixed)
        fixed = jnp.where(is_free & (found < floors), floors, fixed)
        return jnp.where(is_free & (found > caps), caps, fixed)

    # Every round but the last fixes at least one more arm.
    found = jnp.maximum(spread(jax.lax.fori_loop(0, num_arms, tighten, fixed))[0], 0.0)
    return found / jnp.sum(found)


def check_limits(design: Design, num_arms: int, control: int | None) -> None:
    """Refuse floors and caps that the arms cannot meet together.

    Raises:
        ValueError: says which, and what they add up to.
    """
    floors, caps = (_limits(values, num_arms) for values in (design.floors, design.caps))
    share = design.control_share
    if control is not None and isinstance(share, int | float):  # the limits of the control do not count then
        floors[control] = caps[control] = share
    words = f"of {num_arms} arms, control share included," if isinstance(share, int | float) else f"of {num_arms} arms"
    if np.any(floors > caps):
        raise ValueError(f"floors are {design.floors} and caps {design.caps}: no floor may be above its cap")
    if floors.sum() > 1.0 + 1e-9:
        raise ValueError(f"floors {words} add up to {floors.sum():.4g}, more than 1: give smaller ones")
    if caps.sum() < 1.0 - 1e-9:
        raise ValueError(f"caps {words} add up to {caps.sum():.4g}, less than 1: give larger ones")


def _limits(values: float | Sequence[float], num_arms: int) -> np.ndarray:
    if isinstance(values, Sequence) and len(values) != num_arms:
        raise ValueError(
            f"floors and caps have {len(values)} entries for {num_arms} arms: give one for all, or one each"
        )
    return np.broadcast_to(np.asarray(values, float), (num_arms,)).copy()
