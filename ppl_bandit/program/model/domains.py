"""Check that the arguments of every distribution stay inside their domains: a probability in [0, 1], a scale above 0.

NumPyro's own checks are disabled while a program is traced, because their comparisons would end up in the jaxpr. An argument
that leaves its domain leads to rewards that nobody can observe: an expected reward of -.7 for a Bernoulli outcome.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool
from numpyro.distributions import Distribution, constraints

from ppl_bandit.program.model.probing import DTYPE_OF_KIND, feasible_latents
from ppl_bandit.program.model.sites import ProgramSpec
from ppl_bandit.program.model.tracing import Trace, masked_rows, repeat_rows
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import class_name, components, distribution_name, element_support
from ppl_bandit.types import InvalidProgram

_NUM_DRAWS = 1000
_REACHES, _NUM_SEEDS = (1.5, 8.0), 4  # of latents in unconstrained space, and tries at each
_POSITIVE = (constraints.positive, constraints.nonnegative, constraints.softplus_positive)
_UNCHECKED = (constraints.real, constraints.real_vector, constraints.simplex)  # simplexes are checked with the rows

Argument = tuple[str, str, str, Any]  # site, distribution, name and constraint of an argument


def check_domains(spec: ProgramSpec) -> bool:
    """Refuse a program whose outcomes or latents have arguments outside of their domains at draws from the prior.

    Returns:
        Whether arguments leave their domains far out in the prior, where no draw was.

    Raises:
        InvalidProgram: with the argument and the share of draws.
    """
    arm, context = spec.one_row_per_arm()
    arguments: list[Argument] = []

    def flags(latents: Mapping[str, Array]) -> tuple[list[Array], list[Array]]:
        trace = spec.run(latents, arm, context, _zero_outcomes(spec, arm.shape[0]))
        found = _arguments(trace, _sites(trace))
        arguments[:] = [argument for argument, _, _ in found]
        insides = [jnp.all(_is_inside(argument[-1], value) | masked) for argument, value, masked in found]
        return insides, [jnp.min(jnp.where(masked, jnp.inf, value)) for _, value, masked in found]

    def far(seed: Array, reach: Array) -> list[Array]:
        return flags(feasible_latents(spec.program, spec.latents, spec.context, seed, reach))[0]

    tries = [jnp.asarray(own) for own in zip(*itertools.product(range(_NUM_SEEDS), _REACHES), strict=True)]
    screened = run_once(lambda: jax.vmap(far)(*tries))
    if all(np.all(inside) for inside in screened):
        return False

    def drawn(key: Array) -> tuple[list[Array], list[Array]]:
        trace = spec.run({}, arm[:1], repeat_rows(spec.context, 1), {}, key)
        return flags({name: trace[name]["value"] for name in spec.latents})

    insides, least = run_once(lambda: jax.vmap(drawn)(jr.split(jr.key(0), _NUM_DRAWS)))
    for (site, law, name, constraint), inside, values in zip(arguments, insides, least, strict=True):
        share = 1.0 - float(np.mean(inside))
        if share > 0.0:
            example = float(np.asarray(values)[~np.asarray(inside)][0])
            domain = "[0, 1]" if constraint is constraints.unit_interval else class_name(constraint).lower()
            raise InvalidProgram(
                f"the {name} of '{site}' ({law}) leaves its domain, {domain}, in {share:.1%} of {_NUM_DRAWS:,} draws from "
                f"the prior (it is {example:.3g} in one of them), so that there is no such distribution: give the latents a "
                "prior that stays inside (Beta for a probability, Gamma or HalfNormal for a rate or scale), or map them there "
                "by jax.nn.sigmoid, jnp.exp or jax.nn.softplus"
            )
    return True


def inside_domains(trace: Trace, outcomes: tuple[str, ...]) -> Bool[Array, ""]:
    """Return whether all arguments of the outcomes are inside their domains."""
    found = [jnp.all(_is_inside(own[-1], value) | masked) for own, value, masked in _arguments(trace, outcomes)]
    return jnp.all(jnp.stack(found)) if found else jnp.array(True)


def _zero_outcomes(spec: ProgramSpec, num_rows: int) -> dict[str, Array]:
    return {name: jnp.zeros(num_rows, DTYPE_OF_KIND[kind]) for name, kind in spec.kinds.items()}


def _arguments(trace: Trace, sites: tuple[str, ...]) -> list[tuple[Argument, Array, Array]]:
    """Return the arguments of sites that have a domain of single numbers, and in which rows they do not count.

    Of observed constants those count that could turn the density around: a value that the distribution cannot produce, a count
    or a concentration below 0. So does a scale below 0.
    """
    found: list[tuple[Argument, Array, Array]] = []
    for site in sites:
        fn, scale = trace[site]["fn"], trace[site]["scale"]
        masked, _ = masked_rows(fn, jnp.shape(trace[site]["value"]))
        if scale is not None:
            label = (site, distribution_name(fn), "scale", constraints.nonnegative)
            found.append((label, jnp.asarray(scale, float), jnp.zeros((), bool)))
        if trace[site]["is_observed"] and jnp.size(trace[site]["value"]) and _is_of_numbers(fn.support):
            label = (site, distribution_name(fn), "observed value", fn.support)
            found.append((label, jnp.asarray(trace[site]["value"], float), masked))
        for part in components(fn):
            if not isinstance(part, Distribution):
                continue
            given = [(name, element_support(own), vars(part).get(name)) for name, own in part.arg_constraints.items()]
            if trace[site]["is_observed"]:
                given = [own for own in given if own[0].startswith(("total_count", "concentration"))]
            elif {"low", "high"} <= part.arg_constraints.keys():
                given.append(("width of the support", constraints.positive, jnp.asarray(part.high - part.low, float)))
            for name, constraint, value in given:
                if value is None or constraint in _UNCHECKED or not _is_of_numbers(constraint):
                    continue
                value = jnp.asarray(value, float)
                rows = masked if value.ndim and value.shape[-1:] == masked.shape else jnp.zeros((), bool)
                found.append(((site, distribution_name(part), name, constraint), value, rows))
    return found


def _sites(trace: Trace) -> tuple[str, ...]:
    return tuple(name for name, site in trace.items() if site["type"] == "sample")


def _is_of_numbers(constraint: Any) -> bool:
    """Return whether a constraint is one of single numbers that can be checked."""
    try:
        return constraint.event_dim == 0 and class_name(constraint) != "Dependent"
    except NotImplementedError:  # the constraint depends on other arguments
        return False


def _is_inside(constraint: Any, value: Array) -> Array:
    """Return whether a value is inside a domain; rounding to the end of one is no fault of the program."""
    if constraint in _POSITIVE:
        return value >= 0
    return jnp.broadcast_to(constraint(value), value.shape)
