"""CPU threads: the number of cores, single-threaded BLAS, and a limit on programs that could deadlock XLA's thread pool.

Two problems occur where compiled programs factorize matrices on a CPU:

- jaxlib splits a large batch of factorizations into tasks for XLA's thread pool, which has one thread per core, and waits for
  them, possibly inside a thread of that pool. Where several such programs run at once, all threads can wait and none is left
  to work. So at most `num_cores() - 1` such programs run at the same time (`ThreadNeeds.is_limited`). Their operations must
  also run one after another, because two batches of one program can block each other in the same way.
- The BLAS library uses all cores for one matrix of 100 rows. Its threads spin while they wait for each other, so a
  factorization of 0.2 ms takes 80 ms where another thread uses one of the cores. `one_blas_thread` prevents that.

The module also tells whether computations run on a CPU, and how much memory one of them may use.
"""

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import scipy.linalg  # noqa: F401 - JAX calls the BLAS library that SciPy loads
import threadpoolctl
from jax.sharding import Mesh

from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, all_equations

__all__ = ["ThreadNeeds", "is_on_cpu", "num_cores", "one_blas_thread", "thread_needs", "with_threads", "working_memory"]

# Upper bounds on jaxlib's cost model for one (m, n) matrix, in units of m n max(m, n) operations.
_COSTS = {"cholesky": 1, "triangular_solve": 1, "lu": 1, "geqrf": 2, "qr": 4, "householder_product": 4, "ormqr": 4}
_COSTS |= dict.fromkeys(("eig", "eigh", "geqp3", "hessenberg", "schur", "svd", "tridiagonal", "tridiagonal_solve"), 30)
_MIN_BATCH_OPERATIONS = 200_000  # jaxlib splits a batch from this cost on
_MIN_MATRIX_OPERATIONS = 20_000  # BLAS may use several threads for one matrix from this cost on
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def num_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_LIMIT = threading.BoundedSemaphore(max(1, num_cores() - 1))
_BLAS_LOCK = threading.Lock()
_num_blas_users = 0
_num_threads_before: list[int] = []


class ThreadNeeds(NamedTuple):
    """What a compiled program needs at run time on a CPU.

    Attributes:
        is_limited: whether only a limited number of such programs may run at once.
        needs_one_blas_thread: whether BLAS must be limited to one thread.
    """

    is_limited: bool
    needs_one_blas_thread: bool


def thread_needs(closed: ClosedJaxpr) -> ThreadNeeds:
    """Find out from its jaxpr what a program needs."""
    if not is_on_cpu():
        return ThreadNeeds(False, False)
    factorizations = [eqn for eqn in all_equations(closed.jaxpr) if eqn.primitive.name in _COSTS]
    return ThreadNeeds(any(map(_is_large_batch, factorizations)), any(map(_is_large_matrix, factorizations)))


def with_threads(function: Callable, needs: ThreadNeeds) -> Callable:
    """Return a compiled function as one that gets the threads it needs."""
    if needs.is_limited:

        def run_limited(*args: Any) -> Any:
            with _LIMIT, one_blas_thread():
                return jax.block_until_ready(function(*args))

        return run_limited
    if needs.needs_one_blas_thread:

        def run_with_one_blas_thread(*args: Any) -> Any:
            with one_blas_thread():
                return function(*args)

        return run_with_one_blas_thread
    return function


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread, unless an environment variable sets its number of threads."""
    global _num_blas_users, _num_threads_before
    with _BLAS_LOCK:
        if _num_blas_users == 0:
            _num_threads_before = [library.num_threads for library in _blas_libraries()]
            _set_blas_threads([1] * len(_num_threads_before))
        _num_blas_users += 1
    try:
        yield
    finally:
        with _BLAS_LOCK:
            _num_blas_users -= 1
            if _num_blas_users == 0:
                _set_blas_threads(_num_threads_before)


def _set_blas_threads(numbers: list[int]) -> None:
    for library, number in zip(_blas_libraries(), numbers, strict=True):
        library.set_num_threads(number)


@functools.cache
def _blas_libraries() -> list[Any]:
    """Return the libraries that JAX may call: SciPy's own, if it has one, else all that are loaded."""
    if any(name in os.environ for name in _BLAS_VARIABLES):
        return []
    loaded = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    of_scipy = [library for library in loaded if "scipy.libs" in (library.filepath or "")]
    return of_scipy or loaded


def _is_large_batch(eqn: Any) -> bool:
    batches = [shape for shape in _shapes(eqn) if len(shape) > 2]
    cost = _COSTS[eqn.primitive.name]
    return any(cost * math.prod(shape) * max(shape[-2:]) >= _MIN_BATCH_OPERATIONS for shape in batches)


def _is_large_matrix(eqn: Any) -> bool:
    sizes = (math.prod(shape[-2:]) * max(shape[-2:]) for shape in _shapes(eqn) if len(shape) > 1)
    return any(_COSTS[eqn.primitive.name] * size >= _MIN_MATRIX_OPERATIONS for size in sizes)


def _shapes(eqn: Any) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]


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
