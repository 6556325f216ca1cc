"""Nanoseconds a draw and seconds to compile, against jax.random and NumPy in the same run.

Run it by hand: `python tests/benchmarks/bench_sampling.py`. Each figure is the fastest of several calls, so that other
work on the machine counts little; small tables are drawn many times inside one compiled scan, as a simulation does.
"""

import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.numerics import sampling

TABLES = ((1000, 3), (1000, 1000))  # (draws, parameters)
CONCENTRATIONS = (0.3, 1.1, 20.0)


def time_jax(draw: Callable[[Array], Array], shape: tuple[int, int], num_calls: int) -> tuple[float, float]:
    """Seconds to compile and nanoseconds a draw of `draw(key)`, repeated inside one scan."""
    repeats = max(1, 300_000 // math.prod(shape))

    def run(key: Array) -> Array:
        return jax.lax.scan(lambda total, key: (total + draw(key), None), jnp.zeros(shape), jr.split(key, repeats))[0]

    start = time.perf_counter()
    compiled = jax.jit(run).lower(jr.key(0)).compile()
    seconds_to_compile = time.perf_counter() - start
    seconds = fastest(lambda call: jax.block_until_ready(compiled(jr.key(call))), num_calls)
    return seconds_to_compile, 1e9 * seconds / (repeats * math.prod(shape))


def fastest(function: Callable[[int], object], num_calls: int) -> float:
    elapsed = []
    for call in range(num_calls):
        start = time.perf_counter()
        function(call)
        elapsed.append(time.perf_counter() - start)
    return min(elapsed)


def report(name: str, shape: tuple[int, int], ours: Callable, theirs: Callable, numpys: Callable) -> None:
    compile_ours, cost_ours = time_jax(ours, shape, num_calls=15)
    compile_theirs, cost_theirs = time_jax(theirs, shape, num_calls=2)
    cost_numpy = 1e9 * fastest(numpys, num_calls=10) / math.prod(shape)
    print(
        f"{name:<22} {'x'.join(map(str, shape)):>10} {cost_ours:8.1f} {cost_theirs:11.1f} {cost_numpy:7.1f}"
        f" {cost_theirs / cost_ours:9.1f}x {cost_numpy / cost_ours:7.1f}x {compile_ours:9.2f} {compile_theirs:9.2f}"
    )


def report_gamma(shape: tuple[int, int], value: float, generator: np.random.Generator) -> None:
    shapes = jnp.full(shape[1], value)
    report(
        f"gamma({value})",
        shape,
        lambda key: jnp.exp(sampling.log_gamma(key, shapes, shape[:1])),
        lambda key: jr.gamma(key, value, shape),
        lambda _: generator.standard_gamma(value, shape, np.float32),
    )


def report_beta(shape: tuple[int, int], value: float, generator: np.random.Generator) -> None:
    shapes = jnp.full(shape[1], value)
    report(
        f"beta({value}, {value})",
        shape,
        lambda key: sampling.beta(key, shapes, shapes, shape[:1]),
        lambda key: jr.beta(key, value, value, shape),
        lambda _: generator.beta(value, value, shape),
    )


def report_normal(shape: tuple[int, int], generator: np.random.Generator) -> None:
    report(
        "normal",
        shape,
        lambda key: sampling.normal(key, jnp.zeros(shape[1]), jnp.ones(shape[1]), shape[:1]),
        lambda key: jr.normal(key, shape),
        lambda _: generator.standard_normal(shape, np.float32),
    )


def main() -> None:
    generator = np.random.default_rng(0)
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}; float32; nanoseconds a draw, seconds to compile")
    print(
        f"{'':<22} {'table':>10} {'ours':>8} {'jax.random':>11} {'numpy':>7} {'jax/ours':>10} {'np/ours':>8}"
        f" {'compile':>9} {'jax':>9}"
    )
    for shape in TABLES:
        for value in CONCENTRATIONS:
            report_gamma(shape, value, generator)
        report_beta(shape, 2.0, generator)
        report_normal(shape, generator)


if __name__ == "__main__":
    main()
