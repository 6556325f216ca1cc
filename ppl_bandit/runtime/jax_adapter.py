"""Adapter to the parts of JAX that are not covered by its compatibility promise.

The rest of the package reaches jaxprs, tracers, exported functions and custom batching rules through this module alone, so
that a change in JAX has to be answered in one place. `tests/runtime/test_adapters.py` checks everything that is promised here.
Outside this module, an equation is used through `primitive.name`, `params`, `invars`, `outvars`, `effects`, and the `aval` of
its variables only.

It also has conditional execution that stays cheap under `vmap`, by a custom batching rule: `lax.cond` with a batched predicate
evaluates both branches for every element, `run_where_needed` an expensive branch only for the elements that need it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal as Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Bool


class Frame(NamedTuple):
    """One Python stack frame that was active when an equation was traced."""

    file_name: str
    line_number: int
    function_name: str


Tracer = jax.core.Tracer


def is_tracer(value: Any) -> bool:
    """Return whether a value is traced, and therefore has no number yet."""
    return isinstance(value, Tracer)


def set_compilation_cache(folder: str | None) -> None:
    """Set the folder of JAX's compilation cache, also if JAX has opened another one already; None turns the cache off."""
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def outside_trace() -> AbstractContextManager[None]:
    """Run operations inside the context at once, also while the caller is being traced."""
    return jax.core.eval_context()


def apply_primitive(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Apply the primitive of an equation, with the parameters of the equation, to values."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def clips_indices(eqn: Any) -> bool:
    """Return whether an indexing equation was asked to clip its indices, or to fill in a number where they are out of range.

    A `gather` that clips and collapses no axis is a `dynamic_slice` under `vmap`, which nobody asked to clip.
    """
    mode, fill = eqn.params.get("mode"), eqn.params.get("fill_value")
    is_slice = mode is not None and not eqn.params["dimension_numbers"].collapsed_slice_dims
    return (mode == jax.lax.GatherScatterMode.CLIP and not is_slice) or (fill is not None and not np.isnan(fill))


def inner_jaxprs(eqn: Any) -> Iterator[tuple[Jaxpr, Sequence[Any]]]:
    """Yield the jaxprs in the parameters of an equation, each with its constants."""
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr))
    for leaf in leaves:
        if isinstance(leaf, ClosedJaxpr):
            yield leaf.jaxpr, leaf.consts
        elif isinstance(leaf, Jaxpr):
            yield leaf, ()


