"""The mean excess E max(theta - x, 0) of each arm's expected reward, tabulated from its mean upwards.

The nodes are spaced in v, with s = centre + width sinh(v) as in `marginal_laws`. Below the centre a Gauss rule integrates the
density. Above it the nodes are evenly spaced, and running integrals of sixth order give the probability above each node and,
from that, the mean excess.

Also here: the expected loss of choosing an arm, now and after more rewards.

With theta the expected rewards and m their posterior means, choosing the arm a now loses E[max_b theta_b] - m_a. After n more
rewards the posterior means are m', and the arm with the largest is chosen, which loses

    E[max_b theta_b] - E[max_b m'_b].

If arm b gets n_b of these rewards and its posterior is worth k_b rewards, Var(m'_b) = Var(theta_b) n_b / (n_b + k_b). This is
exact where the posterior mean is linear in the rewards, as for Beta and Bernoulli, Gamma and Poisson, or Normal with known
noise. The law of m' is taken to have the shape of the law of theta, shrunk towards m to that variance.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.numerics.marginal_laws import IDENTITY, INTERVAL_WEIGHTS, LOGIT, MarginalLaw, log_density
from ppl_bandit.types import BestArmMoments, Tail

_NUM_NODES = 48  # from the mean upwards: a Gittins index is off by 4e-5 posterior deviations at 2,000 decisions left
_NUM_LOWER = 16
_NUM_BEFORE = 3  # nodes below the centre, because a mean may lie below it


def tail(law: MarginalLaw) -> Tail:
    """Tabulate the mean of each arm's variable, and its mean excess over nodes from there upwards.

    The excess is the integral of the probability above. Nearly all terms of that integral are positive, so that it keeps its
    relative precision far out. A distribution without a mean gets the mean of its truncated range, which is finite.
    """
    dtype = law.centre.dtype
    is_rising = law.slope * law.power > 0
    upwards = jnp.where(is_rising, 1.0, -1.0).astype(dtype)  # direction of s in which x increases
    above_centre, below_centre = jnp.where(is_rising, law.high, law.low), jnp.where(is_rising, law.low, law.high)
    step = above_centre / (_NUM_NODES - 1 - _NUM_BEFORE)
    lower = below_centre - _NUM_BEFORE * step
    v = step[:, None] * _STEPS.astype(dtype) + lower[:, None] * _LOWER.astype(dtype)
    rise = jnp.exp(v)
    fall = 1.0 / rise
    z, stretch = 0.5 * upwards[:, None] * (rise - fall), 0.5 * (rise + fall)
    density = jnp.exp(log_density(law, z)) * stretch
    image, speed = _image(law, z)
    nodes = law.offset[:, None] + law.slope[:, None] * image
    masses = lower[:, None] * _WEIGHTS.astype(dtype) * density[:, :_NUM_LOWER]
    sums = step[:, None] * _running_integrals(density[:, _NUM_LOWER:])
    total = jnp.sum(masses, axis=1) + sums[:, 0]
    above = sums / total[:, None]
    pace = jnp.abs(law.slope * law.width) * step
    excess = _running_integrals(above * (pace[:, None] * speed[:, _NUM_LOWER:] * stretch[:, _NUM_LOWER:]))
    first = nodes[:, _NUM_LOWER]
    if law.kind == LOGIT:
        mean = law.offset + law.slope * jax.nn.sigmoid(law.centre)
    elif law.kind == IDENTITY:
        mean = law.offset + law.slope * law.centre
    else:
        mean = first + excess[:, 0] - jnp.sum(masses * (first[:, None] - nodes[:, :_NUM_LOWER]), axis=1) / total
    return Tail(mean, nodes[:, _NUM_LOWER:], excess, above)


def _image(law: MarginalLaw, z: Float[Array, "A G"]) -> tuple[Float[Array, "A G"], Float[Array, "A G"]]:
    """Return h(s) of x = offset + slope h(s), and the absolute value of its derivative."""
    shift = law.width[:, None] * z
    if law.kind == IDENTITY:
        return law.centre[:, None] + shift, jnp.ones_like(z)
    if law.kind == LOGIT:
        s = law.centre[:, None] + shift
        far = jnp.exp(-jnp.abs(s))
        near = 1.0 / (1.0 + far)
        return jnp.where(s > 0, near, far * near), far * near * near
    # Beyond the truncated range the variable itself may overflow.
    most = float(np.log(jnp.finfo(z.dtype).max)) / 4.0
    power = law.power[:, None]
    image = jnp.exp(power * law.centre[:, None]) * jnp.exp(jnp.minimum(power * shift, most))
    return image, jnp.abs(power) * image


def _running_integrals(values: Float[Array, "A G"]) -> Float[Array, "A G"]:
    """Integrate from each node to the last, in units of the distance between nodes."""
    return jnp.matmul(values, _RUNNING.astype(values.dtype), precision=jax.lax.Precision.HIGHEST)


def _running_weights(num_nodes: int) -> np.ndarray:
    """Return the matrix of running integrals of sixth order.

    The integrand is 0 beyond the last node, and extrapolated by a polynomial before the first.
    """
    before = np.array([5.0, -10.0, 10.0, -5.0, 1.0])
    padded = np.zeros((num_nodes + 4, num_nodes))
    padded[2:-2] = np.eye(num_nodes)
    padded[1] = before @ padded[2:7]
    padded[0] = before @ padded[1:6]
    pieces = [INTERVAL_WEIGHTS @ padded[start : start + 6] for start in range(num_nodes - 1)]
    return np.vstack([np.cumsum(pieces[::-1], axis=0)[::-1], np.zeros(num_nodes)]).T


_GAUSS, _WEIGHTS = np.polynomial.legendre.leggauss(_NUM_LOWER)
_WEIGHTS = 0.5 * _WEIGHTS
_STEPS = np.concatenate([np.full(_NUM_LOWER, -_NUM_BEFORE), np.arange(_NUM_NODES) - _NUM_BEFORE]).astype(float)
_LOWER = np.concatenate([0.5 * (_GAUSS - 1.0), np.zeros(_NUM_NODES)])
_RUNNING = _running_weights(_NUM_NODES)


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
