"""The outer sites of a program: the few latents given which the rest is conjugate.

The proof, derivation and certificate of the exact engine treat outer sites as data: `given` fixes their values inside the
program, which leaves an ordinary reward model of the inner sites. Particles move in the unconstrained space of the outer sites.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import is_prior_term, log_prob
from ppl_bandit.runtime.numpyro_adapter import element_support

_MAX_REAL = 100.0  # of real sites in the smaller boxes: the square of exp(100) is finite
_MAX_LOG = 30.0  # of the logarithms of positive sites in the smaller boxes
# The largest positive value in each box that the proof tries: exponentials of it may overflow, or not.
BOXES = (np.inf, np.exp(_MAX_LOG), _MAX_REAL)


class OuterSpace(NamedTuple):
    """The unconstrained outer sites: real vectors of K elements.

    Attributes:
        names: the outer sites, in the order of the program.
        size: K.
        constrain: (K,) -> {site: value}, and the log Jacobian.
        unconstrain: {site: value} -> (K,).
    """

    names: tuple[str, ...]
    size: int
    constrain: Callable[[Float[Array, " K"]], tuple[dict[str, Array], Float[Array, ""]]]
    unconstrain: Callable[[Mapping[str, Array]], Float[Array, " K"]]


def given(model: RewardModel, values: Mapping[str, Array]) -> RewardModel:
    """Return the model of the other sites, with some sites fixed to values, which may be traced."""
    # A NumPy array could not be indexed by a traced arm.
    fixed = {name: jnp.asarray(value) for name, value in values.items()}
    rest = {name: shape for name, shape in model.latent_shapes.items() if name not in values}
    return _with_program(model, handlers.substitute(model.program, data=fixed), fixed).replaced(latent_shapes=rest)


def without(model: RewardModel, names: Sequence[str]) -> RewardModel:
    """Return the model without some terms of its prior: factors and observed constants."""
    return _with_program(model, handlers.block(model.program, hide=list(names)))


def _with_program(model: RewardModel, handled: Callable, fixed: Mapping[str, Array] | None = None) -> RewardModel:
    """Return a model with another program; `fixed` is added to the latents of the step before."""

    @functools.wraps(model.program)
    def program(*rows: Any, previous: Mapping[str, Array] | None = None, **keywords: Any) -> Any:
        if previous is not None:
            keywords["previous"] = {**previous, **(fixed or {})}
        return handled(*rows, **keywords)

    return model.replaced(program=program)


def outer_space(model: RewardModel, names: tuple[str, ...], supports: Mapping[str, Any]) -> OuterSpace:
    """Return the unconstrained space of the outer sites, whose supports must not depend on latents."""
    shapes = {name: biject_to(supports[name]).inverse_shape(model.latent_shapes[name]) for name in names}
    sizes = [int(np.prod(shape, dtype=int)) for shape in shapes.values()]
    ends = np.cumsum(sizes)

    def constrain(position: Float[Array, " K"]) -> tuple[dict[str, Array], Float[Array, ""]]:
        values, log_jacobian = {}, jnp.zeros((), position.dtype)
        for (name, shape), size, end in zip(shapes.items(), sizes, ends, strict=True):
            real = position[end - size : end].reshape(shape)
            transform = biject_to(_as_dtype(supports[name], position.dtype))
            values[name] = transform(real)
            log_jacobian += jnp.sum(transform.log_abs_det_jacobian(real, values[name]))
        return values, log_jacobian

    def unconstrain(values: Mapping[str, Array]) -> Float[Array, " K"]:
        return jnp.concatenate([jnp.ravel(biject_to(supports[name]).inv(values[name])) for name in names])

    return OuterSpace(names, int(ends[-1]), constrain, unconstrain)


def _as_dtype(support: Any, dtype: Any) -> Any:
    # Bounds in double precision would promote a computation in single precision.
    return jax.tree.map(lambda bound: jnp.asarray(bound, dtype), support)


def box_of(
    model: RewardModel, space: OuterSpace, supports: Mapping[str, Any], largest: float
) -> dict[str, tuple[float, float]]:
    """Return the box of outer values that the proof covers: bounds of each site.

    Args:
        largest: one of `BOXES`: infinity for the whole support; in smaller boxes exponentials neither underflow nor overflow.
    """
    box, is_whole = {}, largest == np.inf
    for name in space.names:
        support = element_support(supports[name])
        low, high = (-np.inf, np.inf) if is_whole else (-_MAX_REAL, _MAX_REAL)
        if isinstance(support, type(constraints.simplex)):
            low, high = 0.0, 1.0
        elif isinstance(support, constraints.greater_than):
            least = np.asarray(support.lower_bound)
            small = 0.0 if is_whole else np.exp(-_MAX_LOG)
            low, high = float(least.min() + small), float(least.max() + largest)
        elif isinstance(support, constraints.interval) and not isinstance(support, type(constraints.circular)):
            low, high = float(np.min(support.lower_bound)), float(np.max(support.upper_bound))
        box[name] = (low, high)
    return box


def dependence(model: RewardModel, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return, for every log density of the program and for its expected reward, the latent sites that it may depend on.

    The dependence is derived from the jaxpr, so it holds for all values.
    """
    found: dict[str, Any] = {}

    def densities(latents: Mapping[str, Array], arm: Array, context: Any, outcomes: Mapping[str, Array]) -> list[Any]:
        trace = model.trace(latents, arm, context, outcomes)
        found.clear()
        for name, site in trace.items():
            if is_prior_term(name, site, model.outcomes) or name in model.outcomes:
                found[name] = log_prob(site)
        draws = {name: value[None] for name, value in latents.items()}
        found["expected_reward"] = model.expected_rewards(draws, jax.tree.map(lambda leaf: leaf[0], context))
        return list(found.values())

    def arguments() -> tuple[Any, ...]:
        latents = {name: jnp.zeros(shape) for name, shape in model.latent_shapes.items()}
        outcomes = model.zero_outcomes(1)
        return latents, jnp.zeros(1, int), model.context_rows(1), outcomes

    closed = jax.make_jaxpr(densities)(*jax.eval_shape(arguments))
    selected = set(names)
    labels = [frozenset({name} & selected) for name in sorted(model.latent_shapes)]  # in the order of a flattened dict
    labels += [frozenset()] * (len(closed.jaxpr.invars) - len(labels))
    reached = dependencies(closed, labels)
    return dict(zip(found, reached, strict=True))