def called_jaxpr(eqn: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the jaxpr that an equation applies to its own operands, with its constants; None if there is none.

    Such equations come from `jit`, `checkpoint`, `custom_jvp`, `custom_vjp` and the like. A `scan` is not one of them: its
    jaxpr receives slices of the operands.
    """
    if eqn.primitive.name == "scan":
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
        if isinstance(jaxpr, Jaxpr) and len(jaxpr.invars) == len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars):
            return jaxpr, consts
    return None


def function_file(eqn: Any) -> str:
    """Return the file of the function that an equation calls; "" if JAX did not record it."""
    called = called_jaxpr(eqn)
    return (called and called[0].debug_info.func_filename) or ""


def scan_parts(eqn: Any) -> tuple[Jaxpr, Sequence[Any], int, int]:
    """Return the body of a `scan` with its constants, the number of constant operands and the number of carried values.

    JAX 0.12 renamed the parameters that hold these numbers. They follow from the shapes: the body receives slices of the series
    and returns slices of the stacked results, and all other shapes are the same inside and outside.
    """
    (found,) = inner_jaxprs(eqn)
    body, consts = found

    def num_same(inside: Sequence[Any], outside: Sequence[Any]) -> int:
        return sum(one.aval.shape == other.aval.shape for one, other in zip(inside, outside, strict=True))

    num_carry = num_same(body.outvars, eqn.outvars)
    return body, consts, num_same(body.invars, eqn.invars) - num_carry, num_carry


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of all jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner, _ in inner_jaxprs(eqn):
            yield from all_equations(inner)


def evaluate_jaxpr(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate a jaxpr at flat arguments."""
    return list(jaxpr_as_fun(closed)(*args))


def eliminate_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Return a jaxpr without the equations that no output depends on."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def source_frames(eqn: Any) -> list[Frame]:
    """Return the Python stack at which an equation was traced, innermost frame first; empty if JAX did not record it."""
    frames = getattr(eqn.source_info.traceback, "frames", None) or ()
    return [Frame(frame.file_name, frame.line_num, frame.function_name) for frame in frames]


def export_function(function: Any, args: Sequence[Any]) -> bytes | None:
    """Serialize a jitted function for arguments of given shapes; None if JAX cannot export one of its operations."""
    try:
        return bytes(export.export(function)(*args).serialize())
    except (NotImplementedError, ValueError):
        return None


def import_function(serialized: bytes) -> Callable:
    """Return the function that `export_function` serialized, with its original name."""
    exported = export.deserialize(bytearray(serialized))

    def function(*args: Any) -> Any:
        return exported.call(*args)

    function.__name__ = exported.fun_name
    return function


def vmap_rule(rule: Callable[..., tuple[Any, Any]]) -> Callable[[Callable], Callable]:
    """Return a decorator that replaces how `vmap` batches a function.

    Args:
        rule: (axis size, tree of flags that mark batched arguments, *arguments) -> (results, tree of flags that mark batched
            results); the batch axis comes first.
    """

    def decorate(function: Callable) -> Callable:
        wrapped = jax.custom_batching.custom_vmap(function)
        wrapped.def_vmap(rule)
        return wrapped

    return decorate


def sequential_vmap(function: Callable) -> Callable:
    """Return a function that `vmap` runs as a loop over the batch."""
    return jax.custom_batching.sequential_vmap(function)


_MIN_ROUNDS = 32  # of a batch in which all elements need the computation


class ConditionalTask(NamedTuple):
    """The arguments of a conditional computation.

    Attributes:
        data: what the computation reads.
        otherwise: the result where the computation is not needed.
        is_needed: whether to run it.
    """

    data: Any
    otherwise: Any
    is_needed: Bool[Array, ""]


def apply_where(predicate: Bool[Array, ""], function: Callable[[Any], Any], value: Any) -> Any:
    """Return function(value) where the predicate holds, and the value itself elsewhere.

    A `while_loop` of at most one iteration: under `vmap` it runs only if the predicate holds for some element.
    """
    return jax.lax.while_loop(
        lambda carry: carry[0], lambda carry: (jnp.array(False), function(carry[1])), (predicate, value)
    )[1]


def compute_where_needed(compute: Callable[[Any], Any], data: Any, otherwise: Any, is_needed: Bool[Array, ""]) -> Any:
    """Return compute(data) where it is needed, else a given result; under `vmap` compute it for those elements alone.

    Args:
        compute: a function that closes over no traced value.
    """

    def run(task: ConditionalTask) -> Any:
        return jax.lax.cond(task.is_needed, compute, lambda _: task.otherwise, task.data)

    return run_where_needed(run, ConditionalTask(data, otherwise, is_needed))


def run_where_needed(run: Callable[[ConditionalTask], Any], task: ConditionalTask) -> Any:
    """Run a function of a task that handles both cases; under `vmap`, run it in small batches of the tasks that need it.

    Args:
        run: returns the task's `otherwise` where `is_needed` is false; it closes over no traced value.
    """
    return vmap_rule(functools.partial(_run_in_rounds, run))(run)(task)


def _run_in_rounds(
    run: Callable[[ConditionalTask], Any], num_tasks: int, is_batched: Any, task: ConditionalTask
) -> tuple[Any, Any]:
    """Run the tasks that need it, a 32nd of all tasks at a time."""
    task = jax.tree.map(
        lambda leaf, own: leaf if own else jnp.broadcast_to(leaf, (num_tasks, *jnp.shape(leaf))), task, is_batched[0]
    )
    batch_size = max(1, num_tasks // _MIN_ROUNDS)
    order = jnp.argsort(~task.is_needed, stable=True)
    num_needed = jnp.sum(task.is_needed)

    def body(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        first, results = carry
        place = first + jnp.arange(batch_size)
        is_task = place < num_tasks
        chosen = order[jnp.minimum(place, num_tasks - 1)]
        some = jax.tree.map(lambda leaf: leaf[chosen], task)
        found = jax.vmap(run)(some._replace(is_needed=some.is_needed & is_task))
        # Places beyond the last task repeat it; their results are dropped.
        target = jnp.where(is_task, chosen, num_tasks)
        return first + batch_size, jax.tree.map(lambda old, new: old.at[target].set(new, mode="drop"), results, found)

    _, results = jax.lax.while_loop(lambda carry: carry[0] < num_needed, body, (jnp.zeros((), int), task.otherwise))
    return results, jax.tree.map(lambda _: True, results)
