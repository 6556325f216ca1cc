"""CPU threads: the number of cores, and a limit on programs that could deadlock XLA's thread pool.

jaxlib splits a large batch of factorizations into tasks for XLA's thread pool, which has one thread per core, and waits for
them, possibly inside a thread of that pool. Where several such programs run at once, all threads can wait and none is left to
work. So at most `num_cores() - 1` such programs run at the same time. Their operations must also run one after another, because
two batches of one program can block each other in the same way.

The module also tells whether computations run on a CPU, and how much memory one of them may use.
"""

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, all_equations

# Upper bounds on jaxlib's cost model for one (m, n) matrix, in units of m n max(m, n) operations.
_COSTS = {"cholesky": 1, "triangular_solve": 1, "lu": 1, "geqrf": 2, "qr": 4, "householder_product": 4, "ormqr": 4}
_COSTS |= dict.fromkeys(("eig", "eigh", "geqp3", "hessenberg", "schur", "svd", "tridiagonal", "tridiagonal_solve"), 30)
_MIN_BATCH_OPERATIONS = 200_000  # jaxlib splits a batch from this cost on


def num_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_LIMIT = threading.BoundedSemaphore(max(1, num_cores() - 1))


def needs_limit(closed: ClosedJaxpr) -> bool:
    """Return whether only a limited number of programs with such a jaxpr may run at once."""
    factorizations = [eqn for eqn in all_equations(closed.jaxpr) if eqn.primitive.name in _COSTS]
    return is_on_cpu() and any(map(_is_large_batch, factorizations))


def limit_runs(function: Callable) -> Callable:
    """Return a compiled function of which, and of all others like it, a limited number runs at once."""

    def run_limited(*args: Any) -> Any:
        with _LIMIT:
            return jax.block_until_ready(function(*args))

    return run_limited


def _is_large_batch(eqn: Any) -> bool:
    shapes = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    cost = _COSTS[eqn.primitive.name]
    return any(cost * math.prod(s) * max(s[-2:]) >= _MIN_BATCH_OPERATIONS for s in shapes if len(s) > 2)


_CPU_MEMORY = 1 << 29


def is_on_cpu(mesh: Mesh | None = None) -> bool:
    """Return whether computations on a mesh, or on JAX's default device, run on a CPU."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return platform == "cpu"


def working_memory(mesh: Mesh | None = None) -> int:
    """Return the bytes that one computation should use at most: half a GiB on a CPU, else a third of the devices' memory."""
    if is_on_cpu(mesh):
        return _CPU_MEMORY
    num_devices = 1 if mesh is None else mesh.size
    return jax.local_devices()[0].memory_stats()["bytes_limit"] // 3 * num_devices
