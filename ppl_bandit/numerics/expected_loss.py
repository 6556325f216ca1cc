"""The expected loss of choosing an arm, now and after more rewards.

With theta the expected rewards and m their posterior means, choosing the arm a now loses E[max_b theta_b] - m_a. After n more
rewards the posterior means are m', and the arm with the largest is chosen, which loses

    E[max_b theta_b] - E[max_b m'_b].

If arm b gets n_b of these rewards and its posterior is worth k_b rewards, Var(m'_b) = Var(theta_b) n_b / (n_b + k_b). This is
exact where the posterior mean is linear in the rewards, as for Beta and Bernoulli, Gamma and Poisson, or Normal with known
noise. The law of m' is taken to have the shape of the law of theta, shrunk towards m to that variance.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.types import BestArmMoments


def losses_from_moments(moments: BestArmMoments) -> Float[Array, " A"]:
    """Return the expected loss of choosing each arm, from the exact moments given the best arm."""
    return jnp.sum(moments.gaps, axis=0)


def losses_from_table(table: Any, allowed: Any = None) -> np.ndarray:
    """Return the expected loss of choosing each arm, from joint draws of the expected rewards (..., M, A); shape (..., A).

    Args:
        allowed: (A,), the arms among which the best is looked for; None takes all.
    """
    table = np.asarray(table)
    competing = table if allowed is None else np.where(allowed, table, -np.inf)
    return (competing.max(axis=-1, keepdims=True) - table).mean(axis=-2)


def loss_after(table: Any, num_rows: Any, pseudo_counts: Any) -> float:
    """Return the expected loss of the arm with the largest posterior mean after more rewards of each arm.

    The mean over draws of max_b theta_b - max_b m'_b, with both maxima over the same draws.

    Args:
        table: (M, A), joint draws of the expected rewards.
        num_rows: (A,), number of further rewards of each arm.
        pseudo_counts: (A,), number of rewards that each arm's posterior is worth now.
    """
    table, num_rows = np.asarray(table), np.asarray(num_rows, float)
    mean = table.mean(axis=0)
    share = np.where(num_rows > 0, num_rows / (num_rows + np.asarray(pseudo_counts, float)), 0.0)
    later = mean + np.sqrt(share) * (table - mean)
    return float(np.mean(table.max(axis=1) - later.max(axis=1)))
