"""The probability that one of two independent variables is the larger, where both come from s by the same increasing map.

P = E F(s), with s of the narrower law and F the distribution function of the wider one, smooth on the scale of the narrower.
The mean is a whole sum over nodes of the narrower law, which needs few of them (`laws`); F is a running sum over nodes of the
wider law, interpolated. All of it is in single precision: positions are relative to the centres, and the smaller of the two
probabilities is what is summed, so that nothing cancels.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.log_densities import LOG, LOGIT, PLAIN, Shape, log_density_in_single, shape_of
from ppl_bandit.numerics.marginal_laws import MarginalLaw

__all__ = ["win_prob"]

_NUM_SUMMED = {LOGIT: 48, LOG: 64, PLAIN: 96}  # a Student-t of few degrees of freedom has the longest tails of all
_NUM_RUNNING = {LOGIT: 64, LOG: 80, PLAIN: 96}


class _One(NamedTuple):
    """One of two laws, in single precision; v runs from -reach to reach."""

    shape: Shape
    reach: Float[Array, ""]


def win_prob(law: MarginalLaw) -> Float[Array, "2"]:
    """Return the probability of each of two variables to be the larger, for a law with `is_common`."""
    # Between the quartiles a Student-t of n degrees of freedom is wider than a Normal by 1 + 1 / 2n.
    spread = law.width * (1.0 + 0.5 / law.first if law.kind == PLAIN else 1.0)
    narrow = jnp.argmin(spread)
    own, other = _one(law, narrow), _one(law, 1 - narrow)
    z, _, mass = _nodes(law.kind, own, _NUM_SUMMED[law.kind])
    scale = law.width[1 - narrow]
    shift = ((law.centre[narrow] - law.centre[1 - narrow]) / scale).astype(jnp.float32)
    is_above = shift > 0
    places = shift + (law.width[narrow] / scale).astype(jnp.float32) * z
    beyond = _beyond(law.kind, other, places, is_above)
    less = (jnp.sum(mass * beyond) / jnp.sum(mass)).astype(law.centre.dtype)
    return jnp.where((jnp.arange(2) == narrow) != is_above, less, 1.0 - less)


def _one(law: MarginalLaw, arm: Int[Array, ""]) -> _One:
    return _One(shape_of(law.first[arm], law.second[arm], law.width[arm]), law.reach[arm].astype(jnp.float32))


def _nodes(kind: int, one: _One, num: int) -> tuple[Float[Array, " G"], Float[Array, ""], Float[Array, " G"]]:
    """Return nodes z = sinh(v), the distance of two in v, and the unnormalised density of v at them."""
    step = 2.0 * one.reach / (num - 1)
    v = step * jnp.arange(num, dtype=jnp.float32) - one.reach
    rise = jnp.exp(v)
    fall = 1.0 / rise
    z = 0.5 * (rise - fall)
    return z, step, jnp.exp(log_density_in_single(kind, one.shape, z)) * (0.5 * (rise + fall))


def _beyond(kind: int, one: _One, z: Float[Array, " n"], is_above: Bool[Array, ""]) -> Float[Array, " n"]:
    """Return the probability below z, or above it, by cubics between running sums that begin at that end."""
    num = _NUM_RUNNING[kind]
    _, step, mass = _nodes(kind, one, num)
    mass, z = jnp.where(is_above, mass[::-1], mass) / jnp.sum(mass), jnp.where(is_above, -z, z)
    running = _running_sums(mass)
    size = jnp.abs(z)
    v = jnp.copysign(jnp.log(size + jnp.sqrt(size * size + 1.0)), z)
    place = jnp.clip((v + one.reach) / step, 0.0, num - 1.0)
    index = jnp.minimum(place.astype(jnp.int32), num - 2)
    part = place - index
    ends = jnp.stack([running[:-1], running[1:], mass[:-1], mass[1:]], axis=1)
    start, end, slope, end_slope = ends.at[index].get(mode="promise_in_bounds").T
    rise = end - start
    bend, turn = 3.0 * rise - 2.0 * slope - end_slope, slope + end_slope - 2.0 * rise
    return jnp.clip(start + part * (slope + part * (bend + part * turn)), 0.0, 1.0)


def _running_sums(mass: Float[Array, " G"]) -> Float[Array, " G"]:
    """Return the integral up to each node, in steps; beyond the ends there is nothing.

    By Euler and Maclaurin's formula of sixth order, with differences for derivatives.
    """
    padded = jnp.pad(mass, 2)
    near, far = padded[3:-1] - padded[1:-3], padded[4:] - padded[:-4]
    return jnp.cumsum(mass) - 0.5 * mass + (11.0 * far - 82.0 * near) / 1440.0
