"""Compiler options and JAX settings of this library; the user's own settings take precedence.

The CPU options were chosen by measuring small programs (100 to 2,000 operations on a few numbers each):

- The older emitters compile in half the time of the fusion emitters, and the code is as fast at these sizes.
- `CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED` runs operations one after another: passing them between threads takes longer than
  running them.
- `xla_cpu_parallel_codegen_split_count`: splitting a small program into more parts than cores only takes time.
- Without the YNN library, and without tree reductions, fewer operations are compiled; in float64 the accuracy of plain sums
  is sufficient.
- Without `cpu-parallel-task-assigner`, no loop is divided between threads: for loops over 20,000 elements, waking up a thread
  takes longer than the loop.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ppl_bandit.runtime.archive import make_private
from ppl_bandit.runtime.cpu_threads import is_on_cpu, num_cores
from ppl_bandit.runtime.jax_adapter import set_compilation_cache

_MAX_PARTS = 4
_IN_ORDER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
_COMMON = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_experimental_ynn_fusion_type": "",
    "xla_disable_hlo_passes": "tree_reduction_rewriter,cpu-parallel-task-assigner",
    **_IN_ORDER,
}
_LARGE = {**_COMMON, "xla_backend_optimization_level": 1}
_SMALL = {
    **_COMMON,
    "xla_backend_optimization_level": 2,
    "xla_cpu_parallel_codegen_split_count": min(num_cores(), _MAX_PARTS),
}
_BATCH = {
    name: value
    for name, value in _SMALL.items()
    if name not in ("xla_cpu_use_fusion_emitters", "xla_cpu_experimental_ynn_fusion_type")
}
_QUICK = {**_SMALL, "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def small_options() -> dict[str, Any]:
    """Return options for a small program that runs many times, such as one decision."""
    return _supported(_SMALL)


def batch_options() -> dict[str, Any]:
    """Return options for many decisions at once, each of which reads a number off the laws of the arms, such as a quantile.

    With the older emitters, or without the YNN library, sixteen decisions by `bayes_ucb` compile for more than seven minutes:
    a running sum is compiled anew into each comparison with it. With both they compile for seven seconds. Decisions that read
    no such number compile several times as fast with `small_options`.
    """
    return _supported(_BATCH)


def large_options() -> dict[str, Any]:
    """Return options for a program of thousands of operations: it compiles in half the time and runs as fast."""
    return _supported(_LARGE)


def quick_options() -> dict[str, Any]:
    """Return options for a program that runs once: the shortest time to compile."""
    return _supported(_QUICK)


def in_order_options() -> dict[str, Any]:
    """Return options that make the operations of a program run one after another."""
    return _supported(_IN_ORDER)


def simulation_options(mesh: Mesh | None = None) -> dict[str, Any] | None:
    """Return options for a simulation on a mesh, or on JAX's default device: XLA's own on an accelerator."""
    return large_options() if is_on_cpu(mesh) else None


def _supported(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out options that this version of XLA does not have, and those that the user's XLA_FLAGS set."""
    flags, names = os.environ.get("XLA_FLAGS", ""), _supported_names()
    return {name: value for name, value in options.items() if name in names and f"--{name}=" not in flags}


@functools.cache
def _supported_names() -> frozenset[str]:
    every = {**_LARGE, **_QUICK}
    if _are_supported(**every):  # one test compilation of 40 ms instead of one per option
        return frozenset(every)
    return frozenset(name for name, value in every.items() if _are_supported(**{name: value}))


def _are_supported(**options: Any) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def is_cache_off() -> bool:
    """Return whether the user turned this library's caches on disk off (`PPL_BANDIT_CACHE=off`)."""
    return os.environ.get("PPL_BANDIT_CACHE", "").lower() in ("off", "0", "false", "no")


def cache_folder() -> Path:
    """Return the folder for compiled programs, inside the user's cache folder; it can be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or (
        "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("LOCALAPPDATA", "~/.cache")
    )
    return Path(base).expanduser() / "ppl_bandit" / "jax"


def compilation_cache() -> Path | None:
    """Return the folder of JAX's compilation cache; None if it is off or not on a local disk.

    Turns the cache off if it is in a folder that others can write, also one that was set after the import: compiled programs
    are code.
    """
    settings: Any = jax.config
    given = settings.jax_compilation_cache_dir
    if not given or "://" in given or not settings.jax_enable_compilation_cache:
        return None
    if not _is_private(given):
        set_compilation_cache(None)
        return None
    return Path(given)


@functools.cache
def _is_private(folder: str) -> bool:
    return make_private(Path(folder))


def _set_jax_defaults() -> None:
    """Turn JAX's compilation cache on and its asynchronous dispatch on CPUs off, unless the user configured them.

    - Compiled programs are cached in `cache_folder()`. `JAX_COMPILATION_CACHE_DIR` names another folder;
      `PPL_BANDIT_CACHE=off` or `JAX_ENABLE_COMPILATION_CACHE=false` turns caching off. A folder that others can write is not
      used, because compiled programs are code.
    - Asynchronous dispatch passes every computation to another thread; waking it up takes as long as one decision.
      `JAX_CPU_ENABLE_ASYNC_DISPATCH=true` leaves it on. The setting has no effect if JAX has already run a computation.
    """
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    settings: Any = jax.config
    given = settings.jax_compilation_cache_dir
    compilation_cache()
    if is_cache_off() or given or not settings.jax_enable_compilation_cache:
        return
    folder = cache_folder()
    if not make_private(folder):
        return
    set_compilation_cache(str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_set_jax_defaults()
