"""Closed-form marginals of the exact posterior.

The exact engine's state has the parameters of all families in a few arrays; `Capabilities.parameters` arranges them by site.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import element_support
from ppl_bandit.types import Engine


class ClosedFormMarginal(NamedTuple):
    """The marginal law of every element of a site, in closed form.

    Attributes:
        law: a frozen SciPy distribution whose parameters have the site's shape.
        mean: infinite or nan if the law has no mean.
        sd: infinite if the law has no variance.
    """

    law: Any
    mean: np.ndarray
    sd: np.ndarray


def exact_marginals(model: RewardModel, engine: Engine, state: Any) -> dict[str, ClosedFormMarginal]:
    """Return the marginal law of every latent of an exact engine, {site: ClosedFormMarginal}.

    Beta on its interval; Beta for each share of a Dirichlet; a power of a Gamma; Gaussian, or Student-t where a latent
    precision u ~ Gamma(a, b) scales the reals: 2 a degrees of freedom, and the squared scale is their covariance times
    precision, times b / a.
    """
    find, bounds = engine.capabilities.parameters, support_bounds(model)
    assert find is not None  # the engine is exact
    known = find(state)
    return {name: _law(known[name], jax.device_get(state), bounds[name]) for name in model.latent_shapes}


def _law(values: Mapping[str, Any], state: Any, bounds: tuple[Any, Any]) -> ClosedFormMarginal:
    from scipy import stats

    (low, high), names = bounds, values.keys()  # the names of the parameters tell the family
    if "concentration1" in names:
        law = stats.beta(values["concentration1"], values["concentration0"], loc=low, scale=high - low)
        return ClosedFormMarginal(law, law.mean(), law.std())
    if "concentration" in names and "rate" not in names:
        share = values["concentration"]
        law = stats.beta(share, share.sum(axis=-1, keepdims=True) - share)
        return ClosedFormMarginal(law, law.mean(), law.std())
    if "rate" in names:
        a, power = values["concentration"], values["power"]
        law = stats.gengamma(a, power, loc=low, scale=values["rate"] ** (-1.0 / power))
        with np.errstate(all="ignore"):  # a power of a Gamma has the moments n for which a + n / power is positive
            mean = np.where(a + 1.0 / power > 0, law.mean(), np.inf)
            return ClosedFormMarginal(law, mean, np.where(a + 2.0 / power > 0, law.std(), np.inf))
    mean = values["mean"]
    owner = np.asarray(values.get("scaled_by", np.full(mean.shape, -1)))
    is_scaled = owner >= 0
    spread = np.asarray(values.get("covariance", values.get("covariance_times_precision")))
    variance, degrees = np.diagonal(spread).reshape(mean.shape), np.full(mean.shape, np.inf)
    if is_scaled.any():
        shape, rate = np.moveaxis(state.elements["positive"][owner], -1, 0)
        degrees = np.where(is_scaled, 2.0 * shape, np.inf)
        variance = variance * np.where(is_scaled, rate / shape, 1.0)
    law = stats.t(degrees, loc=mean, scale=np.sqrt(variance))
    with np.errstate(all="ignore"):
        ratio = np.where(np.isinf(degrees), 1.0, np.where(degrees > 2, degrees / (degrees - 2.0), np.inf))
    return ClosedFormMarginal(law, np.where(degrees > 1, mean, np.nan), np.sqrt(variance * ratio))


def support_bounds(model: RewardModel) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the bounds of each latent site's support, infinite if it is unbounded."""

    def read() -> dict[str, tuple[Any, Any]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 3)
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        return {name: _bounds_of(trace[name]["fn"].support, shape) for name, shape in model.latent_shapes.items()}

    return run_once(read)


def _bounds_of(support: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    support = element_support(support)
    is_simplex = isinstance(support, type(constraints.simplex))
    low = getattr(support, "lower_bound", 0.0 if is_simplex else -jnp.inf)
    high = getattr(support, "upper_bound", 1.0 if is_simplex else jnp.inf)
    return jnp.broadcast_to(jnp.asarray(low, float), shape), jnp.broadcast_to(jnp.asarray(high, float), shape)
