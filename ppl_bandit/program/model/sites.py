"""The sites of a program, found by abstract tracing, and the requirements that they must meet.

Check that the arguments of every distribution stay inside their domains: a probability in [0, 1], a scale above 0.

NumPyro's own checks are disabled while a program is traced, because their comparisons would end up in the jaxpr. An argument
that leaves its domain leads to rewards that nobody can observe: an expected reward of -.7 for a Bernoulli outcome.
"""

import inspect
import itertools
import linecache
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool
from numpyro.distributions import Delta, Distribution, biject_to, constraints

from ppl_bandit.program.model.probing import DTYPE_OF_KIND, feasible_latents
from ppl_bandit.program.model.tracing import Site, Trace, is_prior_term, masked_rows, repeat_rows, run_program
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import (
    base_distribution,
    class_name,
    components,
    distribution_name,
    element_support,
    is_improper,
    mask_of,
)
from ppl_bandit.types import InvalidProgram


class ProgramSpec(NamedTuple):
    """A program with the facts about it that the checks need.

    Attributes:
        latents: names of the latent sites.
        kinds: outcome -> "i" for integers and booleans, "f" for reals.
    """

    program: Callable
    num_arms: int
    context: Any
    outcomes: tuple[str, ...]
    latents: tuple[str, ...]
    kinds: Mapping[str, str]

    def run(
        self,
        latents: Mapping[str, Array],
        arm: Array,
        context: Any,
        values: Mapping[str, Array],
        key: Array | None = None,
    ) -> Trace:
        """Run the program with some sites fixed.

        Raises:
            InvalidProgram: if the program itself fails.
        """
        try:
            return run_program(self.program, arm, context, {**latents, **values}, key)
        # Methods for the mean of a distribution raise these exceptions too, with another meaning.
        except (AttributeError, TypeError, NotImplementedError) as error:
            raise InvalidProgram(_failure_message(error, self.program, jnp.shape(arm)[0])) from error

    def one_row_per_arm(self) -> tuple[Any, Any]:
        """Return arms and contexts: one row for each arm, in the example context."""
        repeated = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (self.num_arms, *leaf.shape)), self.context)
        return np.arange(self.num_arms), repeated  # NumPy arrays, because operations on them are not traced


def abstract_trace(
    program: Callable, context: Any, num_rows: int, previous: Mapping[str, np.ndarray] | None = None
) -> Trace:
    """Return the sites of a program, traced without computing anything: values have shapes and types only.

    Args:
        previous: the latents one step before; None for the first step.
    """
    caught: dict[str, Any] = {}

    def body(arm: Array, rows: Any, previous: Any) -> None:
        caught.update(run_program(program, arm, rows, {}, choose=_refuse_improper, previous=previous))
        for site in caught.values():  # here: the bounds of a support may be tracers, which are invalid later
            site["has_bijection"] = site["type"] != "sample" or _has_bijection(site["fn"])

    rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_rows, *leaf.shape)), context)
    try:
        jax.eval_shape(body, np.arange(num_rows), rows, previous)
    except InvalidProgram:
        raise
    except (
        jax.errors.TracerBoolConversionError,
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.TracerArrayConversionError,
    ) as error:
        raise InvalidProgram(_traced_value_message(error, program)) from error
    except Exception as error:
        if "truth value of an array" in str(error):
            raise InvalidProgram(_traced_value_message(error, program)) from error
        raise InvalidProgram(_failure_message(error, program, num_rows)) from error
    return caught


def _refuse_improper(site: Site) -> None:
    """Refuse a prior that cannot be sampled.

    Raises:
        InvalidProgram: for an improper prior.
    """
    if site["type"] == "sample" and is_improper(site["fn"]):
        raise InvalidProgram(
            f"the latent '{site['name']}' has the improper prior ImproperUniform, from which nothing can be drawn before there "
            "are data: give it a proper prior that is as wide as the values that you consider possible, such as "
            "dist.Normal(0.0, 100.0), dist.HalfNormal(100.0) or dist.Uniform(low, high)"
        )


def _has_bijection(fn: Any) -> bool:
    try:
        biject_to(fn.support)
    except NotImplementedError:
        return False
    return True


def _failure_message(error: BaseException, program: Callable, num_rows: int) -> str:
    """Return a message that a program failed, with advice if the cause is known."""
    message = f"the program failed on {num_rows} rows{failing_line(error, program)}: {type(error).__name__}: {error}"
    if "must have integer" in str(error):
        message += (
            "; a number of trials or an index that is a float, for example one from a context, needs .astype(int)"
        )
    return message


def _traced_value_message(error: BaseException, program: Callable) -> str:
    """Return a message that a program uses the number of a traced value."""
    return (
        f"the program needs a value that is only known at run time{failing_line(error, program)}: it must not branch in Python "
        "on arm, context or a site's value, nor turn them into Python or NumPy numbers; index an array by arm or use jnp.where"
    )


def failing_line(error: BaseException, program: Callable) -> str:
    """Return the innermost line of the program's own file in a traceback, in brackets; "" if there is none."""
    code = getattr(inspect.unwrap(program), "__code__", None)
    line, step = None, error.__traceback__
    while step is not None:
        if code is not None and step.tb_frame.f_code.co_filename == code.co_filename:
            line = step.tb_lineno
        step = step.tb_next
    if line is None or code is None:
        return ""
    return f" (line {line}: `{linecache.getline(code.co_filename, line).strip()}`)"


