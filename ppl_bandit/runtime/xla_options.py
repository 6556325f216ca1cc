"""What this library asks of jax, unless the user asked for something else."""

import os
import sys
from pathlib import Path
from typing import Any

import jax

__all__ = ["cache_folder", "is_cache_off", "use_defaults"]


def use_defaults() -> None:
    """Keep compiled programs between processes, and run short computations where they are called.

    - Compiled programs go to `cache_folder()`. A folder of the user's own (`JAX_COMPILATION_CACHE_DIR`, or jax's config) takes
      precedence; `PPL_BANDIT_CACHE=off`, or `JAX_ENABLE_COMPILATION_CACHE=false`, keeps none.
    - On a CPU jax hands computations to another thread; waking it up takes as long as a whole decision.
      `JAX_CPU_ENABLE_ASYNC_DISPATCH=true` keeps jax's own way. It has no effect where jax is already in use.
    """
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    settings: Any = jax.config
    if is_cache_off() or settings.jax_compilation_cache_dir or not settings.jax_enable_compilation_cache:
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home only costs time
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def is_cache_off() -> bool:
    """Tell whether the user wants nothing of this library kept between processes."""
    return os.environ.get("PPL_BANDIT_CACHE", "").lower() in ("off", "0", "false", "no")


def cache_folder() -> Path:
    """Return where compiled programs are kept: a folder of the user's caches, safe to delete at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or (
        "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("LOCALAPPDATA", "~/.cache")
    )
    return Path(base).expanduser() / "ppl_bandit" / "jax"
