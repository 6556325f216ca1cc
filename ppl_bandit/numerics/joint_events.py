"""Probabilities of events that join several independent arms: pairwise gaps, the range of all arms, nearness to the best.

Each is an average, over the law of one arm, of a product of other arms' probabilities to lie in an interval that moves with
that arm's value x. The average is a sum over evenly spaced nodes of v (`marginal_laws`), which converges exponentially as long
as the other arms' cdfs are smooth on the scale of the nodes.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.numerics.marginal_laws import MarginalLaw, cdf_and_density, node_values, tabulate, widen_points

__all__ = ["gap_probs", "near_best_probs", "range_prob"]

_NUM_NODES = 96


def gap_probs(law: MarginalLaw, delta: Float[Array, ""]) -> Float[Array, "A A"]:
    """Compute P(theta_a - theta_b > delta) for all pairs, a by row; on the diagonal, whether 0 exceeds delta.

    Each pair is integrated over its narrower arm. The error is at most 1e-6; 1e-4 for Student-t laws with fewer than 6 degrees
    of freedom.
    """
    masses, (over,) = _at_nodes(law, lambda x: x + delta)
    _, (under,) = _at_nodes(law, lambda x: x - delta)
    # over[b, k, a] = P(theta_a <= x + delta) at node k of arm b; under[a, k, b] = P(theta_b <= x - delta) at node k of arm a.
    given_second = 1.0 - jnp.einsum("bk,bka->ab", masses, over)
    given_first = jnp.einsum("ak,akb->ab", masses, under)
    spread = law.width * jnp.abs(law.slope)
    found = jnp.where(spread[:, None] < spread[None], given_first, given_second)
    return jnp.where(np.eye(spread.size, dtype=bool), (delta < 0).astype(found.dtype), jnp.clip(found, 0.0, 1.0))


def range_prob(law: MarginalLaw, delta: Float[Array, ""], allowed: Bool[Array, " A"]) -> Float[Array, ""]:
    """Compute P(max - min < delta) over the allowed arms: the sum over arms that may be the smallest; 1 for a single arm.

    The error is at most 1e-4 while no arm is more than ten times as narrow as another.
    """
    masses, (start, end) = _at_nodes(law, lambda x: x, lambda x: x + delta)
    return jnp.clip(jnp.sum(jnp.where(allowed, _joint(masses, end - start, allowed), 0.0)), 0.0, 1.0)


def near_best_probs(law: MarginalLaw, ratio: Float[Array, ""], allowed: Bool[Array, " A"]) -> Float[Array, " A"]:
    """Compute, for each arm a, P(max theta - theta_a <= ratio |theta_a|), with the maximum over the allowed arms.

    The error is at most 1e-4 while no arm is more than ten times as narrow as another.
    """
    masses, (below,) = _at_nodes(law, lambda x: x + ratio * jnp.abs(x))
    return jnp.clip(_joint(masses, below, allowed), 0.0, 1.0)


def _joint(
    masses: Float[Array, "A K"], inside: Float[Array, "A K A"], allowed: Bool[Array, " A"]
) -> Float[Array, " A"]:
    """Average, over each arm, the probability that all other allowed arms are inside."""
    is_other = allowed & ~np.eye(allowed.size, dtype=bool)
    return jnp.sum(masses * jnp.prod(jnp.where(is_other[:, None, :], inside, 1.0), axis=2), axis=1)


def _at_nodes(
    law: MarginalLaw, *maps: Callable[[Array], Array]
) -> tuple[Float[Array, "A K"], list[Float[Array, "A K A"]]]:
    """Return the masses of each arm's nodes, and all arms' cdfs at maps of the nodes."""
    law = widen_points(law)._replace(is_common=False)  # values are then on the scale of rewards
    table = tabulate(law, _NUM_NODES)
    nodes = node_values(law, _NUM_NODES)
    num_arms = nodes.shape[0]

    def cdfs(x: Float[Array, "A K"]) -> Float[Array, "A K A"]:
        below = cdf_and_density(law, table, x.reshape(1, -1))[0]
        return jnp.moveaxis(below.reshape(num_arms, num_arms, -1), 0, -1)

    return table.mass, [cdfs(move(nodes)) for move in maps]
