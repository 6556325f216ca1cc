"""Settings of the test process, made before jax is imported; subprocesses inherit them."""

import os

# A warm cache would hide compile times and stale programs; ask for it with JAX_ENABLE_COMPILATION_CACHE=true.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ.setdefault("MPLBACKEND", "agg")
# Tests compile far more than they compute: compile without the expensive passes.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false",
)
