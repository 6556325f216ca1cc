"""Run numbered realizations in vectorised chunks.

The random numbers of a realization depend on the key and on its number only. Results therefore do not depend on the chunk
size, the number of threads or the devices.
"""

import math
import multiprocessing
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from ppl_bandit.runtime.compile_ahead import lower
from ppl_bandit.runtime.cpu_threads import is_on_cpu, num_cores, working_memory
from ppl_bandit.runtime.jax_adapter import eliminate_dead_code, inner_jaxprs
from ppl_bandit.runtime.xla_options import simulation_options
from ppl_bandit.types import Key

_CACHE_BYTES = 1 << 20  # of the largest array of a chunk on a CPU; larger chunks take as long per realization
_MIN_CPU_CHUNK = 4
# On a CPU chunks are the same for any number of cores: the last digit of a sum over realizations depends on them.
_NUM_SHARES, _SMALL_CHUNK = 8, 64
_WORKING_COPIES = 6  # of the largest array of a step, while draws are made and compared

_T = TypeVar("_T")


class ChunkFunction(NamedTuple):
    """A compiled function that simulates consecutive realizations.

    Attributes:
        run: (key, number of the first realization, *arguments) -> results, with a leading axis.
        size: number of realizations.
    """

    run: Callable[..., Any]
    size: int


def trace_chunk(
    play: Callable[..., Any],
    key: Key,
    num_realizations: int,
    *,
    arguments: tuple[Any, ...] = (),
    size: int | None = None,
    memory: int | None = None,
    mesh: Mesh | None = None,
    is_sequential: bool = False,
) -> Callable[[], ChunkFunction]:
    """Trace a function that simulates a chunk of realizations; return a function without arguments that compiles it.

    Tracing must stay in one thread, compilation need not.

    Args:
        play: (key, number, *arguments) -> results of one realization. It derives its own key from the first two.
        arguments: example values of further arguments of `play`.
        size: number of realizations; None takes as many as fit the memory and, on a CPU, the cache.
        memory: bytes that all chunks that run at once may use; None takes `working_memory`.
        mesh: devices, in one axis, over which to spread a chunk; None takes JAX's default device.
        is_sequential: whether the realizations of a chunk run one after another. In a vectorised chunk of an approximate
            engine, every realization would wait for the refresh of every other one.
    """
    num_devices = 1 if mesh is None else mesh.size
    play = jax.jit(play)  # so that it is traced once, for its size and inside `run`
    if size is None:
        size = chunk_size(play, key, num_realizations, arguments=arguments, memory=memory, mesh=mesh)

    def run(key: Key, start: Int[Array, ""], *arguments: Any) -> Any:
        position = 0 if mesh is None else jax.lax.axis_index(mesh.axis_names[0])
        numbers = start + size * position + jnp.arange(size)
        each = lambda number: play(key, number, *arguments)  # noqa: E731
        return jax.lax.map(each, numbers) if is_sequential else jax.vmap(each)(numbers)

    if mesh is not None:
        each, same = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
        in_specs = (same,) * (2 + len(arguments))
        run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=each, check_vma=False)
    traced = jax.jit(run, compiler_options=simulation_options(mesh)).trace(key, jnp.asarray(0), *arguments)
    return lambda: ChunkFunction(lower(traced)(), num_devices * size)


def run_chunks(
    function: ChunkFunction,
    key: Key,
    num_realizations: int,
    *,
    mesh: Mesh | None = None,
    arguments: tuple[Any, ...] = (),
    summarise: Callable[[Any], Any] | None = None,
) -> Iterator[Any]:
    """Run all chunks; yield the results of each as NumPy arrays.

    Args:
        arguments: further arguments of the function.
        summarise: results of a chunk -> what is yielded of it; None yields them.
    """

    def job(start: int) -> Callable[[], Any]:
        return lambda: run_chunk(function, key, start, num_realizations, arguments, summarise)

    yield from run_jobs((job(start) for start in range(0, num_realizations, function.size)), mesh)


