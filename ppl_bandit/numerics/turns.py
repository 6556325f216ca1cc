"""Programs that factorize batches of matrices take turns on a CPU: side by side they can wait for each other forever.

jaxlib hands the parts of such a batch to the threads of XLA's pool, of which there is one per core, and waits for them; it may
do so in one of those very threads. Where several programs run at once, every thread can come to wait and none be left to work.
So all cores but one, at most, run such programs at the same time; all others run freely.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ppl_bandit.numerics.cores import num_cores
from ppl_bandit.numerics.equations import all_equations

__all__ = ["compiled", "in_turn", "needs_turns"]

# What jaxlib takes, at most, for the operations of one matrix of m x n numbers, in units of m n max(m, n).
_COSTS = {"cholesky": 1, "triangular_solve": 1, "lu": 1, "geqrf": 2, "qr": 4, "householder_product": 4, "ormqr": 4}
_COSTS |= dict.fromkeys(("eig", "eigh", "geqp3", "hessenberg", "schur", "svd", "tridiagonal", "tridiagonal_solve"), 30)
_LEAST = 200_000  # operations in a batch from which on it hands them out

_TURNS = threading.BoundedSemaphore(max(1, num_cores() - 1))


def needs_turns(closed: ClosedJaxpr) -> bool:
    """Tell whether a program factorizes a batch of matrices that is worth more than one thread."""
    if jax.default_backend() != "cpu":
        return False
    return any(eqn.primitive.name in _COSTS and _is_shared_out(eqn) for eqn in all_equations(closed.jaxpr))


def _is_shared_out(eqn: Any) -> bool:
    matrices = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars) if len(atom.aval.shape) > 2]
    return any(_COSTS[eqn.primitive.name] * math.prod(shape) * max(shape[-2:]) >= _LEAST for shape in matrices)


def compiled(lowered: jax.stages.Lowered, takes_turns: bool) -> Callable:
    """Compile a program, as one that waits for its turn where it must."""
    return in_turn(lowered.compile()) if takes_turns else lowered.compile()


def in_turn(function: Callable) -> Callable:
    """Return a compiled function that waits for its turn, and is done when it returns."""

    def call(*args: Any) -> Any:
        with _TURNS:
            return jax.block_until_ready(function(*args))

    return call
