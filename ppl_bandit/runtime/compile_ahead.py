"""Compile functions before they are called, in a background thread."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from ppl_bandit.runtime.artefact import compiler_settings
from ppl_bandit.runtime.cpu_threads import limit_runs, needs_limit
from ppl_bandit.runtime.packed_state import ExportedFunction, arguments_text, export_traced, import_exported
from ppl_bandit.runtime.xla_options import in_order_options, quick_options, small_options

# XLA compiles without Python's global interpreter lock, so the main thread goes on meanwhile.
_BACKGROUND = ThreadPoolExecutor(1, thread_name_prefix="ppl_bandit-compile")


def lower(traced: jax.stages.Traced, is_limited: bool = False) -> Callable[[], Callable]:
    """Lower a traced function; return a function that compiles it.

    Args:
        is_limited: whether the number of its runs at once is limited, also if its jaxpr does not show that it must be.
    """
    lowered = traced.lower()
    if is_limited or needs_limit(traced.jaxpr):
        return lambda: limit_runs(lowered.compile(compiler_options=in_order_options()))
    return lowered.compile


class _Compilation:
    """A function for one form of its arguments: lowered, then compiled, by the first thread that has the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lowered: Callable[[], Callable] | None = None
        self.compiled: Callable | None = None


class CompiledAhead:
    """A function in float64 that is compiled once per form of its arguments, before it is called where possible.

    Call it within `jax.enable_x64(True)`, with arrays and NumPy numbers: a Python number has no fixed dtype.

    Args:
        function: pure function of pytrees of arrays.
        options: returns the compiler options.
        is_exported: whether it is exported for other processes, in the form that is traced first.
        background: returns a context in which the background thread traces. What fails there is traced by the first call.

    Attributes:
        exported: what was exported here or by another process; None if nothing was, or JAX cannot read it.
    """

    def __init__(
        self,
        function: Callable,
        options: Callable[[], dict[str, Any]] = small_options,
        *,
        is_exported: bool = False,
        background: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self._function, self._options, self._is_exported, self._background = function, options, is_exported, background
        self._compilations: dict[Any, _Compilation] = {}
        self._last: Future[None] | None = None
        self._latest: Callable = self._find
        self.exported: ExportedFunction | None = None

    def prepare(self, *args: Any, is_traced_later: bool = False) -> None:
        """Trace for the form of these arguments, and start to compile in the background.

        NumPyro's handlers are one stack for all threads, so a function that runs a program is traced in the caller's thread.

        Args:
            is_traced_later: whether it is traced in the background too, unless the caller's settings of JAX are local to its
                thread.
        """
        form, signature = _signature(args)
        if signature in self._compilations:
            return
        own, settings = self._compilations.setdefault(signature, _Compilation()), compiler_settings()
        if not (is_traced_later or self._has_exported(form)):
            own.lowered = self._lower(form)

        def compile_unless_a_call_does() -> None:
            if own.lock.acquire(blocking=False):
                try:
                    with contextlib.suppress(Exception), self._background():
                        if own.lowered is not None or settings == compiler_settings():
                            self._compile(own, form)
                finally:
                    own.lock.release()

        self._last = _BACKGROUND.submit(compile_unless_a_call_does)

    def wait(self) -> None:
        """Wait until everything that was prepared is compiled; errors are raised by the call that needs the result."""
        if self._last is not None:
            self._last.result()
        self.wait_for_calls()

    def wait_for_calls(self) -> None:
        """Wait for compilations that calls have begun; unlike `wait`, the background thread may do this itself."""
        for own in list(self._compilations.values()):
            with own.lock:
                pass

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function; compile it first if that was not prepared."""
        try:
            return self._latest(*args)
        except TypeError:  # a compiled function raises it for arguments of another form
            return self._find(*args)

    def _find(self, *args: Any) -> Any:
        form, signature = _signature(args)
        own = self._compilations.setdefault(signature, _Compilation())
        with own.lock:
            found = self._latest = self._compile(own, form)
        return found(*args)

    def _compile(self, own: _Compilation, form: Any) -> Callable:
        if own.compiled is None:
            own.compiled, own.lowered = (own.lowered or self._lower(form))(), None
        return own.compiled

    def _lower(self, form: Any) -> Callable[[], Callable]:
        with jax.enable_x64(True):
            if self._is_exported:
                self._is_exported = False
                self.exported = export_traced(self._function, form, self._options())
            if self._has_exported(form):
                assert self.exported is not None
                try:
                    imported = jax.jit(import_exported(self.exported), compiler_options=self.exported.options)
                    return lower(imported.trace(*form), self.exported.is_limited)
                except Exception:
                    self.exported = None  # it is traced, as without an exported function
            return lower(jax.jit(self._function, compiler_options=self._options()).trace(*form))

    def _has_exported(self, form: Any) -> bool:
        return self.exported is not None and self.exported.arguments == arguments_text(form)


def _signature(args: Any) -> tuple[Any, Any]:
    """Return the form of arguments as shapes and dtypes, and as something that can be compared."""
    form = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    return form, (jax.tree.structure(form), *jax.tree.leaves(form))


def run_afterwards(function: Callable[[], None]) -> None:
    """Run a function in the background, after everything that was prepared until now."""
    _BACKGROUND.submit(function)


def quick_jit(function: Callable, **settings: Any) -> jax.stages.Wrapped:
    """Jit a function with options that compile it in the shortest time."""
    return jax.jit(function, compiler_options=quick_options(), **settings)


def traced_once(function: Callable) -> jax.stages.Wrapped:
    """Return a pure function that is traced once per form of its arguments, whichever thread uses it, and inlined there.

    Later uses of a form run neither the NumPyro program that it reads nor NumPyro, so they can be traced in any thread.
    """
    return jax.jit(function, inline=True)


def run_once(function: Callable[[], Any]) -> Any:
    """Compile a function in the shortest time, run it once, and return NumPy arrays."""
    return jax.device_get(quick_jit(function)())
