"""The numbers that a program reads from outside of itself, and whether they have changed since it was first read.

A function that JAX compiles keeps the numbers that it saw while it was traced. If a module-level array changes later, functions
that are compiled before and after the change see different numbers, and posterior and expected rewards disagree.
"""

import contextlib
import dis
import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import is_users_file
from ppl_bandit.runtime.jax_adapter import is_tracer

_MAX_DEPTH = 6  # of helpers that call helpers, and of containers
_NO_NAMES = frozenset[str]()
_STORES = {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"}


def numbers_closed_over(program: Callable) -> dict[str, int]:
    """Return a digest of every number and array that a program reads from its module or an enclosing function, by name.

    Those of the user's own helpers count, also inside containers and in attributes of the user's own objects. Names that the
    program itself assigns do not: it may count how often it runs.
    """
    found: dict[str, int] = {}
    for name, value in _read_by(program, set(), 0):
        digest = _digest(value)
        if digest is not None:
            found[name] = digest
    return found


def changed_name(program: Callable, before: Mapping[str, int]) -> str | None:
    """Return the name of something that a program closes over and that has changed; None if nothing has."""
    now = numbers_closed_over(program)
    return next((name for name in before if now.get(name) != before[name]), None)


def _read_by(function: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH or id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from _parts("an argument", [*function.args, *function.keywords.values()], _NO_NAMES, seen, depth)
        yield from _read_by(function.func, seen, depth)
        return
    wrapped = getattr(function, "__wrapped__", None)  # of `jax.jit`
    if wrapped is not None:
        yield from _read_by(wrapped, seen, depth)
    owner = getattr(function, "__self__", None)  # of a method
    if not hasattr(function, "__code__") and _is_own_object(function):
        owner, function = function, type(function).__call__
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return
    if not is_users_file(code.co_filename):
        return
    names, stored = names_in(code)
    read = names - stored
    if _is_own_object(owner):
        yield from _parts(type(owner).__name__, owner, read, seen, depth)
    for name, value in closure_values(function).items():
        if name not in stored:
            yield from _parts(name, value, read, seen, depth)
    for name in sorted(read):
        if name in function.__globals__:
            value = function.__globals__[name]
            if isinstance(value, ModuleType):
                file = getattr(value, "__file__", None)
                if file is not None and is_users_file(file):
                    own = {key: vars(value)[key] for key in names if key in vars(value)}
                    for key, part in own.items():
                        yield from _parts(f"{name}.{key}", part, read, seen, depth + 1)
            else:
                yield from _parts(name, value, read, seen, depth)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from _parts("a default", defaults, read, seen, depth)


def _parts(
    name: str, value: Any, names: frozenset[str], seen: set[int], depth: int, *, is_inside: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and arrays in a value, and those that it reads if it is a function.

    Args:
        names: attributes that count.
        is_inside: whether it is inside a container, where integers do not count: a program may count its runs there.
    """
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, bool | int | float | complex | np.generic | np.ndarray | jax.Array):
        if not (is_inside and isinstance(value, int)):
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in list(value.items())[:1000]:
            yield from _parts(f"{name}[{key!r}]", part, names, seen, depth + 1, is_inside=True)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value[:1000]):
            yield from _parts(f"{name}[{number}]", part, names, seen, depth + 1, is_inside=True)
    else:
        if _is_own_object(value):
            for key in sorted(names & vars(value).keys()):
                yield from _parts(f"{name}.{key}", vars(value)[key], names, seen, depth + 1, is_inside=True)
        if callable(value) and not isinstance(value, type):
            yield from _read_by(value, seen, depth + 1)


def _is_own_object(value: Any) -> bool:
    """Return whether a value is an object with attributes whose class is the user's, or a namespace."""
    if isinstance(value, SimpleNamespace):
        return True
    if isinstance(value, type | ModuleType | FunctionType) or not hasattr(value, "__dict__"):
        return False
    name = type(value).__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (file is not None and is_users_file(file))


def closure_values(function: Any) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function reads; those not assigned yet are left out."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


@functools.cache
def names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals and attributes that code reads, and the names outside of it that it assigns."""
    names, stored = set(code.co_names), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _STORES and instruction.argval not in code.co_cellvars:
            stored.add(instruction.argval)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            more, also = names_in(const)
            names |= more
            stored |= also - set(code.co_varnames) - set(code.co_cellvars)
    return frozenset(names), frozenset(stored)


def _digest(value: Any) -> int | None:
    if is_tracer(value) or getattr(value, "is_deleted", bool)():
        return None
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return None
    array = np.ascontiguousarray(np.asarray(value))
    if array.dtype.kind not in "biufcV":
        return None
    return zlib.crc32(array.tobytes(), zlib.crc32(repr((array.shape, array.dtype)).encode()))
