"""Fingerprints of programs: digests that are equal for the same computation with the same constants, in any process."""

import contextlib
import functools
import hashlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.closed_over import closure_values, names_in
from ppl_bandit.program.keywords import takes
from ppl_bandit.program.model.sites import abstract_trace, is_latent
from ppl_bandit.program.model.tracing import log_prob, run_program
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, Jaxpr, Literal, all_equations
from ppl_bandit.runtime.numpyro_adapter import components, patched_methods

_LIBRARIES = ("jax", "jaxlib", "numpy", "numpyro", "scipy", "ppl_bandit", "builtins")  # known by their names

# Parameters of primitives that do not change what is computed.
_IGNORED = {"name", "debug_info", "ctx_mesh", "in_shardings", "out_shardings", "in_layouts", "out_layouts"}
_OPAQUE = ("custom_vjp", "custom_lin")  # primitives whose derivatives are Python functions


def jaxpr_fingerprint(*functions: ClosedJaxpr) -> str:
    """Return a digest of jaxprs and of every constant in them, also of those that a jitted helper closes over."""
    digest = hashlib.sha256()
    for closed in functions:
        _digest_jaxpr(digest, closed.jaxpr, closed.consts)
    return digest.hexdigest()


def program_fingerprint(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> str | None:
    """Return a digest of everything that this package computes from a program; None if the program cannot be identified.

    The digest covers log densities, supports, deterministic sites and means, with first and second derivatives by `jvp`
    (which follows the rules of `custom_jvp`), for one row and for one row per arm; the example context; and the bytecode of
    the program, and the step of latents that move. There is no digest of a program with callbacks, with `custom_vjp` (its
    rules are Python functions that `jvp` does not trace), with a distribution class that is not NumPyro's, or with a method
    replaced on a distribution.
    """
    trace = abstract_trace(program, context, 2)
    shapes = {name: jnp.shape(site["value"]) for name, site in trace.items() if is_latent(name, site, outcomes)}
    kinds = {name: trace[name]["value"].dtype.kind for name in outcomes}
    sites: list[Any] = []

    def compute(latents: Any, arm: Any, rows: Any, values: Any, *step: Any) -> tuple[Any, Any]:
        found = run_program(program, arm, rows, {**latents, **values}, None, None, *step)
        sampled = {name: site for name, site in found.items() if site["type"] == "sample"}
        sites[:] = [(name, site["fn"]) for name, site in sampled.items()]
        deterministic = [site["value"] for site in found.values() if site["type"] == "deterministic"]
        supports = [site["fn"].support(site["value"]) for site in sampled.values()]
        means = [_mean(found[name]["fn"]) for name in outcomes]
        return [log_prob(site) for site in sampled.values()], (deterministic, supports, means)

    def differentiate(latents: Any, *rows: Any) -> Any:
        ones = jax.tree.map(jnp.ones_like, latents)

        def slope(at: Any) -> tuple[Any, Any]:
            terms, slopes, others = jax.jvp(lambda other: compute(other, *rows), (at,), (ones,), has_aux=True)
            return slopes, (terms, others)

        return jax.jvp(slope, (latents,), (ones,), has_aux=True)

    def arguments(num_rows: int) -> tuple[Any, ...]:
        # NumPy arrays: JAX would compile every operation outside of a trace.
        rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_rows, *np.shape(leaf))), context)
        values = {name: np.zeros(num_rows, int if kind in "iub" else float) for name, kind in kinds.items()}
        return {name: np.zeros(shape) for name, shape in shapes.items()}, np.arange(num_rows), rows, values

    with jax.enable_x64(True):
        try:
            computed = [
                jax.make_jaxpr(compute)(*arguments(max(num_arms, 2))),
                jax.make_jaxpr(differentiate)(*arguments(1)),
            ]
            if takes(program, "previous"):
                rows = arguments(2)
                elapsed = np.ones(()) if takes(program, "elapsed") else None
                computed.append(jax.make_jaxpr(compute)(*rows, rows[0], elapsed))
        except (NotImplementedError, ValueError):  # there is no derivative: custom_vjp, or a callback
            return None
    parts = [part for _, fn in sites for part in components(fn)]
    if any(
        not type(part).__module__.startswith(("numpyro.", "ppl_bandit.")) or patched_methods(part) for part in parts
    ):
        return None
    names = {eqn.primitive.name for closed in computed for eqn in all_equations(closed.jaxpr)}
    if any("callback" in name or name.startswith(_OPAQUE) for name in names):
        return None
    digest = hashlib.sha256(jaxpr_fingerprint(*computed).encode())
    described = [name for name, _ in sites], [type(part).__qualname__ for part in parts], list(trace)
    digest.update(repr([*described, num_arms, outcomes, kinds, str(jax.tree.structure(context))]).encode())
    for leaf in jax.tree.leaves(context):
        _digest_value(digest, leaf)
    digest.update(code_fingerprint(program).encode())
    return digest.hexdigest()


