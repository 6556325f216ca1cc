"""Run chunks of realizations on the workers of an executor: processes, loky, Dask, MPI, or any other of that interface.

A chunk is a pure function of the program, the settings, the seed and the number of its first realization. So a chunk whose
worker died runs again elsewhere, and results do not depend on the executor, on the number of workers or on the order in which
chunks finish. A task carries plain values and the pickled program, a few kilobytes; each worker unpickles and compiles it once.
"""

import functools
import io
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit import engines, selectors
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.selectors.selector_contract import selector_key
from ppl_bandit.simulation.chunks import ChunkFunction, chunk_size, run_chunk, run_chunks, trace_chunk
from ppl_bandit.types import Engine, Key, Selector

_MAX_DEATHS = 3  # of workers, without a chunk in between that finished
_NUM_COMPILED = 32  # functions that a worker keeps
_COMPILING = (
    threading.Lock()
)  # NumPyro keeps its handlers in one global stack, so a worker traces in one thread at a time


class ExecutorLost(RuntimeError):
    """The executor takes no more chunks: its scheduler is gone, or its workers died again and again."""


class WorkerFailed(RuntimeError):
    """A worker cannot load the program."""


class Study(NamedTuple):
    """What a worker needs to compile and run the chunks of one kind of realizations.

    Attributes:
        model: the reward model of `engine`.
        engine: the engine that `play` uses, or a record of it and others; a worker builds its own.
        play: (engine, key, number, *arguments) -> results of one realization.
        size, is_sequential: as in `trace_chunk`; the size is None until it is computed.
        summarise: results of a chunk -> what the worker returns of it; None returns them.
    """

    model: RewardModel
    engine: Any
    play: Callable[..., Any]
    size: int | None = None
    is_sequential: bool = False
    summarise: Callable[[Any], Any] | None = None


def check_executor(executor: Any, mesh: Any = None) -> None:
    """Refuse a value that takes no tasks, processes that are forked, and an executor together with a mesh.

    Raises:
        ValueError: says what to give instead.
    """
    if executor is None:
        if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
            raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
        return
    if not callable(getattr(executor, "submit", None)):
        raise ValueError(
            f"executor must have the interface of concurrent.futures.Executor, got {executor!r}: give a ProcessPoolExecutor, "
            "loky.get_reusable_executor(), or client.get_executor() of a Dask client"
        )
    if mesh is not None:
        raise ValueError("executor was given together with mesh: spread realizations over workers or over devices")
    context = getattr(executor, "_mp_context", None)
    if isinstance(executor, ProcessPoolExecutor) and context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "the executor forks its processes, and a fork of a process that uses JAX can wait forever: give "
            'ProcessPoolExecutor(N, mp_context=multiprocessing.get_context("spawn"))'
        )


def prepare(
    study: Study,
    key: Key,
    num_realizations: int,
    *,
    arguments: tuple[Any, ...] = (),
    memory: int | None = None,
    mesh: Any = None,
    executor: Executor | None = None,
) -> Callable[[], Callable[..., Iterator[Any]]]:
    """Trace a study, and return a function without arguments that compiles it; workers of an executor do both themselves.

    What that returns runs chunks: (key, num_realizations, *, arguments=()) -> their results in order.
    """
    own = functools.partial(study.play, study.engine)
    if executor is not None:
        if study.size is None:
            study = study._replace(size=chunk_size(own, key, num_realizations, arguments=arguments, memory=memory))
        return lambda: functools.partial(run_on_workers, executor, study)
    compile_chunk = trace_chunk(
        own,
        key,
        num_realizations,
        arguments=arguments,
        size=study.size,
        memory=memory,
        mesh=mesh,
        is_sequential=study.is_sequential,
    )
    return lambda: functools.partial(run_chunks, compile_chunk(), mesh=mesh, summarise=study.summarise)


