"""Compile functions before they are called, in a background thread."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from ppl_bandit.runtime.cpu_threads import limit_runs, needs_limit
from ppl_bandit.runtime.disk_cache import compiler_settings
from ppl_bandit.runtime.exported_functions import ExportedFunction, arguments_text, export_traced, import_exported
from ppl_bandit.runtime.xla_options import in_order_options, quick_options, small_options

__all__ = ["CompiledAhead", "LoweredProgram", "lower", "quick_jit", "run_afterwards", "run_once"]

# XLA compiles without Python's global interpreter lock, so the main thread goes on meanwhile.
_BACKGROUND = ThreadPoolExecutor(1, thread_name_prefix="ppl_bandit-compile")


class LoweredProgram(NamedTuple):
    """A lowered function, and whether the number of its runs at once is limited (`runtime/cpu_threads.py`)."""

    lowered: jax.stages.Lowered
    is_limited: bool

    def compile(self) -> Callable:
        """Compile it."""
        if self.is_limited:
            return limit_runs(self.lowered.compile(compiler_options=in_order_options()))
        return self.lowered.compile()


def lower(traced: jax.stages.Traced) -> LoweredProgram:
    """Lower a traced function."""
    return LoweredProgram(traced.lower(), needs_limit(traced.jaxpr))


class CompiledAhead:
    """A function in float64 that is compiled once per form of its arguments, before it is called where possible.

    Call it within `jax.enable_x64(True)`, with arrays and NumPy numbers: a Python number has no fixed dtype.

    Args:
        function: pure function of pytrees of arrays.
        options: returns the compiler options.
        is_exported: whether it is exported for other processes, in the form that is traced first.

    Attributes:
        exported: what was exported here or by another process; None if nothing was, or JAX cannot read it.
        num_waits: number of calls that waited for the compiler.
    """

    def __init__(
        self, function: Callable, options: Callable[[], dict[str, Any]] = small_options, *, is_exported: bool = False
    ):
        self._function = function
        self._options = options
        self._is_exported = is_exported
        self._compiled: dict[Any, Future[Callable]] = {}
        self._lowered: dict[Any, LoweredProgram] = {}
        self._lock = threading.Lock()
        self._latest: Callable = self._find
        self.exported: ExportedFunction | None = None
        self.num_waits = 0

    def prepare(self, *args: Any, within: Callable[[], contextlib.AbstractContextManager] | None = None) -> None:
        """Trace for the form of these arguments, and start to compile in the background.

        NumPyro's handlers are one stack for all threads, so a function that runs a program is traced in the caller's thread.

        Args:
            within: returns a context in which the function can be traced in the background too. If tracing fails there, or the
                caller's settings of JAX are local to its thread, the first call traces the function.
        """
        form, signature = _signature(args)
        if signature in self._compiled:
            return
        has_exported = self._has_exported(form)
        if within is None and not has_exported:
            lowered = self._lowered[signature] = self._lower(form)
            with self._lock:
                self._compiled[signature] = _BACKGROUND.submit(lowered.compile)
            return

        settings = compiler_settings()

        def lower_and_compile() -> Callable:
            if has_exported or within is None:
                return self._lower_exported(form).compile()
            if compiler_settings() != settings:
                raise RuntimeError("the caller's settings are local to its thread")
            with within():
                lowered = self._lower(form)
            return lowered.compile()

        with self._lock:
            self._compiled[signature] = _BACKGROUND.submit(lower_and_compile)

    def wait(self) -> None:
        """Wait until everything that was prepared is compiled; errors are raised by the call that needs the result."""
        for future in list(self._compiled.values()):
            with contextlib.suppress(CancelledError):
                future.exception()

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function; compile it first if that was not prepared."""
        try:
            return self._latest(*args)
        except TypeError:  # a compiled function raises it for arguments of another form
            return self._find(*args)

    def _find(self, *args: Any) -> Any:
        form, signature = _signature(args)
        with self._lock:
            future = self._compiled.get(signature)
            # Compile here what still waits in the queue, and what failed in the background.
            is_missing = future is None or future.cancel() or (future.done() and future.exception() is not None)
            if future is None or is_missing:
                future = self._compiled[signature] = Future()
                future.set_running_or_notify_cancel()  # another thread that waits for it cannot cancel it now
        self.num_waits += not future.done()
        try:
            if is_missing:
                lowered = self._lowered.get(signature) or self._lower(form)
                future.set_result(lowered.compile())
            elif future.exception() is not None:
                return self._find(*args)
            self._latest = future.result()
        except BaseException as error:
            self._compiled.pop(signature, None)
            if is_missing and not future.done():
                future.set_exception(error)
            raise
        self._lowered.pop(signature, None)
        return self._latest(*args)

    def _has_exported(self, form: Any) -> bool:
        return self.exported is not None and self.exported.arguments == arguments_text(form)

    def _lower(self, form: Any) -> LoweredProgram:
        with jax.enable_x64(True):
            if self._is_exported:
                self._is_exported = False
                self.exported = export_traced(self._function, form, self._options())
            if self._has_exported(form):
                with contextlib.suppress(Exception):  # then it is traced, as without an exported function
                    return self._lower_exported(form)
            return lower(jax.jit(self._function, compiler_options=self._options()).trace(*form))

    def _lower_exported(self, form: Any) -> LoweredProgram:
        exported = self.exported
        assert exported is not None
        try:
            with jax.enable_x64(True):
                imported = jax.jit(import_exported(exported), compiler_options=exported.options)
                return LoweredProgram(imported.lower(*form), exported.is_limited)
        except BaseException:
            self.exported = None
            raise


def _signature(args: Any) -> tuple[Any, Any]:
    form = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    leaves, treedef = jax.tree.flatten(form)
    return form, (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


def run_afterwards(function: Callable[[], None]) -> None:
    """Run a function in the background, after everything that was prepared until now."""
    _BACKGROUND.submit(function)


def quick_jit(function: Callable, **settings: Any) -> jax.stages.Wrapped:
    """Jit a function with options that compile it in the shortest time."""
    return jax.jit(function, compiler_options=quick_options(), **settings)


def run_once(function: Callable[[], Any]) -> Any:
    """Compile a function in the shortest time, run it once, and return NumPy arrays."""
    return jax.device_get(quick_jit(function)())
