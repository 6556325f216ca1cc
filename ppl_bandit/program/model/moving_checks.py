"""Validation of a transition: which latents move, and whether the readings of the program agree with each other.

A latent whose distribution depends on `previous` or `elapsed` moves. The others are static: they keep the value of the first
step. The likelihood and the expected reward are read from the program without `previous`, so they may depend on the present
latents only.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.keywords import takes
from ppl_bandit.program.model.probing import DTYPE_OF_KIND, feasible_latents, feasible_rewards
from ppl_bandit.program.model.sites import ProgramSpec, abstract_trace, is_latent
from ppl_bandit.program.model.tracing import Trace, is_prior_term, log_prob, run_program
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import class_name
from ppl_bandit.types import InvalidProgram


def find_moving_sites(spec: ProgramSpec, shapes: Mapping[str, tuple[int, ...]], first: Trace) -> tuple[str, ...]:
    """Return the latents that move; () for a program that does not take `previous`.

    Args:
        first: the abstract trace of the first step, with two rows.

    Raises:
        InvalidProgram: if the step cannot be used; the message says why and what to write instead.
    """
    if not takes(spec.program, "previous"):
        return ()
    previous = {name: np.zeros(shape) for name, shape in shapes.items()}
    _check_sites(spec, shapes, first, abstract_trace(spec.program, spec.context, 2, previous))
    moving = _check_dependence(spec, previous)
    _check_same_readings(spec, moving)
    return moving


def _check_sites(spec: ProgramSpec, shapes: Mapping[str, tuple[int, ...]], first: Trace, later: Trace) -> None:
    """Check that both steps have the same sites, with the same shapes and supports."""
    found = {name: tuple(jnp.shape(s["value"])) for name, s in later.items() if is_latent(name, s, spec.outcomes)}
    if set(found) != set(shapes):
        raise InvalidProgram(
            f"the program has the latents {sorted(shapes)} at the first step and {sorted(found)} with `previous`: sample the "
            "same sites in both cases"
        )
    for name, shape in found.items():
        if shape != shapes[name]:
            raise InvalidProgram(
                f"the latent '{name}' has shape {shapes[name]} at the first step and {shape} with `previous`: give it one shape"
            )
        before, after = (class_name(trace[name]["fn"].support) for trace in (first, later))
        if before != after:
            raise InvalidProgram(
                f"the latent '{name}' lives on {before} at the first step and on {after} with `previous`: give it one support"
            )
    missing = [name for name in spec.outcomes if name not in later]
    if missing:
        raise InvalidProgram(f"the program has no outcome '{missing[0]}' with `previous`: sample it at every step")


def _check_dependence(spec: ProgramSpec, previous: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Return the latents whose density depends on `previous` or `elapsed`, and check what everything else depends on."""
    arm, context = spec.one_row_per_arm()
    outcomes: dict[str, Any] = {name: np.zeros(spec.num_arms, DTYPE_OF_KIND[kind]) for name, kind in spec.kinds.items()}
    elapsed = np.ones(()) if takes(spec.program, "elapsed") else None

    def densities(key: Array, previous: Any, latents: Any, elapsed: Any, *rows: Any) -> tuple[Any, Any, Any]:
        arm, context, outcomes = rows
        trace = run_program(
            spec.program, arm, context, {**latents, **outcomes}, key, previous=previous, elapsed=elapsed
        )
        terms = {name: s for name, s in trace.items() if is_prior_term(name, s, spec.outcomes)}
        others = {name: log_prob(site) for name, site in terms.items() if name not in spec.latents}
        told = {name: log_prob(trace[name]) for name in spec.outcomes}
        if "expected_reward" in trace:
            told["expected_reward"] = trace["expected_reward"]["value"]
        return {name: log_prob(terms[name]) for name in spec.latents}, others, told

    args = (jax.eval_shape(jr.key, 0), previous, dict(previous), elapsed, arm, context, outcomes)
    closed, shape = jax.make_jaxpr(densities, return_shape=True)(*args)
    sorts = ("the random key", "previous", "latents", "elapsed", "arm", "context", "the outcomes")
    labels = [
        frozenset([f"latent {name}" for name in [sorted(previous)[number]]] if sort == "latents" else [sort])
        for sort, arg in zip(sorts, args, strict=True)
        for number, _ in enumerate(jax.tree.leaves(arg))
    ]
    reached = jax.tree.unflatten(jax.tree.structure(shape), dependencies(closed, labels))
    of_latents, of_others, told = reached
    time = {"previous", "elapsed"}
    moving = tuple(name for name in spec.latents if of_latents[name] & time)
    if not moving:
        raise InvalidProgram(
            "the program takes `previous`, but no latent is sampled from it: write the step of a site, as in "
            '`dist.Normal(previous["level"], 0.1)`, or leave the keyword out'
        )
    for name, sources in of_others.items():
        if sources & time:
            raise InvalidProgram(
                f"the factor or observed constant '{name}' depends on {sorted(sources & time)[0]}: a step is the density of "
                "sample sites, so express it by their distributions"
            )
    for name, sources in told.items():
        if sources & time:
            raise InvalidProgram(
                f"'{name}' depends on {sorted(sources & time)[0]}: write it with the present latents only; keep the value that "
                "it needs as a latent of its own"
            )
    for name, sources in of_latents.items():
        data = sorted(sources & {"the random key", "arm", "context", "the outcomes"})
        if data:
            raise InvalidProgram(
                f"the step of '{name}' depends on {data[0]}: a step must be the same for all data; time that passes between "
                'steps is the keyword `elapsed`, from context["time"]'
            )
        parents = sorted(other for other in moving if f"latent {other}" in sources)
        if name not in moving and parents:
            raise InvalidProgram(
                f"the latent '{name}' does not depend on `previous`, so it is static, but its distribution depends on "
                f"'{parents[0]}', which moves: sample it from `previous` as well, or make it independent of '{parents[0]}'"
            )
    return moving


