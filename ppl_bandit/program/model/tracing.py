"""Run a NumPyro program with some of its sites fixed, and compute log densities of its sites."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
from jaxtyping import Array, Bool, Float, Int
from numpyro import handlers
from numpyro.distributions import Independent, constraints

from ppl_bandit.program.model.stable_laws import stable
from ppl_bandit.runtime.numpyro_adapter import element_support, mask_of
from ppl_bandit.types import Key

Site = dict[str, Any]
Trace = dict[str, Site]

_LOCK = threading.RLock()
_THREAD = threading.local()


@contextlib.contextmanager
def program_lock() -> Iterator[None]:
    """Hold the lock without which no program may run: NumPyro's handler stack and validation flag are global to the process.

    Only tracing runs programs; compiled functions do not need the lock.

    Raises:
        RuntimeError: inside `forbid_programs`.
    """
    if getattr(_THREAD, "is_forbidden", False):
        raise RuntimeError("a background thread tried to run a program, which only the threads of the user may do")
    with _LOCK:
        yield


@contextlib.contextmanager
def forbid_programs() -> Iterator[None]:
    """Forbid this thread to run programs: it would see the NumPyro handlers of the user's threads."""
    _THREAD.is_forbidden = True
    try:
        yield
    finally:
        _THREAD.is_forbidden = False


def run_program(
    program: Callable,
    arm: Int[Array, " N"],
    context: Any,
    values: Mapping[str, Array],
    key: Key | None = None,
    choose: Callable[[Site], Array | None] | None = None,
    previous: Mapping[str, Array] | None = None,
    elapsed: Array | float | None = None,
) -> Trace:
    """Run a program with some of its sites fixed and return its trace; sites that are not fixed are sampled.

    NumPyro's argument checks are disabled, because their comparisons would end up in the jaxpr. An invalid argument leads to
    a log density that is not finite.

    Args:
        values: {site: value} of the fixed sites.
        choose: returns the value of a site that is not in `values`, or None to sample it.
        previous: the latents one step before, for a program that takes them; None at the first step.
        elapsed: the time since then, for a program that takes it; None is the program's default.
    """
    fixed = handlers.substitute(program, data=dict(values))
    if choose is not None:
        fixed = handlers.substitute(fixed, substitute_fn=choose)
    # The seed handler is outermost, so that a site with a value uses no key.
    seeded = handlers.seed(fixed, jr.key(0) if key is None else key)
    # JAX arrays, not NumPy ones: a program may use `context.at[...]` or index in a loop.
    given = jax.tree.map(jnp.asarray, (arm,) if context is None else (arm, context))
    keywords: dict[str, Any] = {} if previous is None else {"previous": dict(previous)}
    if elapsed is not None:
        keywords["elapsed"] = elapsed
    with program_lock(), numpyro.validation_enabled(False):
        trace = handlers.trace(seeded).get_trace(*given, **keywords)
    for site in trace.values():
        if site["type"] == "sample":
            site["fn"] = stable(site["fn"])
    return trace


def log_prob(site: Site, mask: Bool[Array, " N"] | None = None) -> Array:
    """Return a site's log density, elementwise; 0 where masked."""
    fn = site["fn"] if mask is None else site["fn"].mask(mask)
    density = fn.log_prob(site["value"])
    return density if site["scale"] is None else site["scale"] * density


def log_prob_terms(site: Site) -> Float[Array, " terms"]:
    """Return the log density of a site as one term for each independent element."""
    fn, num_summed = site["fn"], 0
    while isinstance(fn, Independent):
        num_summed += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    density = fn.log_prob(site["value"])
    if site["scale"] is not None:
        scale = jnp.asarray(site["scale"])
        density *= scale.reshape(scale.shape + (1,) * num_summed) if scale.ndim else scale
    return jnp.ravel(jnp.asarray(density, float))


def can_produce(fn: Any, value: Array) -> Bool[Array, "..."]:
    """Return where a distribution can produce a value; a masked distribution can produce any value."""
    masked, fn = masked_rows(fn, value.shape)
    inside = jnp.broadcast_to(fn.support(value), value.shape) & jnp.isfinite(value)
    if element_support(fn.support) is constraints.unit_interval:
        # The density of a Beta outcome is 0 or infinite at exactly 0 and 1: such a reward was rounded or is another event.
        is_end = (value <= 0) | (value >= 1)
        inside &= ~is_end | jnp.isfinite(fn.log_prob(jnp.where(inside, value, 0.5)))
    return masked | inside


def masked_rows(fn: Any, shape: tuple[int, ...]) -> tuple[Bool[Array, "..."], Any]:
    """Return where a distribution is masked, and the distribution without masks."""
    masked = jnp.zeros(shape, bool)
    while (mask := mask_of(fn)) is not None:
        masked |= jnp.logical_not(jnp.broadcast_to(jnp.asarray(mask), shape))
        fn = fn.base_dist
    return masked, fn


def is_prior_term(name: str, site: Site, outcomes: tuple[str, ...]) -> bool:
    """Return whether a site belongs to the prior: a latent, a constant that the program observes, or a factor."""
    return site["type"] == "sample" and name not in outcomes


def repeat_rows(context: Any, num_rows: int) -> Any:
    """Repeat one context over rows; None stays None."""
    if context is None:
        return None
    return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (num_rows, *jnp.shape(leaf))), context)
