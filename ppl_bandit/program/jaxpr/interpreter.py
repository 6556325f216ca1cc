"""The interpreter of jaxprs: it walks a jaxpr over the values of an abstract domain; and the simplest domain, dependence.

Also here: the line of the user's code that an equation of a jaxpr comes from.

JAX records the Python stack at which each equation was traced. Frames inside JAX, NumPyro, Python's library and this package
are skipped; the innermost other frame is the user's line.
"""

import functools
import linecache
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from ppl_bandit.program.jaxpr.primitives import Kind, describe_primitive
from ppl_bandit.runtime.jax_adapter import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    apply_primitive,
    called_jaxpr,
    function_file,
    source_frames,
)

DATA = object()  # an array whose numbers are unknown


class Domain(NamedTuple):
    """An abstract domain: what is known about arrays before they are computed, and how primitives change it.

    Attributes:
        apply: (equation, values of its operands, equations that call this jaxpr, innermost first) -> values of its results;
            called if an operand is not a constant, or if the equation has side effects.
        is_constant: whether a value is an array whose numbers are known.
        fold: (equation, constants) -> constants; computes the results of an equation whose operands are all constants.
        lift: turns a literal or a constant of a jaxpr into a value of the domain.
        call: (equation that calls a jaxpr, values) -> values of its results; None to follow it into the jaxpr.
    """

    apply: Callable[[Any, list[Any], tuple[Any, ...]], Sequence[Any]]
    is_constant: Callable[[Any], bool]
    fold: Callable[[Any, list[Any]], Sequence[Any]] = apply_primitive
    lift: Callable[[Any], Any] = lambda constant: constant
    call: Callable[[Any, list[Any]], Sequence[Any] | None] = lambda eqn, values: None


def interpret(
    domain: Domain, jaxpr: Jaxpr, consts: Iterable[Any], args: Sequence[Any], callers: tuple[Any, ...] = ()
) -> list[Any]:
    """Return the values of the outputs of a jaxpr in a domain, given those of its inputs.

    Equations that call a jaxpr (`jit` and the like) are followed into it.
    """
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, map(domain.lift, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return domain.lift(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        inner = called_jaxpr(eqn) if describe_primitive(eqn).kind is Kind.CALL else None
        known = domain.call(eqn, values) if inner is not None else None
        if inner is not None:
            results: Sequence[Any] = interpret(domain, *inner, values, (eqn, *callers)) if known is None else known
        elif all(map(domain.is_constant, values)) and not eqn.effects:
            results = domain.fold(eqn, values)
        else:
            results = domain.apply(eqn, values, callers)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


_DEPENDENCE = Domain(
    apply=lambda eqn, labels, callers: [frozenset().union(*labels)] * len(eqn.outvars),
    is_constant=lambda labels: not labels,
    fold=lambda eqn, labels: [frozenset()] * len(eqn.outvars),
    lift=lambda constant: frozenset(),
)


def dependencies(closed: ClosedJaxpr, labels: Sequence[frozenset]) -> list[frozenset]:
    """Return, for each output of a jaxpr, the union of the labels of the inputs that it may depend on.

    Args:
        labels: a set of labels for each input.
    """
    return interpret(_DEPENDENCE, closed.jaxpr, closed.consts, labels)


def is_known(value: Any) -> bool:
    """Return whether a value is an array of known numbers."""
    return value is not DATA


def fold_in_numpy(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Fold constants that can decide which entries are read.

    NumPy is used where it has an equivalent, because JAX compiles every primitive that runs outside of `jit`. Other results
    are computed by JAX only if they can be indices or conditions; real numbers, of which at most the zeros matter, become
    unknown data.
    """
    described, dtypes = describe_primitive(eqn), [var.aval.dtype for var in eqn.outvars]
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):  # random keys
        return [DATA] * len(eqn.outvars)
    if described.numpy is not None:
        with np.errstate(all="ignore"):
            return [np.asarray(described.numpy(eqn.params, *map(np.asarray, values))).astype(dtypes[0])]
    if described.move is not None:
        return [moved[..., 0] for moved in described.move(eqn, [np.asarray(value)[..., None] for value in values])]
    if described.kind is Kind.CHOICE and len(values) == 3:
        return [np.where(values[0], values[2], values[1])]
    if described.kind is Kind.MOVE or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return apply_primitive(eqn, values)
    return [DATA] * len(eqn.outvars)


_MAX_SOURCE = 100  # characters of a source line to quote
_PUBLIC = (jnp, jax.nn, jax.lax, jax.scipy.special, jax.scipy.stats.norm)


class SourceLine(NamedTuple):
    """A line of the user's code.

    Attributes:
        text: line number, file and source; "" if the operation comes from no line of the user's.
        called: the public JAX function that was called there; "" if there is none.
        is_users: whether the user wrote the operation; false if NumPyro added it on behalf of the user's line.
    """

    text: str
    called: str
    is_users: bool


def source_line(equations: Sequence[Any]) -> SourceLine:
    """Return the line of the user's code that an operation comes from.

    Args:
        equations: the equation itself, then the one that calls the jaxpr it is in, and so on outwards. JAX caches the trace of
            a jitted function, so only an outer equation may have recorded this call's line.
    """
    called = ""
    for equation in equations:
        passed_numpyro = False
        for frame in source_frames(equation):
            owner = _owner(frame.file_name)
            if owner == "own":
                break
            if owner == "":
                source = linecache.getline(frame.file_name, frame.line_number).strip()
                shown = f": `{source[:_MAX_SOURCE]}{'...' if len(source) > _MAX_SOURCE else ''}`" if source else ""
                line = f"line {frame.line_number} of {Path(frame.file_name).name}{shown}"
                return SourceLine(line, "" if passed_numpyro else called, not passed_numpyro)
            passed_numpyro |= owner == "numpyro"
            called = _public_name(frame.function_name) or called
        called = _public_name(str(equation.params.get("name", ""))) or called
    return SourceLine("", "", False)


def location_of(line: SourceLine, reason: str) -> str:
    """Return where an operation stands, as the end of a sentence."""
    if not line.text:
        return ", inside the formula of the distribution"
    if not line.is_users:
        return f", inside NumPyro's code ({line.text})"
    called = f", in `{line.called}`" if line.called and f"`{line.called}`" not in reason else ""
    return f"{called} ({line.text})"


def _public_name(function: str) -> str:
    name = function.rsplit(".", 1)[-1].strip("_")
    return name if name and any(callable(getattr(module, name, None)) for module in _PUBLIC) else ""


def is_jax_function(eqn: Any, name: str) -> bool:
    """Return whether an equation calls a function of JAX itself that has this name."""
    return eqn.params.get("name") == name and _owner(function_file(eqn)) == "other"


def is_users_file(file: str) -> bool:
    """Return whether a source file belongs neither to this package, nor to NumPyro, JAX or Python."""
    return _owner(file) == ""


@functools.cache
def _owner(file: str) -> str:
    """Return "own", "numpyro" or "other" for files of this package, of NumPyro, and of JAX or Python; "" for the user's."""
    path = Path(file)
    if path.is_relative_to(Path(__file__).parents[2]):
        return "own"
    if path.is_relative_to(Path(numpyro.__file__).parent):
        return "numpyro"
    # Installed packages other than JAX and NumPyro count as the user's code.
    is_python = path.is_relative_to(sysconfig.get_path("stdlib")) and "site-packages" not in path.parts
    is_jax = path.is_relative_to(Path(jax.__file__).parent)
    return "other" if is_python or is_jax or file.startswith("<frozen") else ""
