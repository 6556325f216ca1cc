"""How hard the compiler works, and when: nobody should wait seconds for code that runs for a millisecond."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import jax

from ppl_bandit.runtime.blas_threads import one_thread
from ppl_bandit.runtime.cpu_count import num_cores
from ppl_bandit.runtime.cpu_threads import Needs, compiled, needs_of
from ppl_bandit.runtime.exported_functions import Portable, exported, imported
from ppl_bandit.runtime.gc_pause import uncollected
from ppl_bandit.runtime.xla_options import use_defaults

__all__ = [
    "Ahead",
    "in_order_options",
    "large_options",
    "quick_jit",
    "quick_options",
    "run_once",
]

use_defaults()  # before anything is compiled

# The older emitters compile in half the time of the new ones, fewer passes in less, and the code is as fast at the sizes of one
# decision. A hundred operations of a microsecond run faster one after another than handed from thread to thread. Small programs
# are cut into a piece per core, no more: to cut them up takes time, too. Sums over a few numbers are not worth a call of the
# library that XLA makes for them, and sums over thousands no tree of windows: in double precision its digits are not missed,
# and it is a fifth of what there is to compile.
_MOST_PIECES = 4
_IN_ORDER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
_PLAIN = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_experimental_ynn_fusion_type": "",
    "xla_disable_hlo_passes": "tree_reduction_rewriter",
    **_IN_ORDER,
}
_LARGE = {**_PLAIN, "xla_backend_optimization_level": 1}
_SMALL = {
    **_PLAIN,
    "xla_backend_optimization_level": 2,
    "xla_cpu_parallel_codegen_split_count": min(num_cores(), _MOST_PIECES),
}
_BATCH = {**_SMALL, "xla_backend_optimization_level": 3}
_QUICK = {**_SMALL, "xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# XLA compiles without the interpreter's lock, so a second core can work while the main thread goes on.
_BACKGROUND = ThreadPoolExecutor(1, thread_name_prefix="ppl_bandit-compile")


_Lowered: TypeAlias = tuple[jax.stages.Lowered, Needs]


class Ahead:
    """A function in double precision, compiled once per shape of its arguments, and before it is called where possible.

    It is called within `jax.enable_x64(True)`, with arrays and NumPy numbers: a Python number has no fixed type.

    Args:
        is_large: whether it has thousands of operations, and is worth more than one core of the compiler.
        is_batch: whether it does the same for hundreds of rows, and is to be compiled as well as can be.
        is_quick: whether it runs once, and is to be compiled quickly rather than well.
        is_portable: whether other processes are to have what was prepared in the caller's thread.

    Attributes:
        portables: what was traced for other processes, or by them, by the shapes of the arguments.
        num_waits: calls that had to wait because their shapes were not compiled yet.
        seconds: spent so far on tracing and compiling, wherever that was done.
    """

    def __init__(
        self,
        function: Callable,
        *,
        is_large: bool = False,
        is_batch: bool = False,
        is_quick: bool = False,
        is_portable: bool = False,
    ):
        self._function = function
        self._options = _QUICK if is_quick else _LARGE if is_large else _BATCH if is_batch else _SMALL
        self._is_portable = is_portable
        self.portables: dict[str, Portable] = {}
        self._promises: dict[Any, Future[Callable]] = {}
        self._lowered: dict[Any, _Lowered] = {}
        self._lock = threading.Lock()
        self._latest: Callable = self._find
        self.num_waits = 0
        self.seconds = 0.0

    def prepare(
        self,
        *args: Any,
        within: Callable[[], contextlib.AbstractContextManager] | None = None,
    ) -> None:
        """Trace for the shapes of these arguments, and start to compile in the background.

        Tracing stays in the caller's thread: the handlers of NumPyro are one stack for all threads.

        Args:
            within: makes a context inside of which it is traced in the background as well, for functions that run no program
                by now. Where it turns out to be wrong, whoever calls the function traces it.
        """
        shapes, signature = _signature(args)
        if signature in self._promises:
            return
        if within is None and str(signature) not in self.portables:
            lowered = self._lowered[signature] = self._lower(shapes, signature, self._is_portable)
            with self._lock:
                self._promises[signature] = _BACKGROUND.submit(self._compile, lowered)
            return

        def trace_and_compile() -> Callable:
            with within() if within is not None else contextlib.nullcontext():
                lowered = self._lower(shapes, signature)
            return self._compile(lowered)

        with self._lock:
            self._promises[signature] = _BACKGROUND.submit(trace_and_compile)

    def wait(self) -> None:
        """Wait until all that was prepared is compiled."""
        for promise in list(self._promises.values()):
            with contextlib.suppress(CancelledError):
                promise.exception()  # what went wrong is raised where it is called

    @property
    def is_ready(self) -> bool:
        """Whether it is compiled for some shapes of its arguments."""
        return any(promise.done() for promise in list(self._promises.values()))

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function; compile it now if that was not prepared."""
        try:
            return self._latest(*args)
        except TypeError:  # its arguments have other shapes than the last ones: the compiled function refuses them
            return self._find(*args)

    def _find(self, *args: Any) -> Any:
        shapes, signature = _signature(args)
        with self._lock:
            promise = self._promises.get(signature)
            # One that still queues behind others is not waited for, and what failed is tried again where it can be told.
            is_missing = promise is None or promise.cancel() or (promise.done() and promise.exception() is not None)
            if promise is None or is_missing:
                promise = self._promises[signature] = Future()
                promise.set_running_or_notify_cancel()  # another thread may wait for it, and must not take it over
        self.num_waits += not promise.done()
        try:
            if is_missing:
                lowered = self._lowered.get(signature) or self._lower(shapes, signature, self._is_portable)
                promise.set_result(self._compile(lowered))
            elif promise.exception() is not None:
                return self._find(*args)
            self._latest = promise.result()
        except BaseException as error:
            self._promises.pop(signature, None)
            if is_missing and not promise.done():
                promise.set_exception(error)
            raise
        self._lowered.pop(signature, None)
        return self._latest(*args)

    def _lower(self, shapes: Any, signature: Any, is_exported: bool = False) -> _Lowered:
        begin = time.perf_counter()
        name = str(signature)
        with jax.enable_x64(True), uncollected():
            if is_exported and name not in self.portables:
                portable = exported(self._function, shapes, _known(self._options))
                if portable is not None:
                    self.portables[name] = portable
            if name in self.portables:
                portable = self.portables[name]
                function = jax.jit(imported(portable), compiler_options=portable.options)
                lowered = function.lower(*shapes), portable.needs
            else:
                traced = jax.jit(self._function, compiler_options=_known(self._options)).trace(*shapes)
                lowered = traced.lower(), needs_of(traced.jaxpr)
        self.seconds += time.perf_counter() - begin
        return lowered

    def _compile(self, lowered: _Lowered) -> Callable:
        begin = time.perf_counter()
        ready = compiled(*lowered)
        self.seconds += time.perf_counter() - begin
        return ready


