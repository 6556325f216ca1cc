"""The exact probability that each arm is the mode of N candidates: the propensities of double sampling.

Let X_b be the number of candidates that fall on arm b. If their total were Poisson(N) the X_b would be independent
Poisson(N p_b), and arm a would win at level c with probability P(X_a = c) times, for every other arm, P(X_b < c) + s
P(X_b = c): a tie of t arms is won with probability 1 / (t + 1), the integral of s^t over [0, 1]. Conditioning on the
total being N reads one coefficient off the generating function in z, by the discrete Fourier transform; all terms stay
bounded by 1, so nothing overflows or cancels.

Up to 31 candidates on up to three arms are enumerated instead: they fall on the arms with counts x_b with probability
N! prod_b p_b^x_b / x_b!. All terms are positive, so that no digits cancel, and there is no loop whose length depends on the
data: inside a compiled program a call for 3 arms takes 4 us, and by the general method 4 us at 3 candidates and 44 us at 31
(in double precision 10, 9 and 140). For 4 to 8 arms the general method takes 6 to 23 us, in double precision 10 to 50.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Int

from ppl_bandit.numerics.random_bits import stirling_error
from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.runtime.jax_adapter import sequential_vmap

FEW_CANDIDATES = 31  # that are enumerated for up to three arms
_CHUNK = 32  # roots of unity per iteration
_SMALL_CHUNK = 8  # for few arms on a CPU
_FEW_ARMS = 8
_MAX_NODES = 32  # integrates ties of up to 64 arms exactly, and of up to 200 arms to 5e-11


def mode_probs_of_three(probs: Float[Array, " A"], num: Int[Array, ""], *, is_lowest_first: bool) -> Float[Array, " A"]:
    """Compute the probability that each of up to three arms is the mode of `num` draws, at most `FEW_CANDIDATES`.

    Args:
        is_lowest_first: whether arms drawn equally often lose to the lowest index; otherwise one of them at random.
    """
    levels = np.arange(FEW_CANDIDATES + 1, dtype=np.int32)
    # A factor of each candidate keeps p^x / x! near 1. It is common to all ways in which the candidates can fall.
    factors = np.array([(FEW_CANDIDATES / 2) ** count / math.factorial(count) for count in range(levels.size)])
    powers = jnp.pad(probs, (0, 3 - probs.size))[:, None] ** levels.astype(probs.dtype) * factors.astype(probs.dtype)
    first, second = levels[:, None], levels
    third = num.astype(jnp.int32) - (first + second)
    at_third = powers[2].at[jnp.clip(third, 0, levels[-1])].get(mode="promise_in_bounds")
    chances = powers[0][:, None] * powers[1] * jnp.where(third >= 0, at_third, 0.0)
    largest = jnp.maximum(np.maximum(first, second), third)
    is_first, is_second, is_third = (count == largest for count in (first, second, third))
    if is_lowest_first:
        is_second, is_third = is_second & ~is_first, is_third & ~is_first & ~is_second
    else:
        chances = chances / sum(is_mode.astype(probs.dtype) for is_mode in (is_first, is_second, is_third))
    won = [jnp.sum(jnp.where(wins, chances, 0.0)) for wins in (is_first, is_second, is_third)[: probs.size]]
    return jnp.stack(won) / sum(won)


def mode_probs(probs: Float[Array, " A"], num: Int[Array, ""], *, is_lowest_first: bool = False) -> Float[Array, " A"]:
    """Compute the probability that each arm is the mode of `num` independent draws from Cat(probs).

    Error below 1e-10 in float64 and 1e-5 in float32. The work grows with the number of levels c that the mode may
    plausibly have, and is skipped when `num` is 1 or when the leader loses with probability below rounding.

    Args:
        probs: nonnegative and sum to 1.
        num: at least 1.
        is_lowest_first: whether arms drawn equally often lose to the lowest index; otherwise one of them at random.
    """
    by_loops = functools.partial(_by_loops, is_lowest_first=is_lowest_first)
    if not is_on_cpu():
        return by_loops(probs, num)

    def by_number(probs: Float[Array, " A"], num: Int[Array, ""]) -> Float[Array, " A"]:
        by_counts = functools.partial(mode_probs_of_three, is_lowest_first=is_lowest_first)
        is_several, is_many = num > _largest_single(is_lowest_first), num > FEW_CANDIDATES
        methods = (lambda probs, _: probs, by_counts, by_loops)
        return jax.lax.switch(is_several.astype(int) + is_many.astype(int), methods, probs, num)

    # Under vmap, vectorised loops run as long as the longest of them: rows are computed one after another.
    method = by_number if probs.size <= 3 else by_loops
    return sequential_vmap(method)(probs, num)


def _largest_single(is_lowest_first: bool) -> int:
    """Return the number of candidates up to which the mode has the distribution p-hat: 2 if ties are broken at random."""
    return 1 if is_lowest_first else 2


def _by_loops(probs: Float[Array, " A"], num: Int[Array, ""], *, is_lowest_first: bool) -> Float[Array, " A"]:
    dtype = probs.dtype
    num_arms = probs.size
    total = num.astype(dtype)
    rates = total * probs
    chunk_size = _SMALL_CHUNK if is_on_cpu() and num_arms <= _FEW_ARMS else _CHUNK
    is_single = num <= _largest_single(is_lowest_first)
    # Neglected tails, in nats: below 1e-13 in float64 and 1e-7 in float32, also after the sum over arms and the division by
    # P(Poisson(N) = N), which is at least 1 / 80 for N <= 1000.
    margin = -math.log(jnp.finfo(dtype).eps) + math.log(num_arms) + 3.0
    largest = jnp.max(probs)
    # Chernoff's bound of the log probability that an arm is drawn as often as the leader, times the number of arms.
    gaps = jnp.sqrt(largest) - jnp.sqrt(probs)
    log_upsets = total * jnp.log1p(-jnp.minimum(gaps**2, 1.0)) + math.log(num_arms)
    is_contender = log_upsets >= -margin  # the leader is one
    first, last = _levels(total * largest, total, num_arms, margin)
    last = jnp.where((jnp.sum(is_contender) == 1) | is_single, 0, last)
    num_chunks = jnp.ceil(_spread(total, margin) / (2 * chunk_size)).astype(int)
    orders, *rule = _tie_rule(num_arms, is_lowest_first)
    nodes, weights = (jnp.asarray(numbers, dtype) for numbers in rule)

    def add_chunk(chunk, won):
        half_turns = 2 * (chunk * chunk_size + jnp.arange(chunk_size)) + 1

        def unit_root(power: Int[Array, ""]) -> Complex[Array, " K"]:
            # Reduced in integers, so that a high power costs no accuracy.
            turns = (half_turns * power) % (4 * chunk_size * num_chunks)
            angle = (math.pi / (2 * chunk_size)) * turns.astype(dtype) / num_chunks
            return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))

        shift_to_total = unit_root(-num)

        def add_level(state):
            level, below, won = state
            at_level = _poisson_prob(level, rates)[:, None] * unit_root(level)

            def add_node(node, others):
                before = below + nodes[order, node, 0] * at_level
                after = below + nodes[order, node, 1] * at_level
                return others + weights[order, node] * _product_of_others(before, after)

            order = jnp.minimum(-(-jnp.minimum(num // level, num_arms) // 2), orders)
            others = jax.lax.fori_loop(0, jnp.where(level < first, 0, order), add_node, jnp.zeros_like(below))
            coefficients = at_level * others * shift_to_total
            return level + 1, below + at_level, won + jnp.sum(coefficients.real, axis=1)

        below = jnp.exp(-rates)[:, None] * unit_root(jnp.zeros_like(num))
        _, _, won = jax.lax.while_loop(lambda state: state[0] <= last, add_level, (jnp.ones_like(num), below, won))
        return won

    won = jax.lax.fori_loop(0, jnp.where(last > 0, num_chunks, 0), add_chunk, jnp.zeros_like(probs))
    won = jnp.maximum(won, 0.0)
    settled = jnp.where(is_single, probs, is_contender.astype(dtype))
    # The normaliser is K P(Poisson(N) = N) / 2; dividing by the sum instead also cancels rounding common to all arms.
    return jnp.where(last > 0, won / jnp.where(last > 0, jnp.sum(won), 1.0), settled)


def _levels(
    largest: Float[Array, ""], total: Float[Array, ""], num_arms: int, margin: float
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Bound the count that the mode may have: Bernstein's inequality, and from below the pigeonhole too."""
    first = jnp.maximum(largest - jnp.sqrt(2.0 * margin * largest), total / num_arms)
    last = jnp.minimum(largest + _spread(largest, margin), total)
    # Rounding must not exclude a bound that is a whole number.
    return jnp.ceil(first * (1.0 - 1e-5)).astype(int), jnp.floor(last * (1.0 + 1e-5)).astype(int)


