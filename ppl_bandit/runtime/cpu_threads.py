"""Programs that factorize matrices need care on a CPU: batches take turns, side by side they can wait for each other forever.

jaxlib hands the parts of such a batch to the threads of XLA's pool, of which there is one per core, and waits for them; it may
do so in one of those very threads. Where several programs run at once, every thread can come to wait and none be left to work.
So all cores but one, at most, run such programs at the same time; all others run freely. Two batches of one program can do the
same to each other, so that its operations run one after another. Single matrices, unless they are small, are factorized on one
thread (`blas`).
"""

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ppl_bandit.runtime.blas_threads import on_one_thread
from ppl_bandit.runtime.cpu_count import num_cores
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, all_equations

__all__ = ["Needs", "compiled", "in_turn", "needs_of"]

# What jaxlib takes, at most, for the operations of one matrix of m x n numbers, in units of m n max(m, n).
_COSTS = {"cholesky": 1, "triangular_solve": 1, "lu": 1, "geqrf": 2, "qr": 4, "householder_product": 4, "ormqr": 4}
_COSTS |= dict.fromkeys(("eig", "eigh", "geqp3", "hessenberg", "schur", "svd", "tridiagonal", "tridiagonal_solve"), 30)
_LEAST = 200_000  # operations in a batch from which on it hands them out
_LARGE = 20_000  # operations for one matrix from which on the library behind it may take several threads

_TURNS = threading.BoundedSemaphore(max(1, num_cores() - 1))


class Needs(NamedTuple):
    """What a program needs when it runs: to take turns with others, and linear algebra on one thread."""

    turns: bool
    one_thread: bool


def needs_of(closed: ClosedJaxpr) -> Needs:
    """Tell whether a program factorizes a batch of matrices, or a matrix, that is worth more than one thread."""
    if jax.default_backend() != "cpu":
        return Needs(False, False)
    factorizing = [eqn for eqn in all_equations(closed.jaxpr) if eqn.primitive.name in _COSTS]
    return Needs(any(map(_is_shared_out, factorizing)), any(map(_is_large, factorizing)))


def _is_shared_out(eqn: Any) -> bool:
    matrices = [shape for shape in _shapes(eqn) if len(shape) > 2]
    return any(_COSTS[eqn.primitive.name] * math.prod(shape) * max(shape[-2:]) >= _LEAST for shape in matrices)


def _is_large(eqn: Any) -> bool:
    costs = (math.prod(shape[-2:]) * max(shape[-2:]) for shape in _shapes(eqn) if len(shape) > 1)
    return any(_COSTS[eqn.primitive.name] * cost >= _LARGE for cost in costs)


def _shapes(eqn: Any) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]


def compiled(lowered: jax.stages.Lowered, needs: Needs, in_order: dict[str, Any] | None = None) -> Callable:
    """Compile a program, as one that gets what it needs.

    Args:
        in_order: options under which operations run one after another, for a program that was not lowered with them.
    """
    run = lowered.compile(compiler_options=in_order if needs.turns else None)
    if needs.turns:
        return in_turn(run)
    return on_one_thread(run) if needs.one_thread else run


def in_turn(function: Callable) -> Callable:
    """Return a compiled function that waits for its turn, and is done when it returns; its linear algebra is on one thread."""
    alone = on_one_thread(function)

    def call(*args: Any) -> Any:
        with _TURNS:
            return jax.block_until_ready(alone(*args))

    return call