def _signature(args: Any) -> tuple[Any, Any]:
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    leaves, treedef = jax.tree.flatten(shapes)
    return shapes, (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def in_order_options() -> dict[str, Any]:
    """Return options under which the operations of a program run one after another."""
    return _known(_IN_ORDER)


def large_options() -> dict[str, Any]:
    """Return options under which a simulation on a CPU compiles in half the time, and runs as fast."""
    return _known(_LARGE)


def quick_options() -> dict[str, Any]:
    """Return options under which XLA compiles quickly."""
    return _known(_QUICK)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out the options that this XLA does not know, and those that the user's XLA_FLAGS set."""
    said, known = os.environ.get("XLA_FLAGS", ""), _known_names()
    return {name: value for name, value in options.items() if name in known and f"--{name}=" not in said}


@functools.cache
def _known_names() -> frozenset[str]:
    """Return the names of the options that this XLA knows: all are tried at once, since a try takes 40 ms."""
    every = {**_LARGE, **_BATCH, **_QUICK}
    if _are_known(**every):
        return frozenset(every)
    return frozenset(name for name, value in every.items() if _are_known(**{name: value}))


def _are_known(**options: Any) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except Exception as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def quick_jit(function: Callable, **settings: Any) -> jax.stages.Wrapped:
    """Jit a function that is to be compiled quickly rather than well."""
    return jax.jit(function, compiler_options=quick_options(), **settings)


def run_once(function: Callable[[], Any]) -> Any:
    """Compile quickly, run once, and return NumPy arrays."""
    with uncollected(), one_thread():
        return jax.device_get(quick_jit(function)())
