"""Threads: how many CPU threads the process has, and calls that end before the interpreter does.

jaxlib splits a large batch of factorizations into tasks for XLA's thread pool, which has one thread per core, and waits for
them, possibly inside a thread of that pool. Where several such programs run at once, all threads can wait and none is left to
work. So at most `num_cores() - 1` such programs run at the same time. Their operations must also run one after another, because
two batches of one program can block each other in the same way.

The module also tells whether computations run on a CPU, and how much memory one of them may use.

Also here: calls of daemon threads at the end of the process.

While Python shuts down, a daemon thread that asks for the interpreter's lock is unwound where it is. XLA's C++ code cannot be
unwound there, and the process aborts. So the calls that run end first, and no new one begins: a call adds its thread to
`RUNNING`, then calls `wait_for_exit` if `IS_EXITING` is set, and removes its thread at its end.
"""

import atexit
import math
import os
import threading
import time
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


_LONGEST_WAIT = 30.0  # seconds: compiling takes that long; a thread that waits for a database is outside of XLA

RUNNING = set[int]()  # identifiers of the threads that are in a call
IS_EXITING = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RUNNING.clear)  # the child has none of the other threads


def wait_for_exit() -> None:
    """Let a daemon thread wait here for the end of the process."""
    if threading.current_thread().daemon:
        RUNNING.discard(threading.get_ident())
        threading.Event().wait()


@atexit.register
def _wait_for_calls() -> None:
    IS_EXITING.set()
    until = time.monotonic() + _LONGEST_WAIT
    while RUNNING - {threading.get_ident()} and time.monotonic() < until:
        time.sleep(0.001)
