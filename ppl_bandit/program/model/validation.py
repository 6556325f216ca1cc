"""Validation of a program when its reward model is built: the first problem found is reported in one sentence."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.fingerprints import program_fingerprint
from ppl_bandit.program.jaxpr.index_limits import IndexLimit
from ppl_bandit.program.keywords import check_keywords
from ppl_bandit.program.model import means
from ppl_bandit.program.model.moving_checks import find_moving_sites
from ppl_bandit.program.model.program_checks import check_dependence, check_row_independence, choose_mean_method
from ppl_bandit.program.model.sites import (
    ProgramSpec,
    abstract_trace,
    check_domains,
    check_expected_reward,
    check_latents,
    check_outcomes,
    is_latent,
)
from ppl_bandit.runtime.artefact import Artefact
from ppl_bandit.types import InvalidProgram

VALIDATION = "validation"


def facts_to_json(facts: Any) -> dict[str, Any]:
    """Return `validation.ProgramFacts` as JSON values, without the context and the artefact."""
    method = facts.mean_method
    values = facts._asdict() | {
        "mean_method": None if method is None else means.MEAN_METHODS.index(method),
        "largest_integers": [int(number) for number in jax.tree.leaves(facts.largest_integers)],
    }
    return {name: value for name, value in values.items() if name not in ("context", "artefact")}


def facts_from_json(values: Any, context: Any) -> dict[str, Any] | None:
    """Undo `facts_to_json`: return arguments of `validation.ProgramFacts`; None if the values are odd."""
    with contextlib.suppress(Exception):
        values = _with_tuples(values)
        method = values["mean_method"]
        return values | {
            "context": context,
            "mean_method": None if method is None else means.MEAN_METHODS[method],
            "largest_integers": jax.tree.unflatten(jax.tree.structure(context), values["largest_integers"]),
            "index_limits": tuple(IndexLimit(*limit) for limit in values["index_limits"]),
        }
    return None


def _with_tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


class ProgramFacts(NamedTuple):
    """Results of the validation of a program.

    Attributes:
        outcome_kinds: outcome -> "i" for integers and booleans, "f" for reals.
        mean_method: how the mean of the outcome is computed; None if the program has an `expected_reward` site.
        has_moving_support: whether a bound of an outcome's support depends on a latent.
        outcome_groups: outcomes whose densities depend on each other's values.
        largest_integers: for each leaf of the context, the largest integer that may replace a 0 of the example.
        moving_sites: latents that are sampled from those of the step before.
        index_limits: of contexts that are indices.
        artefact: where results about the program are kept.
        uses_arm: whether anything that the program computes for a row depends on its arm.
        idle_arm: an arm for which everything is the same at all latents, because the program multiplies them by 0.
        may_leave_domains: whether an outcome's arguments may leave their domains far out in the prior.
    """

    outcomes: tuple[str, ...]
    context: Any
    latent_shapes: Mapping[str, tuple[int, ...]]
    outcome_kinds: Mapping[str, str]
    mean_method: means.MeanMethod | None
    has_moving_support: bool
    outcome_groups: tuple[tuple[str, ...], ...]
    largest_integers: Any
    moving_sites: tuple[str, ...]
    index_limits: tuple[IndexLimit, ...]
    artefact: Artefact
    uses_arm: bool = True
    idle_arm: int | None = None
    may_leave_domains: bool = False


def validate(program: Callable, num_arms: int, context: Any, outcomes: Any) -> ProgramFacts:
    """Check that a program can be used as a reward model; the cheapest checks come first.

    Raises:
        InvalidProgram: with what was found, what was expected and what to write instead.
    """
    outcomes, context = _check_arguments(program, num_arms, context, outcomes)
    artefact = Artefact(functools.partial(program_fingerprint, program, num_arms, context, outcomes))
    cached = artefact.load(VALIDATION)
    known = None if cached is None else facts_from_json(cached[0], context)
    if known is not None:
        return ProgramFacts(**known, artefact=artefact)
    trace, longer = (abstract_trace(program, context, num_rows) for num_rows in (2, 3))
    latents = [name for name, site in trace.items() if is_latent(name, site, outcomes)]
    check_outcomes(trace, outcomes, num_rows=2)
    check_outcomes(longer, outcomes, num_rows=3)  # a shape can fit two rows by chance
    check_latents(trace, longer, latents)
    has_expected_reward = check_expected_reward(trace, outcomes)
    shapes = {name: tuple(jnp.shape(trace[name]["value"])) for name in latents}
    kinds = {
        name: "f" if jnp.issubdtype(trace[name]["value"].dtype, jnp.floating) else "i"
        for name in trace
        if name in outcomes
    }
    spec = ProgramSpec(program, int(num_arms), context, outcomes, tuple(latents), kinds)
    with jax.enable_x64(True):
        moves, groups, largest, limits, uses_arm, idle_arm = check_dependence(spec, shapes, has_expected_reward)
        mean_method = None if has_expected_reward else choose_mean_method(spec)
        if has_expected_reward:
            check_row_independence(spec, None)
        may_leave = check_domains(spec)
        moving = find_moving_sites(spec, shapes, trace)
    found = shapes, kinds, mean_method, moves, groups, largest, moving, limits
    return ProgramFacts(outcomes, context, *found, artefact, uses_arm, idle_arm, may_leave)


def _check_arguments(program: Callable, num_arms: Any, context: Any, outcomes: Any) -> tuple[tuple[str, ...], Any]:
    if not callable(program):
        raise InvalidProgram(f"program must be a function of arm, or of arm and context; got {type(program).__name__}")
    if isinstance(num_arms, bool) or not isinstance(num_arms, int | np.integer) or num_arms < 1:
        raise InvalidProgram(f"num_arms must be a positive integer, got {num_arms!r}")
    names = (outcomes,) if isinstance(outcomes, str) else tuple(outcomes) if isinstance(outcomes, list | tuple) else ()
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InvalidProgram(f"outcomes must be a list or tuple of different site names, got {outcomes!r}")
    check_keywords(program)
    required, accepted = _num_positional(program)
    if required > 2 or accepted < 1:
        raise InvalidProgram(
            f"the program must take (arm) or (arm, context), but it needs {required} positional arguments; "
            "close over anything else"
        )
    if context is None and required == 2:
        raise InvalidProgram(
            "the program takes a context, but no example was given: pass context=, one context without a leading axis"
        )
    if context is not None and accepted == 1:
        raise InvalidProgram(
            "an example context was given, but the program takes arm alone: add a context argument to it"
        )
    if context is None:
        return names, None
    leaves, treedef = jax.tree.flatten(context)
    arrays = [np.asarray(leaf) for leaf in leaves]
    bad = [array.dtype for array in arrays if array.dtype.kind not in "fiub"]
    if bad or not arrays:
        raise InvalidProgram(f"context must hold numbers or booleans, got leaves of type {bad or 'none at all'}")
    # In double precision: the certificates of the exact engine need it.
    wide = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in arrays]
    return names, jax.tree.unflatten(treedef, wide)


def _num_positional(program: Callable) -> tuple[int, float]:
    try:
        parameters = inspect.signature(program).parameters.values()
    except (TypeError, ValueError):  # a builtin or an unusual callable: tracing will show
        return 1, 2
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    many = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return required, float("inf") if many else len(positional)
