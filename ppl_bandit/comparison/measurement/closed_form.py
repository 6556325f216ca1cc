"""Closed-form marginals of the exact posterior, and the log evidence.

The exact engine's state has the parameters of all families in a few arrays; `Capabilities.parameters` arranges them by site.
To find the state entry of each latent element, the entries are numbered and arranged by the same function.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import element_support
from ppl_bandit.types import Engine, Interaction

__all__ = ["ClosedFormMarginal", "exact_log_evidence", "exact_marginals", "support_bounds"]


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
    known, bounds = _parameters(engine, state), support_bounds(model)
    return {name: _law(known[name], jax.device_get(state), bounds[name]) for name in model.latent_shapes}


def _law(values: Mapping[str, Any], state: Any, bounds: tuple[Any, Any]) -> ClosedFormMarginal:
    from scipy import stats

    kind, (low, high) = _kind(values), bounds
    if kind == "unit":
        law = stats.beta(values["concentration1"], values["concentration0"], loc=low, scale=high - low)
        return ClosedFormMarginal(law, law.mean(), law.std())
    if kind == "simplex":
        share = values["concentration"]
        law = stats.beta(share, share.sum(axis=-1, keepdims=True) - share)
        return ClosedFormMarginal(law, law.mean(), law.std())
    if kind == "positive":
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


def exact_log_evidence(
    model: RewardModel,
    engine: Engine,
    prior: Any,
    posterior: Any,
    data: Interaction,
    points: Sequence[Mapping[str, Any]],
) -> np.ndarray:
    """Return the log evidence log p(data) of an exact engine, once per point; the values differ by rounding only.

    Bayes' theorem at any latents z: log p(data) = log likelihood(z) + log prior(z) - log posterior(z). Prior and posterior
    are normalised in the same family, so that the Jacobian between z and the family's coordinates cancels.

    Args:
        prior: the engine's state before the data.
        posterior: the state after the data.
        points: latents at which to evaluate the identity, such as posterior draws.
    """
    known, entries, bounds = _parameters(engine, posterior), _entries(engine, posterior), support_bounds(model)
    before, after = jax.device_get((prior, posterior))
    stacked = {name: np.stack([np.asarray(point[name]) for point in points]) for name in model.latent_shapes}
    log_likelihoods = run_once(
        lambda: jax.vmap(lambda z: jnp.sum(model.log_likelihood(z, data)))(jax.tree.map(jnp.asarray, stacked))
    )
    changes = []
    for point in points:
        coordinates = _to_family_coordinates(point, known, entries, bounds, after)
        changes.append(_log_density(before, coordinates) - _log_density(after, coordinates))
    return log_likelihoods + np.array(changes)


class _FamilyCoordinates(NamedTuple):
    """Latents in the coordinates of the families: by group of elements, reals by block, and the u of each block."""

    elements: dict[str, np.ndarray]
    reals: np.ndarray
    u_of_block: np.ndarray


def _to_family_coordinates(
    point: Mapping[str, Any], known: Any, entries: Any, bounds: Any, state: Any
) -> _FamilyCoordinates:
    elements = {
        group: np.zeros(rows.shape if group.startswith("simplex") else len(rows))
        for group, rows in state.elements.items()
    }
    reals, owner = np.zeros(state.mean.size), np.full(state.mean.shape[0], -1)
    for name, entry in entries.items():
        value, (low, high), kind = np.asarray(point[name], float), bounds[name], _kind(known[name])
        if kind == "unit":
            elements[kind][entry] = (value - low) / (high - low)
        elif kind == "positive":
            elements[kind][entry] = (value - low) ** known[name]["power"]
        elif kind == "simplex":
            elements[f"simplex {value.shape[-1]}"][entry[..., 0]] = value
        else:
            reals[entry] = value
            owner[entry // state.mean.shape[1]] = known[name].get("scaled_by", -1)
    u_of_block = np.append(elements.get("positive", np.zeros(0)), 1.0)[owner]
    return _FamilyCoordinates(elements, reals.reshape(state.mean.shape), u_of_block)


def _log_density(state: Any, coordinates: _FamilyCoordinates) -> float:
    from scipy import stats

    total = 0.0
    for group, values in coordinates.elements.items():
        parameters = state.elements[group]
        if group == "unit":
            total += stats.beta.logpdf(values, *parameters.T).sum()
        elif group == "positive":
            total += stats.gamma.logpdf(values, parameters[:, 0], scale=1.0 / parameters[:, 1]).sum()
        else:
            rows = zip(parameters, values, strict=True)
            total += sum(stats.dirichlet.logpdf(p / p.sum(), concentration) for concentration, p in rows)
    for x, u, mean, precision in zip(
        coordinates.reals, coordinates.u_of_block, state.mean, state.precision, strict=True
    ):
        total += _log_normal(x, mean, u * precision)  # padding cancels in the difference
    return total


def _log_normal(x: np.ndarray, mean: np.ndarray, precision: np.ndarray) -> float:
    gap = x - mean
    return 0.5 * (np.linalg.slogdet(precision)[1] - gap @ precision @ gap - x.size * np.log(2.0 * np.pi))


def _parameters(engine: Engine, state: Any) -> dict[str, dict[str, Any]]:
    if engine.capabilities.parameters is None:
        raise ValueError(f"the {engine.explanation.engine} engine has no closed form")
    return engine.capabilities.parameters(state)


def _kind(values: Mapping[str, Any]) -> str:
    """Return a site's kind of family, by the names of its parameters."""
    if "concentration1" in values:
        return "unit"
    if "rate" in values:
        return "positive"
    return "simplex" if "concentration" in values else "real"


def _entries(engine: Engine, state: Any) -> dict[str, np.ndarray]:
    """Return, arranged by site, the number of each element's entry in the state; reals are counted along (R, S)."""
    host = jax.device_get(state)
    elements = {
        group: np.broadcast_to(np.arange(len(rows))[:, None], rows.shape) for group, rows in host.elements.items()
    }
    numbers = host._replace(elements=elements, mean=np.arange(host.mean.size).reshape(host.mean.shape))
    name_of = {"unit": "concentration1", "simplex": "concentration", "positive": "concentration", "real": "mean"}
    return {
        site: np.asarray(values[name_of[_kind(values)]]).astype(int)
        for site, values in _parameters(engine, numbers).items()
    }


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
