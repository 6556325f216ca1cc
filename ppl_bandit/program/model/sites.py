"""The sites of a program, from a trace that runs nothing: which there are, their kinds and their shapes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpyro.distributions import biject_to

from ppl_bandit.program.model.failures import failure, run_time_value
from ppl_bandit.program.model.tracing import Site, Trace, is_prior_term, run_program
from ppl_bandit.runtime.numpyro_adapter import class_name, mask_of
from ppl_bandit.types import InvalidProgram

__all__ = ["check_expected_reward", "check_latents", "check_outcomes", "is_latent", "traced"]


def traced(program: Callable, context: Any, num_rows: int) -> Trace:
    """Trace the program without running it."""
    caught: dict[str, Any] = {}

    def body(arm: Array, rows: Any) -> None:
        caught.update(run_program(program, arm, rows, {}))
        for site in caught.values():  # now: bounds of a support may be traced values, which mean nothing later
            site["has_bijection"] = site["type"] != "sample" or _has_bijection(site["fn"])

    rows = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (num_rows, *leaf.shape)), context)
    try:
        jax.eval_shape(body, np.arange(num_rows), rows)
    except InvalidProgram:
        raise
    except (
        jax.errors.TracerBoolConversionError,
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.TracerArrayConversionError,
    ) as error:
        raise InvalidProgram(run_time_value(error, program)) from error
    except Exception as error:
        if "truth value of an array" in str(error):
            raise InvalidProgram(run_time_value(error, program)) from error
        raise InvalidProgram(failure(error, program, num_rows)) from error
    return caught


def _has_bijection(fn: Any) -> bool:
    try:
        biject_to(fn.support)
    except NotImplementedError:
        return False
    return True


def is_latent(name: str, site: Site, outcomes: tuple[str, ...]) -> bool:
    """Return whether a site is one to be learnt."""
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
    """Check that the latents are such as can be learnt from rows."""
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
    """Return whether the program names its expected reward, and check that it does where it must."""
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
