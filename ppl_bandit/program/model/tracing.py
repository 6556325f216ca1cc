"""Run a NumPyro program with some of its sites fixed, and read its sites."""

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
from numpyro.distributions import Distribution, Independent, MaskedDistribution

from ppl_bandit.runtime.numpyro_adapter import mask_of
from ppl_bandit.types import Key

__all__ = [
    "Site",
    "Trace",
    "is_prior_term",
    "log_prob",
    "log_prob_terms",
    "possible",
    "repeat_rows",
    "run_program",
    "running",
    "without_programs",
]

Site = dict[str, Any]
Trace = dict[str, Site]

_TURN = threading.RLock()
_THREAD = threading.local()


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Let this thread alone run programs: NumPyro keeps its handlers, and whether it validates, in one place for all threads.

    Only tracing runs programs; compiled functions do not wait for it.

    Raises:
        RuntimeError: inside of `without_programs`.
    """
    if getattr(_THREAD, "is_barred", False):
        raise RuntimeError("a program was to be run in a thread that runs beside those of the user")
    with _TURN:
        yield


@contextlib.contextmanager
def without_programs() -> Iterator[None]:
    """Bar this thread from running programs: the user's threads may run some, whose handlers it would meet."""
    _THREAD.is_barred = True
    try:
        yield
    finally:
        _THREAD.is_barred = False


def run_program(
    program: Callable,
    arm: Int[Array, " N"],
    context: Any,
    values: Mapping[str, Array],
    key: Key | None = None,
    choose: Callable[[Site], Array | None] | None = None,
) -> Trace:
    """Run a program with some of its sites fixed and return its trace; sites that are not fixed are drawn.

    NumPyro's argument checks are off inside: they compare parameters with their bounds, which would hide the structure of
    the computation. What they would catch shows up as a log density that is not finite.

    Args:
        choose: gives a value to sites that are not in `values`; where it returns None the site is drawn.
    """
    fixed = handlers.substitute(program, data=dict(values))
    if choose is not None:
        fixed = handlers.substitute(fixed, substitute_fn=choose)
    # Seeded last, so that no key is spent on a site that has its value.
    seeded = handlers.seed(fixed, jr.key(0) if key is None else key)
    # As jax arrays, also where the library holds NumPy ones: a program may say `context.at[...]` or index in a loop.
    given = jax.tree.map(jnp.asarray, (arm,) if context is None else (arm, context))
    with running(), numpyro.validation_enabled(False):
        return handlers.trace(seeded).get_trace(*given)


def log_prob(site: Site, mask: Bool[Array, " N"] | None = None) -> Array:
    """Return a site's log density, elementwise; 0 where masked."""
    fn = site["fn"] if mask is None else site["fn"].mask(mask)
    density = fn.log_prob(site["value"])
    return density if site["scale"] is None else site["scale"] * density


def log_prob_terms(site: Site, is_plain: bool = False) -> Float[Array, " terms"]:
    """Return a site's log density in as many terms as it has independent elements.

    Args:
        is_plain: leave scale and mask out, as a draw of the site does.
    """
    fn, value, num_summed = site["fn"], site["value"], 0
    if is_plain:
        fn = _unmasked(fn)
    while isinstance(fn, Independent):
        num_summed += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    density = fn.log_prob(value)
    scale = None if is_plain else site["scale"]
    if scale is not None:
        scale = jnp.asarray(scale)
        density *= scale.reshape(scale.shape + (1,) * num_summed) if scale.ndim else scale
    return jnp.ravel(jnp.asarray(density, float))


def possible(fn: Any, value: Array) -> Bool[Array, "..."]:
    """Tell where a distribution can produce a value; anything is possible where the distribution is masked."""
    masked = jnp.zeros(value.shape, bool)
    while (mask := mask_of(fn)) is not None:
        masked |= jnp.logical_not(jnp.broadcast_to(jnp.asarray(mask), value.shape))
        fn = fn.base_dist
    return masked | (jnp.broadcast_to(fn.support(value), value.shape) & jnp.isfinite(value))


def is_prior_term(name: str, site: Site, outcomes: tuple[str, ...]) -> bool:
    """Tell whether a site belongs to the prior: a latent, a constant the program observes, a factor."""
    return site["type"] == "sample" and name not in outcomes


def repeat_rows(context: Any, num_rows: int) -> Any:
    """Repeat one context over rows; None stays None."""
    if context is None:
        return None
    return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (num_rows, *jnp.shape(leaf))), context)


def _unmasked(fn: Distribution) -> Distribution:
    if isinstance(fn, Independent):
        return _unmasked(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    return _unmasked(fn.base_dist) if isinstance(fn, MaskedDistribution) else fn