def run_on_workers(
    executor: Executor,
    study: Study,
    key: Key,
    num_realizations: int,
    *,
    arguments: tuple[Any, ...] = (),
) -> Iterator[Any]:
    """Run all chunks on the workers of an executor; yield their results, NumPy arrays, in the order of the realizations.

    If the caller stops early, chunks that have not started are cancelled. A chunk whose worker died runs again.

    Raises:
        ExecutorLost: if no more chunks can run; those before were yielded.
        WorkerFailed: if a worker cannot load the program.
    """
    assert study.size is not None
    payload = _dumps(study, jnp.zeros(()).dtype == jnp.float64)
    values = jax.tree.map(np.asarray, arguments)
    seed = str(jr.key_impl(key)), np.asarray(jr.key_data(key))
    pool, owned, deaths = executor, [], 0

    def submit(start: int) -> Any:
        try:
            return pool.submit(_run_on_worker, payload, seed, start, num_realizations, values)
        except BrokenExecutor as error:
            failed: Future = Future()
            failed.set_exception(error)
            return failed
        except RuntimeError as error:  # the executor was shut down
            raise ExecutorLost(f"the executor takes no more chunks ({error})") from error

    waiting: deque[tuple[int, Any]] = deque((start, submit(start)) for start in range(0, num_realizations, study.size))
    try:
        while waiting:
            start, future = waiting[0]
            try:
                found = future.result()
            except BrokenExecutor as error:
                deaths += 1
                if deaths > _MAX_DEATHS:
                    raise ExecutorLost(
                        f"workers died {deaths} times while they ran the chunk of realization {start}: give each more memory"
                    ) from error
                pool = _another(pool, error)
                owned.append(pool)
                for place, (begin, old) in enumerate(waiting):
                    if not old.done() or old.exception() is not None:
                        waiting[place] = begin, submit(begin)
                continue
            except (
                Exception
            ) as error:  # Dask cancels what its scheduler can no longer run, and gives up after some deaths
                is_of_executor = type(error).__module__.partition(".")[0] == "distributed"
                if not is_of_executor and not isinstance(error, CancelledError | OSError):
                    raise
                raise ExecutorLost(
                    f"the executor lost its workers or its scheduler ({type(error).__name__}: {error}): start it again, and "
                    "give each worker more memory if workers died"
                ) from error
            waiting.popleft()
            deaths = 0
            yield found
    finally:
        for _, future in waiting:
            future.cancel()
        for pool in owned:
            pool.shutdown(wait=False)


def _another(executor: Any, error: BrokenExecutor) -> Any:
    """Return an executor like one that broke: after a worker's death, those of processes take no more tasks."""
    if type(executor) is ProcessPoolExecutor:
        own: Any = executor
        return ProcessPoolExecutor(own._max_workers, own._mp_context, own._initializer, own._initargs)
    if type(executor).__module__.startswith("loky"):
        import loky

        return loky.ProcessPoolExecutor(executor._max_workers)
    raise ExecutorLost(f"the executor is broken ({error}): start it again") from error


def _run_on_worker(payload: bytes, seed: tuple[str, np.ndarray], start: int, end: int, arguments: Any) -> Any:
    """Run one chunk in the present process; compile it first if it is the first of its study."""
    with jax.enable_x64(True):  # key data have no precision; the study has its own
        key = jr.wrap_key_data(jnp.asarray(seed[1]), impl=seed[0])
    with _COMPILING:
        function, is_double, summarise = _compiled(payload, key, arguments)
    with jax.enable_x64(is_double):
        return run_chunk(function, key, start, end, jax.tree.map(jnp.asarray, arguments), summarise)


_COMPILED: dict[bytes, Any] = {}


def _compiled(payload: bytes, key: Key, arguments: Any) -> tuple[ChunkFunction, bool, Callable[[Any], Any] | None]:
    if payload not in _COMPILED:
        study, is_double = _loads(payload)
        with jax.enable_x64(is_double):
            function = trace_chunk(
                functools.partial(study.play, study.engine),
                key,
                study.size or 1,
                arguments=jax.tree.map(jnp.asarray, arguments),
                size=study.size,
                is_sequential=study.is_sequential,
            )()
        while len(_COMPILED) >= _NUM_COMPILED:
            del _COMPILED[next(iter(_COMPILED))]
        _COMPILED[payload] = function, is_double, study.summarise
    return _COMPILED[payload]


def _loads(payload: bytes) -> tuple[Study, bool]:
    try:
        with jax.enable_x64(True):
            return cloudpickle.loads(payload)
    except Exception as error:
        raise WorkerFailed(
            f"a worker cannot load the program ({type(error).__name__}: {error}): install on the workers what the program "
            "imports, or define the program in the script that is run"
        ) from None


def _dumps(study: Study, is_double: bool) -> bytes:
    buffer = io.BytesIO()
    study.play.__annotations__ = {}  # classes of array types, tens of kilobytes
    try:
        with jax.enable_x64(True):
            _Pickler(buffer, study.model).dump((study, bool(is_double)))
    except Exception as error:
        raise ValueError(
            f"the program or the settings cannot be sent to a worker ({type(error).__name__}: {error}): they must be "
            "functions and values that cloudpickle can pickle, without open files, locks or compiled code"
        ) from None
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Describes reward models, engines and selectors of this library by what they were made of."""

    def __init__(self, file: Any, model: RewardModel):
        super().__init__(file)
        self._model = model

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, RewardModel):
            context = jax.tree.map(np.asarray, value.context)
            return RewardModel, (value.program, value.num_arms, context, value.outcomes)
        if isinstance(value, Engine) and value.explanation.engine in engines.__all__:
            return _engine, (self._model, value.explanation.engine, dict(value.settings))
        if isinstance(value, Selector) and selector_key(value) is not None:
            return _selector, (value.name, dict(value.settings))
        return super().reducer_override(value)


def _engine(model: RewardModel, name: str, settings: dict[str, Any]) -> Engine:
    return getattr(engines, name)(model, **settings)


def _selector(name: str, settings: dict[str, Any]) -> Selector:
    return getattr(selectors, name)(**settings)