def _mean(fn: Any) -> Any:
    with contextlib.suppress(Exception):  # distributions without a mean raise different exceptions
        return jnp.asarray(fn.mean)
    return jnp.zeros(())


def code_fingerprint(program: Callable) -> str:
    """Return a digest of the bytecode of a program, without the functions that it calls and the variables that it reads."""
    digest = hashlib.sha256()
    _digest_code(digest, _code_of(program))
    return digest.hexdigest()


def function_fingerprint(function: Any) -> str:
    """Return a digest of a function: its bytecode, its defaults, and the values and functions that it closes over and reads.

    It is equal in every process. Objects that have no value of their own, such as modules, count by their name.
    """
    digest = hashlib.sha256()
    _digest_object(digest, function, [])
    return digest.hexdigest()


def _digest_object(digest: Any, value: Any, seen: list[Any]) -> None:
    digest.update(f"{type(value).__qualname__}:".encode())
    if any(value is one for one in seen):  # a function that calls itself
        return
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        digest.update(repr(value).encode())
        return
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if isinstance(value, jax.Array) and is_key else value)
        digest.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return
    seen = [*seen, value]
    if isinstance(value, functools.partial):
        parts: Any = [value.func, value.args, value.keywords]
    elif isinstance(value, Mapping):
        parts = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    elif isinstance(value, set | frozenset):
        parts = sorted(value, key=repr)
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__wrapped__") and not hasattr(value, "__code__"):
        parts = [value.__wrapped__]
    elif hasattr(value, "__func__"):
        parts = [value.__func__, value.__self__]
    elif hasattr(value, "__code__"):
        digest.update(value.__qualname__.encode())
        module = str(getattr(value, "__module__", ""))
        cells = list(closure_values(value).values())
        if module.partition(".")[0] in _LIBRARIES:
            parts = cells if module.startswith("ppl_bandit.") else []
        else:
            _digest_code(digest, value.__code__)
            reads = [value.__globals__.get(name) for name in sorted(names_in(value.__code__)[0])]
            parts = [value.__defaults__, value.__kwdefaults__, cells, reads]
    elif isinstance(value, type | types.ModuleType):
        digest.update(getattr(value, "__qualname__", value.__name__).encode())
        return
    else:
        parts = [_code_of(value) and type(value).__call__, getattr(value, "__dict__", {})]
    for part in parts:
        _digest_object(digest, part, seen)
    digest.update(f"{len(parts)};".encode())


def _code_of(program: Callable) -> Any:
    while isinstance(program, functools.partial):
        program = program.func
    method = vars(type(program)).get("__call__")
    return getattr(program, "__code__", None) or getattr(method, "__code__", None)


def _digest_code(digest: Any, code: Any) -> None:
    if code is None:
        return
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for const in code.co_consts:
        if hasattr(const, "co_code"):
            _digest_code(digest, const)
        else:  # the order of a set differs between processes
            digest.update(repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const).encode())


def _digest_jaxpr(digest: Any, jaxpr: Jaxpr, consts: Any) -> None:
    """Add a jaxpr to a digest: its primitives, their parameters and operands, and its constants."""
    names: dict[Any, int] = {}

    def name(atom: Any) -> None:
        if isinstance(atom, Literal):
            _digest_value(digest, atom.val)
        elif atom in names:
            digest.update(f"v{names[atom]};".encode())
        else:
            names[atom] = len(names)
            digest.update(f"v{names[atom]}:{atom.aval};".encode())

    for variable in [*jaxpr.constvars, *jaxpr.invars]:
        name(variable)
    for const in consts:
        _digest_value(digest, const)
    for eqn in jaxpr.eqns:
        digest.update(f"{eqn.primitive.name}(".encode())
        for atom in eqn.invars:
            name(atom)
        for key in sorted(set(eqn.params) - _IGNORED):
            digest.update(f"{key}=".encode())
            _digest_parameter(digest, eqn.params[key])
        for atom in eqn.outvars:
            name(atom)
    for atom in jaxpr.outvars:
        name(atom)


def _digest_parameter(digest: Any, value: Any) -> None:
    if isinstance(value, ClosedJaxpr):
        _digest_jaxpr(digest, value.jaxpr, value.consts)
    elif isinstance(value, Jaxpr):
        _digest_jaxpr(digest, value, [])
    elif isinstance(value, tuple | list):
        for item in value:
            _digest_parameter(digest, item)
    elif isinstance(value, np.ndarray | jax.Array):
        _digest_value(digest, value)
    elif callable(value) and not isinstance(value, type):
        digest.update(getattr(value, "__name__", type(value).__name__).encode())
    else:
        digest.update(re.sub(r"0x[0-9a-f]+", "0x", str(value)).encode())


def _digest_value(digest: Any, value: Any) -> None:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array: Any = np.asarray(value)
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(array.tobytes())
