"""Conditional computation that stays cheap under `vmap`.

Under `vmap`, `lax.cond` with a batched predicate evaluates both branches for every element. The functions of this module
evaluate an expensive branch only for the elements that need it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ppl_bandit.runtime.jax_adapter import vmap_rule

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
