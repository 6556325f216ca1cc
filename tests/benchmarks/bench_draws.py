"""Time draws with and without the tricks of `runtime/random_draws.py`.

Usage: python tests/benchmarks/bench_draws.py
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr

from ppl_bandit.numerics import sampling
from ppl_bandit.runtime.xla_options import small_options
from ppl_bandit.selectors.selector_contract import winner_frequencies

SHAPE = (1000, 3)
NUM_RUNS, NUM_REPEATS = 8, 100


def bits_of_jax(key, index, attempt):
    """Return two words for each index from `jax.random.bits`, in place of the unrolled hash."""
    bits = jr.bits(jr.fold_in(key, attempt), index.shape, jnp.uint64)
    return (bits >> 32).astype(jnp.uint32), bits.astype(jnp.uint32)


def compute_directly(compute, shape, dtype):
    """Compute an array without materialising it."""
    del shape, dtype
    return compute(jnp.uint32(0))


def beta_wins(key, a, b):
    return winner_frequencies(sampling.beta(key, a, b, SHAPE[:1]), jnp.ones(SHAPE[1:], bool))


def gamma_draws(key, a, b):
    return jnp.exp(sampling.log_gamma(key, a, SHAPE[:1], b))


def normal_draws(key, a, b):
    return sampling.normal(key, a, b, SHAPE[:1])


def compiled(function: Callable, *arguments, **replaced) -> Callable:
    """Compile a function with some names of `numerics.sampling` replaced."""
    originals = {name: getattr(sampling, name) for name in replaced}
    jax.clear_caches()
    for name, value in replaced.items():
        setattr(sampling, name, value)
    try:
        return jax.jit(lambda *given: function(*given)).lower(*arguments).compile(compiler_options=small_options())
    finally:
        for name, value in originals.items():
            setattr(sampling, name, value)


def main() -> None:
    """Print the shortest time of each variant, interleaved."""
    with jax.enable_x64(True):
        arguments = jr.key(0), jnp.array([3.0, 20.0, 150.0]), jnp.array([5.0, 7.0, 9.0])
        programs = {}
        for function in (gamma_draws, normal_draws, beta_wins):
            programs[function.__name__] = compiled(function, *arguments)
            programs[f"{function.__name__}, jax.random.bits"] = compiled(function, *arguments, random_words=bits_of_jax)
            programs[f"{function.__name__}, not materialised"] = compiled(
                function, *arguments, materialize=compute_directly
            )
        best = dict.fromkeys(programs, float("inf"))
        for _ in range(NUM_REPEATS):
            for name, program in programs.items():
                start = time.perf_counter()
                for _ in range(NUM_RUNS):
                    program(*arguments).block_until_ready()
                best[name] = min(best[name], (time.perf_counter() - start) / NUM_RUNS)
    for name, seconds in best.items():
        print(f"{name:40} {1e6 * seconds:8.1f} us")


if __name__ == "__main__":
    main()