def run_chunk(
    function: ChunkFunction,
    key: Key,
    start: int,
    end: int,
    arguments: tuple[Any, ...] = (),
    summarise: Callable[[Any], Any] | None = None,
) -> Any:
    """Run the chunk that begins with a realization; return its results before the realization `end` as NumPy arrays."""
    found = _fetch(function.run(key, jnp.asarray(start), *arguments))
    kept = jax.tree.map(lambda leaf: leaf[: end - start], found)  # the last chunk runs a few too many
    return kept if summarise is None else summarise(kept)


def run_jobs(jobs: Iterable[Callable[[], _T]], mesh: Mesh | None = None) -> Iterator[_T]:
    """Call functions, on a CPU in one thread per core, and yield their results in order.

    On a CPU the main thread only waits, also for a single core, so that Ctrl-C takes effect at once: jobs that have not
    started are cancelled, and running ones are not waited for.
    """
    is_double = jnp.zeros(()).dtype == jnp.float64

    def call(job: Callable[[], _T]) -> _T:
        with jax.enable_x64(is_double):  # the setting belongs to a thread
            return job()

    if not is_on_cpu(mesh) or mesh is not None:
        # Processes that share a mesh must run the same computations in the same order.
        yield from map(call, jobs)
        return
    pool = ThreadPoolExecutor(num_workers())
    waiting = deque(pool.submit(call, job) for job in jobs)
    try:
        while waiting:
            yield waiting[0].result()
            waiting.popleft()
    finally:
        pool.shutdown(wait=not waiting, cancel_futures=True)


def run_in_processes(jobs: Sequence[Callable[[], _T]]) -> Iterator[_T]:
    """Call functions that can be pickled, on a CPU in two processes, and yield their results in order.

    Tracing holds the interpreter lock, so jobs that mostly trace and compile do not gain from threads.
    """
    num_processes = min(2, num_workers(), len(jobs))
    if num_processes < 2:
        yield from map(operator.call, jobs)
        return
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(operator.call, jobs)


def num_workers(mesh: Mesh | None = None) -> int:
    """Return how many chunks run at once."""
    return num_cores() if is_on_cpu(mesh) and mesh is None else 1


def chunk_size(
    play: Callable[..., Any],
    key: Key,
    num_realizations: int,
    *,
    arguments: tuple[Any, ...] = (),
    memory: int | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Return how many realizations fit the memory and, on a CPU, the cache; the arguments are those of `trace_chunk`.

    On a CPU without `memory`, it does not depend on the number of cores: sums over chunks are then the same on every machine.
    """
    is_shared = is_on_cpu(mesh) and mesh is None
    num_parallel = (1 if mesh is None else mesh.size) * num_workers(mesh)
    most = -(-num_realizations // num_parallel)
    share = (working_memory(mesh) if memory is None else memory) // num_parallel
    if is_shared:
        most = max(-(-num_realizations // _NUM_SHARES), min(_SMALL_CHUNK, num_realizations))
        share = working_memory(mesh) // _NUM_SHARES if memory is None else share
    traced = jax.jit(play).trace(key, jnp.asarray(0), *arguments)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(traced.out_info))
    # XLA removes unused results too, such as the propensities.
    largest = _largest_array(eliminate_dead_code(traced.jaxpr.jaxpr))
    fits = share // (kept + _WORKING_COPIES * largest)
    if is_on_cpu(mesh):
        fits = min(fits, max(_CACHE_BYTES // largest, _MIN_CPU_CHUNK))
    size = int(np.clip(fits, 1, most))
    return -(-num_realizations // -(-num_realizations // size)) if is_shared else size  # chunks of about equal sizes


def _largest_array(jaxpr: Any) -> int:
    """Return the bytes of the largest array of one step; the stacked outputs of a scan are not counted."""
    sizes = [1]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            sizes += [math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.outvars]
        sizes += [_largest_array(inner) for inner, _ in inner_jaxprs(eqn)]
    return max(sizes)


def _fetch(part: Any) -> Any:
    """Return NumPy arrays; with several processes, the shards of all of them."""
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(part)):
        from jax.experimental import multihost_utils

        part = multihost_utils.process_allgather(part, tiled=True)
    return jax.device_get(part)
