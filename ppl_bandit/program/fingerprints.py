"""What a program computes, as a digest: equal for the same computation with the same numbers, in any process."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from numpyro.distributions import Distribution

from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.program.tracing import Trace, log_prob
from ppl_bandit.types import Interaction

__all__ = ["close_fingerprint", "code_fingerprint", "fingerprint"]

# Parameters that say how an operation is called or placed, not what it computes.
_NAMES = {"name", "debug_info", "ctx_mesh", "in_shardings", "out_shardings", "in_layouts", "out_layouts"}


def fingerprint(model: RewardModel) -> str:
    """Return a digest of the program's computation, with every number in it.

    It is equal for the same program on the same versions of jax and numpyro, and differs if any constant does, also one
    that a jitted helper closes over.
    """

    def joint(latents: Any, rows: Interaction) -> Any:
        return (
            model.log_prior(latents),
            model.log_likelihood(latents, rows),
            model.expected_rewards(jax.tree.map(lambda leaf: leaf[None], latents), model.context),
        )

    with jax.enable_x64(True):
        closed = jax.make_jaxpr(joint)(*_arguments(model, 2))
        digest = hashlib.sha256()
        _digest_jaxpr(digest, closed.jaxpr, closed.consts)
    return digest.hexdigest()


def _arguments(model: RewardModel, num_rows: int) -> tuple[dict[str, np.ndarray], Interaction]:
    """Return latents and rows, in NumPy: every operation of jax out of a trace would be compiled."""
    latents = {name: np.zeros(shape) for name, shape in model.latent_shapes.items()}
    rewards = {name: np.zeros(num_rows) for name in model.outcomes}
    context = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_rows, *np.shape(leaf))), model.context)
    return latents, Interaction(np.zeros(num_rows, int), rewards, context)  # type: ignore[arg-type]


def close_fingerprint(model: RewardModel) -> str | None:
    """Return a digest of everything that an engine can find in a program; None where that cannot be told.

    Beside the computation: where every site lives, how the densities bend (a rule of differentiation may be the user's own),
    the example context, which probes start from, and the code itself, for what it does with other numbers of rows than those
    looked at here. A distribution of the user's own may draw as it likes, and has no such digest.
    """
    sites: list[Any] = []

    def readings(latents: Any, row: Interaction) -> Any:
        trace = model.trace(latents, row.arm, row.context, model.outcome_values(row.reward))
        sites.extend(site for site in trace.values() if site["type"] == "sample")
        homes = {name: trace[name]["fn"].support(trace[name]["value"]) for name in model.latent_shapes}
        return _densities(model, trace), homes, model.in_support(latents, row)

    def bends(latents: Any, row: Interaction) -> Any:
        def densities(latents: Any) -> Any:
            return _densities(model, model.trace(latents, row.arm, row.context, model.outcome_values(row.reward)))

        ones = jax.tree.map(jnp.ones_like, latents)
        return jax.jvp(lambda at: jax.jvp(densities, (at,), (ones,))[1], (latents,), (ones,))

    digest = hashlib.sha256(fingerprint(model).encode())
    with jax.enable_x64(True):
        for function in (readings, bends):
            closed = jax.make_jaxpr(function)(*_arguments(model, 1))
            _digest_jaxpr(digest, closed.jaxpr, closed.consts)
    classes = [type(part) for site in sites for part in _parts(site["fn"])]
    if not all(kind.__module__.startswith("numpyro.") for kind in classes):
        return None
    facts = [[site["name"] for site in sites], [kind.__qualname__ for kind in classes], model.num_arms, model.outcomes]
    digest.update(repr([*facts, model.outcome_kinds, model.expected_reward_way, model.outcome_groups]).encode())
    digest.update(str(jax.tree.structure(model.context)).encode())
    for leaf in jax.tree.leaves(model.context):
        _digest_value(digest, leaf)
    digest.update(code_fingerprint(model.program).encode())
    return digest.hexdigest()


def code_fingerprint(program: Callable) -> str:
    """Return a digest of how a program is written, without running it; what it reads or calls elsewhere is not in it."""
    digest = hashlib.sha256()
    _digest_code(digest, _code_of(program))
    return digest.hexdigest()


def _densities(model: RewardModel, trace: Trace) -> Any:
    return model.log_prior_of(trace), [log_prob(trace[name]) for name in model.outcomes]


def _parts(fn: Any) -> Iterator[Any]:
    """Yield a distribution with its support, and the distributions inside it with theirs."""
    yield fn
    yield fn.support
    for value in vars(fn).values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Distribution):
                yield from _parts(part)


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
        else:  # a set is written in another order in every process
            digest.update(repr(sorted(map(repr, const)) if isinstance(const, frozenset) else const).encode())


def _digest_jaxpr(digest: Any, jaxpr: Jaxpr, consts: Any) -> None:
    """Add a jaxpr to a digest: its operations, their parameters, how they are wired, and its numbers."""
    names: dict[Any, int] = {}

    def name(atom: Any) -> None:
        if isinstance(atom, Literal):
            _digest_value(digest, atom.val)
        else:
            digest.update(f"v{names.setdefault(atom, len(names))}:{atom.aval};".encode())

    for variable in [*jaxpr.constvars, *jaxpr.invars]:
        name(variable)
    for const in consts:
        _digest_value(digest, const)
    for eqn in jaxpr.eqns:
        digest.update(f"{eqn.primitive.name}(".encode())
        for atom in eqn.invars:
            name(atom)
        for key in sorted(set(eqn.params) - _NAMES):
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