def _check_same_readings(spec: ProgramSpec, moving: tuple[str, ...]) -> None:
    """Check numerically that everything but the moving latents has the same density at the first step and later."""
    arm, context = spec.one_row_per_arm()
    static = tuple(name for name in spec.latents if name not in moving)

    def compare(seed: Array) -> tuple[dict[str, Array], Array]:
        latents, previous = (feasible_latents(spec.program, spec.latents, spec.context, seed + n) for n in (0, 5))
        picks = jnp.tile(3 * jnp.arange(spec.num_arms)[:, None] + seed, (1, len(spec.outcomes)))
        rewards, _ = feasible_rewards(spec.program, latents, arm, context, spec.kinds, picks)
        previous |= {name: latents[name] for name in static}
        traces = [
            run_program(spec.program, arm, context, {**latents, **rewards}, previous=before)
            for before in (None, previous)
        ]
        names = [n for n, s in traces[0].items() if s["type"] == "sample" and n not in moving and n in traces[1]]
        pairs = {name: [log_prob(trace[name]) for trace in traces] for name in names}
        same = {
            name: jnp.allclose(pair[0], pair[1], rtol=1e-9, atol=1e-9, equal_nan=True) for name, pair in pairs.items()
        }
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(log_prob(traces[1][name]))) for name in moving]))
        return same, finite

    same, is_finite = run_once(lambda: jax.vmap(compare)(jnp.arange(2)))
    for name, is_same in same.items():
        if not is_same.all():
            raise InvalidProgram(
                f"'{name}' has one distribution at the first step and another with `previous`, although it is not sampled from "
                "`previous`: write one distribution for both, or sample it from `previous`"
            )
    if not is_finite.all():
        raise InvalidProgram(
            "the step from `previous` has no finite density at values tried from the interior of the prior: check that its "
            "scales are above 0"
        )