def _spread(mean: Float[Array, ""], margin: float) -> Float[Array, ""]:
    """Bound how far a Poisson count exceeds its mean, except with probability exp(-margin)."""
    return margin / 3.0 + jnp.sqrt((margin / 3.0) ** 2 + 2.0 * margin * mean)


def _poisson_prob(count: Int[Array, ""], rates: Float[Array, " A"]) -> Float[Array, " A"]:
    """Compute P(Poisson(rate) = count), count >= 1, by Loader's saddle-point form, exact at large counts too."""
    size = count.astype(rates.dtype)
    excess = (rates - size) / size
    deviance = size * (excess - jnp.log1p(excess))
    return jnp.exp(-stirling_error(size) - deviance) / jnp.sqrt(2.0 * math.pi * size)


def _product_of_others(before: Complex[Array, "A K"], after: Complex[Array, "A K"]) -> Complex[Array, "A K"]:
    """Multiply, for each arm a, `before` of the arms below a and `after` of the arms above it.

    Products from both ends, not a division by arm a's own factor: partial exponential sums have zeros.
    """
    if before.shape[0] <= _FEW_ARMS:
        below, above = [jnp.ones_like(before[0])], [jnp.ones_like(before[0])]
        for arm in range(before.shape[0] - 1):
            below.append(below[-1] * before[arm])
            above.append(above[-1] * after[-1 - arm])
        return jnp.stack([low * high for low, high in zip(below, above[::-1], strict=True)])
    one = jnp.ones_like(before[:1])
    both = jnp.concatenate([jnp.concatenate([one, before[:-1]]), jnp.concatenate([one, after[:0:-1]])], axis=1)
    from_below, from_above = jnp.split(jax.lax.associative_scan(jnp.multiply, both), 2, axis=1)
    return from_below * from_above[::-1]


@functools.cache
def _tie_rule(num_arms: int, is_lowest_first: bool) -> tuple[int, np.ndarray, np.ndarray]:
    """List quadrature rules for the tie-break, by number of nodes.

    Returns:
        The largest rule's number of nodes; (G, G, 2), s for the arms before and after the winner; (G, G), weights. With ties
        to the lowest index the arms before must stay strictly below (s = 0), those after may be level (s = 1), and one node
        does.
    """
    if is_lowest_first:
        return 1, np.tile([0.0, 1.0], (2, 1, 1)), np.ones((2, 1))
    largest = min(-(-num_arms // 2), _MAX_NODES)
    nodes, weights = np.zeros((2, largest + 1, largest))
    for num_nodes in range(1, largest + 1):
        own, own_weights = np.polynomial.legendre.leggauss(num_nodes)
        nodes[num_nodes, :num_nodes], weights[num_nodes, :num_nodes] = (own + 1.0) / 2.0, own_weights / 2.0
    return largest, np.stack([nodes, nodes], axis=-1), weights
