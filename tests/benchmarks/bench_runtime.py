"""Measure the runtime tricks of docs/tricks.md one by one: with and without each of them, alternating.

Usage: python tests/benchmarks/bench_runtime.py [options] [dispatch] [packed] [gc] [blas]
"""

import contextlib
import gc
import statistics
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.runtime.compile_ahead import lower
from ppl_bandit.runtime.cpu_threads import one_blas_thread
from ppl_bandit.runtime.gc_pause import paused_gc
from ppl_bandit.runtime.packed_state import pack, unpack
from ppl_bandit.runtime.xla_options import quick_options, small_options

jax.config.update("jax_enable_compilation_cache", False)
STATE = {f"leaf {i}": np.arange(3.0) for i in range(12)}


def small_program(state):
    """Some hundred operations on a few numbers, like one decision."""
    for _ in range(40):
        state = jax.tree.map(lambda leaf: jnp.tanh(leaf) + jnp.max(leaf), state)
    return state


def alternate(*functions, num_rounds=7):
    """Return the least time of each function over several rounds."""
    times = [[] for _ in functions]
    for _ in range(num_rounds):
        for function, own in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            own.append(time.perf_counter() - begin)
    return [min(own) for own in times]


def show(name, unit, scale, **seconds):
    print(f"{name:<28}" + "".join(f"{label} {value * scale:8.2f} {unit}   " for label, value in seconds.items()))


def options():
    def compiled(own):
        return lower(jax.jit(small_program, compiler_options=own).trace(STATE)).compile()

    plain, small, quick = alternate(
        *(lambda own=own: compiled(own) for own in (None, small_options(), quick_options()))
    )
    show("compile a small program", "ms", 1e3, default=plain, small=small, quick=quick)
    runs = [compiled(own) for own in (None, small_options())]
    plain, small = alternate(*(lambda run=run: [jax.block_until_ready(run(STATE)) for _ in range(100)] for run in runs))
    show("run it", "us", 1e4, default=plain, small=small)


def dispatch():
    script = (
        "import sys, time, numpy as np, jax; jax.config.update('jax_cpu_enable_async_dispatch', sys.argv[1] == 'on')\n"
        "f = jax.jit(lambda x: x + 1); x = f(np.ones(3)); best = 1.0\n"
        "for _ in range(50):\n"
        "    t = time.perf_counter(); [np.asarray(f(x)) for _ in range(100)]; best = min(best, time.perf_counter() - t)\n"
        "print(best / 100)"
    )
    found = {
        label: statistics.median(
            float(subprocess.run([sys.executable, "-c", script, label], capture_output=True, check=True).stdout)
            for _ in range(3)
        )
        for label in ("on", "off")
    }
    show("call, asynchronous dispatch", "us", 1e6, **found)


def packed():
    with jax.enable_x64(True):
        plain = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))
        one = jax.jit(lambda row: pack(plain(unpack(row))))
        row = one(pack(STATE))

        def separate():
            tree = STATE
            for _ in range(100):
                tree = plain(tree)
                jax.device_get(tree)

        def together():
            own = row
            for _ in range(100):
                own = one(own)
                unpack(own)

        plain_time, packed_time = alternate(separate, together)
    show("step of 12 small arrays", "us", 1e4, separate=plain_time, packed=packed_time)


def garbage():
    def trace(context):
        gc.collect()
        with context():
            jax.jit(lambda state: small_program(state)).trace(STATE)

    collected, paused = alternate(lambda: trace(contextlib.nullcontext), lambda: trace(paused_gc))
    show("trace a small program", "ms", 1e3, collected=collected, paused=paused)


def blas():
    factorize = jax.jit(jnp.linalg.cholesky)
    matrix = np.eye(200) * 2.0
    jax.block_until_ready(factorize(matrix))
    is_done = threading.Event()

    def busy():
        while not is_done.is_set():
            np.sum(np.random.default_rng(0).normal(size=1_000_000))

    def run(context):
        with context():
            for _ in range(20):
                jax.block_until_ready(factorize(matrix))

    thread = threading.Thread(target=busy)
    thread.start()
    several, one = alternate(lambda: run(contextlib.nullcontext), lambda: run(one_blas_thread))
    is_done.set()
    thread.join()
    show("factorize, one core busy", "ms", 1e3 / 20, several=several, one=one)


PARTS = {"options": options, "dispatch": dispatch, "packed": packed, "gc": garbage, "blas": blas}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