def is_latent(name: str, site: Site, outcomes: tuple[str, ...]) -> bool:
    """Return whether a site is a latent."""
    return is_prior_term(name, site, outcomes) and not site["is_observed"]


def check_outcomes(trace: Trace, outcomes: tuple[str, ...], num_rows: int) -> None:
    """Check that every outcome is a sample site with one number per row."""
    samples = [name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]]
    for name in outcomes:
        site = trace.get(name)
        if site is None or site["type"] != "sample":
            raise InvalidProgram(
                f"the program has no sample site '{name}'; its sample sites are {samples}: "
                f"rename the outcome to '{name}' or pass outcomes=(...)"
            )
        if site["is_observed"]:
            raise InvalidProgram(
                f"the program passes obs= to '{name}': leave it out, the library conditions the program itself"
            )
        shape, fn = jnp.shape(site["value"]), site["fn"]
        if shape != (num_rows,) or fn.event_shape:
            raise InvalidProgram(
                f"the outcome '{name}' has shape {shape} (batch {tuple(fn.batch_shape)}, event {tuple(fn.event_shape)}) for "
                f"{num_rows} rows of data, expected ({num_rows},) with an empty event shape: one number per row, such as "
                "dist.Bernoulli(rate[arm])"
            )


def check_latents(trace: Trace, longer: Trace, latents: list[str]) -> None:
    """Check that the latents can be learnt: continuous, the same for all rows, with a proper prior."""
    for name, site in trace.items():
        if site["type"] == "param":
            raise InvalidProgram(f"numpyro.param '{name}' has no posterior: give it a prior with numpyro.sample")
        if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
            raise InvalidProgram(f"the plate '{name}' is subsampled: leave out subsample_size, every row counts once")
        if site["type"] in ("control_flow", "prng_key", "mutable"):
            raise InvalidProgram(
                f"'{name}' is a numpyro {site['type']} site, which cannot be conditioned: use plain jax code"
            )
    if not latents:
        raise InvalidProgram(
            "the program has no latent sample site, so there is nothing to learn: give a parameter a prior"
        )
    for name in latents:
        if trace[name]["scale"] is not None or _is_masked(trace[name]["fn"]):
            handler = "scale" if trace[name]["scale"] is not None else "mask"
            raise InvalidProgram(
                f"the latent '{name}' stands inside handlers.{handler}, which changes its density and not its draws, so that "
                "the readings of the program would disagree: write the prior that is meant (Normal(m, s) to the power k is "
                "Normal(m, s / sqrt(k))), and weigh or mask the outcome alone"
            )
        before, after = jnp.shape(trace[name]["value"]), jnp.shape(longer[name]["value"])
        if before != after:
            raise InvalidProgram(
                f"the latent '{name}' has shape {before} for 2 rows and {after} for 3: a latent per row cannot be learnt; "
                "share it between rows, or integrate it out by writing the marginal distribution of the outcome"
            )
        if trace[name]["fn"].support.is_discrete:
            raise InvalidProgram(
                f"the latent '{name}' is discrete: sum it out, for instance with dist.MixtureSameFamily or "
                "dist.MixtureGeneral for the outcome"
            )
        if isinstance(base_distribution(trace[name]["fn"]), Delta):
            raise InvalidProgram(
                f"the latent '{name}' has a Delta prior, so that its value is known and cannot be learnt: write the value "
                "itself, or numpyro.deterministic, in its place"
            )
        if not trace[name]["has_bijection"]:
            raise InvalidProgram(
                f"the latent '{name}' lives on {class_name(trace[name]['fn'].support)}, to which NumPyro has no "
                "bijection from the reals, so no engine can sample it: write it as a function of latents with a real, "
                "positive, interval or simplex support"
            )


def _is_masked(fn: Any) -> bool:
    while hasattr(fn, "base_dist"):
        if mask_of(fn) is not None and mask_of(fn) is not True:
            return True
        fn = fn.base_dist
    return False


def check_expected_reward(trace: Trace, outcomes: tuple[str, ...]) -> bool:
    """Return whether the program has an `expected_reward` site; check its shape, and that it exists if it is required."""
    site = trace.get("expected_reward")
    if site is None:
        if len(outcomes) > 1:
            raise InvalidProgram(
                f"with several outcomes {outcomes} the program must say what to maximise: add "
                'numpyro.deterministic("expected_reward", ...) of shape (N,)'
            )
        return False
    if site["type"] != "deterministic" or jnp.shape(site["value"]) != (2,):
        raise InvalidProgram(
            f"expected_reward must be a numpyro.deterministic of shape (N,), got a {site['type']} site of shape "
            f"{jnp.shape(site['value'])} for 2 rows"
        )
    return True


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

    def far(seed: Any, reach: Any) -> list[Array]:
        return flags(feasible_latents(spec.program, spec.latents, spec.context, seed, reach))[0]

    tries = [np.asarray(own) for own in zip(*itertools.product(range(_NUM_SEEDS), _REACHES), strict=True)]
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
