"""Engines that fit a density once to all rows: `svi` and `laplace`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, init_to_feasible
from numpyro.infer.autoguide import AutoBNAFNormal, AutoGuide, AutoMultivariateNormal, AutoNormal
from numpyro.infer.util import log_density
from numpyro.optim import Adam

from ppl_bandit.engines.checks import Info, check_settings, checks_text, make_info, refuse_moving
from ppl_bandit.engines.explanation import explain_approximate
from ppl_bandit.engines.particles.blocks import block_posterior, one_block
from ppl_bandit.engines.particles.diagnostics import (
    MAX_SD_SHIFT,
    moment_shifts,
    pareto_k_hat,
)
from ppl_bandit.engines.particles.log_density import LogDensity, find_mode
from ppl_bandit.engines.particles.space import Space, unconstrained_space
from ppl_bandit.engines.particles.weights import weight_ess
from ppl_bandit.engines.rows import (
    Buffer,
    BufferedRows,
    append_rows,
    empty_buffer,
    read_buffer,
    reserve,
    rows_that_fit,
)
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import program_lock
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

NUM_CHECK_DRAWS = (
    1000  # their Monte Carlo errors, 0.03 of a mean and 2% of a standard deviation, are a fifth of the bounds
)
FIT_CHECKS_TEXT = checks_text(("k_hat", "mean_shift", "sd_shift"))


class FitMeasures(NamedTuple):
    """Measures of a fit.

    Attributes:
        k_hat: Pareto k-hat of the posterior density relative to the fitted one.
        mean_shift: largest error of a mean in posterior standard deviations, estimated by importance weights.
        sd_shift: largest relative error of a standard deviation, estimated likewise.
        ess: effective sample size of the weighted draws.
    """

    k_hat: Float[Array, ""]
    mean_shift: Float[Array, ""]
    sd_shift: Float[Array, ""]
    ess: Float[Array, ""]

    def as_info(self, has_room: Bool[Array, ""], **checks: Any) -> Info:
        """Return the measures of an update.

        Args:
            checks: further checks, by name.
        """
        own = {"k_hat": self.k_hat, "mean_shift": self.mean_shift, "sd_shift": self.sd_shift, "capacity": has_room}
        return make_info({**own, **checks}, permanent=["capacity"], is_full=~has_room, ess=self.ess)


def measure_fit(positions: Float[Array, "M K"], log_weights: Float[Array, " M"]) -> FitMeasures:
    """Measure a fit by its draws and their log weights to the posterior."""
    return FitMeasures(pareto_k_hat(log_weights), *moment_shifts(positions, log_weights), weight_ess(log_weights))


GUIDES: dict[str, type[AutoGuide]] = {"mvn": AutoMultivariateNormal, "normal": AutoNormal, "flow": AutoBNAFNormal}

_NUM_FIRST_DRAWS = 200  # draws that decide whether the guide still fits after the new rows
_DECAY = 0.01  # last step size of a fit relative to its first
_TOUCH_UP = 0.2  # share of the steps, and of their size, if the guide still fits
_ENOUGH_ESS = 0.6  # effective sample size, as a share of the draws, that needs no further fit
_MAX_FITS = 5  # the sum of the steps of fits whose effective sample size still grows by a tenth, as documented
_SITE = "position"


class SviState(NamedTuple):
    """The data, and the guide's parameters.

    Attributes:
        buffer: all rows so far.
        params: of the guide, unconstrained.
        centre: the prior's median in unconstrained space; the guide is a law of (position - centre) / scale.
        scale: half the width of the prior's central 68% there.
        ess: effective sample size of 1,000 draws of the guide, weighted to the posterior.
    """

    buffer: Buffer
    params: dict[str, Any]
    centre: Float[Array, " K"]
    scale: Float[Array, " K"]
    ess: Float[Array, ""]


class _ScaledData(NamedTuple):
    """The rows, and the location and scale of the guide's coordinates."""

    data: BufferedRows
    centre: Float[Array, " K"]
    scale: Float[Array, " K"]


class _GuideFit(NamedTuple):
    """The guide after some fits, its weighted draws, and the measures of the fit before."""

    number: Int[Array, ""]
    params: dict[str, Any]
    positions: Float[Array, "M K"]
    log_weights: Float[Array, " M"]
    measures: FitMeasures
    previous: FitMeasures


class _Guide(NamedTuple):
    """A guide as pure functions of its parameters.

    Attributes:
        first_params: unconstrained parameters of the unfitted guide.
        fit: (key, params, data, is_near) -> params; fewer and smaller steps if the guide is near the posterior.
        draw: (key, params) -> a position, and its log density under the guide.
        weighted_draws: (key, params, data, M) -> positions, and log weights of the posterior relative to the guide.
    """

    first_params: dict[str, Any]
    fit: Callable[[Key, dict[str, Any], _ScaledData, Bool[Array, ""]], dict[str, Any]]
    draw: Callable[[Key, dict[str, Any]], tuple[Float[Array, " K"], Float[Array, ""]]]
    weighted_draws: Callable[..., tuple[Float[Array, "M K"], Float[Array, " M"]]]


def svi(
    model: RewardModel,
    *,
    guide: str | type[AutoGuide] | Callable[..., AutoGuide] = "mvn",
    num_steps: int = 500,
    step_size: float = 0.05,
    num_particles: int = 8,
    capacity: int = 64,
    discount: float = 1.0,
) -> Engine:
    """Return the engine that fits a guide to the posterior at every update.

    The guide is a law of the unconstrained latents in units of the prior, so that one step size suits most programs.

    Args:
        guide: "mvn" (a Gaussian with all correlations), "normal" (independent Gaussians), "flow" (a block neural
            autoregressive flow), or an autoguide class of NumPyro.
        num_steps: steps of Adam at an update; a fifth of them if the new rows cost the guide less than a tenth of its
            effective sample size, and up to five times as many while these improve a poor fit.
        step_size: of the first step; it decays to a hundredth of this.
        num_particles: draws of the guide over which a step averages the evidence lower bound.
        capacity: rows of data that the first state has room for.
        discount: weight of a row's log likelihood relative to the next row's; 1 discounts nothing.

    Raises:
        ValueError: if the guide does not fit the program, such as a flow on a single number.
    """
    check_settings(discount, num_steps=num_steps, num_particles=num_particles, capacity=capacity)
    refuse_moving(model, "svi")
    space = unconstrained_space(model)
    guide_class = _guide_class(guide, space.size)
    fitted = _make_guide(space, guide_class, num_steps, step_size, num_particles)

    def init(key: Key) -> SviState:
        key_prior, key_fit = jr.split(key)
        buffer = empty_buffer(model, capacity)
        prior, _ = space.draw_prior(key_prior, NUM_CHECK_DRAWS)
        low, centre, high = jnp.quantile(prior, jnp.array([0.16, 0.5, 0.84]), axis=0)  # a prior may have no variance
        scale = jnp.maximum((high - low) / 2, 1e-6)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), fitted.first_params)
        params = fitted.fit(key_fit, params, _ScaledData(read_buffer(buffer), centre, scale), jnp.array(False))
        ess = jnp.asarray(jnp.inf, float)  # so that the first fit to data has all steps
        return SviState(buffer, params, centre, scale, ess)

    def update(key: Key, state: SviState, interaction: Interaction) -> tuple[SviState, Info]:
        key_fit, key_check = jr.split(key)
        rows, has_room = rows_that_fit(state.buffer, interaction)
        buffer = append_rows(model, state.buffer, rows, merges=discount == 1.0)
        data = _ScaledData(read_buffer(buffer, discount), state.centre, state.scale)

        positions, log_weights = fitted.weighted_draws(key_check, state.params, data, _NUM_FIRST_DRAWS)
        ess_share = weight_ess(log_weights) / _NUM_FIRST_DRAWS
        _, sd_shift = moment_shifts(positions, log_weights)
        is_near = (ess_share >= 0.9 * state.ess / NUM_CHECK_DRAWS) & (sd_shift <= MAX_SD_SHIFT)

        def fit_again(last: _GuideFit) -> _GuideFit:
            params = fitted.fit(jr.fold_in(key_fit, last.number), last.params, data, is_near)
            drawn = fitted.weighted_draws(key_check, params, data, NUM_CHECK_DRAWS)
            return _GuideFit(last.number + 1, params, *drawn, measure_fit(*drawn), last.measures)

        def needs_more(last: _GuideFit) -> Bool[Array, ""]:
            # Adam's step sizes still reflect the gradients of a far start, so that one fit to a large batch may not
            # converge. A guide that is too wide has a low k-hat and a large effective sample size; only its moments show it.
            measures, before = last.measures, last.previous
            is_poor = ((measures.ess < _ENOUGH_ESS * NUM_CHECK_DRAWS) & ~is_near) | (measures.sd_shift > MAX_SD_SHIFT)
            is_improving = (measures.ess > 1.1 * before.ess) | (measures.sd_shift < 0.9 * before.sd_shift)
            return (last.number == 0) | (is_poor & is_improving & (last.number < _MAX_FITS))

        zero, far = jnp.zeros(()), jnp.full((), jnp.inf)
        unfitted = FitMeasures(k_hat=far, mean_shift=far, sd_shift=far, ess=zero)
        nothing = jnp.zeros((NUM_CHECK_DRAWS, space.size)), jnp.zeros(NUM_CHECK_DRAWS)
        start = _GuideFit(jnp.zeros((), int), state.params, *nothing, unfitted, unfitted)
        end = jax.lax.while_loop(needs_more, fit_again, start)
        return state._replace(buffer=buffer, params=end.params, ess=end.measures.ess), end.measures.as_info(has_room)

    def sample(key: Key, state: SviState, num_samples: int) -> Draws:
        positions, _ = jax.vmap(fitted.draw, (0, None))(jr.split(key, num_samples), state.params)
        return jax.vmap(space.constrain)(state.centre + state.scale * positions)

    name = getattr(guide_class, "__name__", "the given guide")
    explanation = explain_approximate(
        model,
        "svi",
        f"draws come from {name}, fitted to the posterior by stochastic variational inference",
        f"{name} after mapping to the reals",
        discount,
        {
            "approximated": "the form of the posterior, by that of the guide; such fits tend to be too narrow",
            "checks": f"{FIT_CHECKS_TEXT}",
        },
    )
    settings = {
        "guide": guide,
        "num_steps": num_steps,
        "step_size": step_size,
        "num_particles": num_particles,
        "capacity": capacity,
        "discount": discount,
    }
    return Engine(init, update, sample, explanation, settings, Capabilities(reserve=reserve))


def _make_guide(
    space: Space, guide_class: Callable[..., AutoGuide], num_steps: int, step_size: float, num_particles: int
) -> _Guide:
    # Initialised eagerly, on a model of the same shape without content: inside jit an autoguide would cache tracers.
    blank = _surrogate(space.size, lambda position, data: jnp.zeros(()))
    guide = guide_class(blank, init_loc_fn=init_to_feasible)
    starter = SVI(blank, guide, Adam(step_size), Trace_ELBO())
    with program_lock():
        first_params = jax.device_get(starter.optim.get_params(starter.init(jr.key(0), None).optim_state))
    objective = Trace_ELBO(num_particles=num_particles)

    def log_joint(position: Float[Array, " K"], data: _ScaledData) -> Float[Array, ""]:
        return space.log_joint(data.centre + data.scale * position, data.data)

    surrogate = _surrogate(space.size, log_joint)

    def fit(key: Key, params: dict[str, Any], data: _ScaledData, is_near: Bool[Array, ""]) -> dict[str, Any]:
        share = jnp.where(is_near, _TOUCH_UP, 1.0)
        total = jnp.ceil(share * num_steps)
        optimiser = Adam(lambda number: jnp.maximum(share * _DECAY ** (number / total), _DECAY) * step_size)

        def step(number: Array, carry: Any) -> Any:
            def loss(params: dict[str, Any]) -> tuple[Float[Array, ""], None]:
                key_loss = jr.fold_in(key, number)
                with program_lock():
                    return objective.loss(key_loss, starter.constrain_fn(params), surrogate, guide, data), None

            return optimiser.eval_and_stable_update(loss, carry)[1]

        return optimiser.get_params(jax.lax.fori_loop(0, total.astype(int), step, optimiser.init(params)))

    def draw(key: Key, params: dict[str, Any]) -> tuple[Float[Array, " K"], Float[Array, ""]]:
        with program_lock():
            log_guide, trace = log_density(handlers.seed(guide, key), (None,), {}, starter.constrain_fn(params))
        return trace[_SITE]["value"], log_guide

    def weighted_draws(
        key: Key, params: dict[str, Any], data: _ScaledData, num_draws: int
    ) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
        positions, log_guide = jax.vmap(draw, (0, None))(jr.split(key, num_draws), params)
        return positions, jax.vmap(log_joint, (0, None))(positions, data) - log_guide

    return _Guide(first_params, fit, draw, weighted_draws)


def _guide_class(guide: Any, size: int) -> Callable[..., AutoGuide]:
    if isinstance(guide, str):
        if guide not in GUIDES:
            raise ValueError(f"guide must be one of {sorted(GUIDES)} or an autoguide class, got {guide!r}")
        guide = GUIDES[guide]
    if not callable(guide) or isinstance(guide, AutoGuide):
        raise ValueError(
            f"guide must be an autoguide class, got an object of type {type(guide).__name__}; pass its class"
        )
    if size == 1 and guide is AutoBNAFNormal:
        raise ValueError('a flow needs at least two latent numbers, and the program has one; use guide="mvn"')
    return guide


def _surrogate(size: int, log_joint: Callable[[Any, Any], Float[Array, ""]]) -> Callable[[Any], None]:
    """Return a NumPyro model of one real vector with a given log density."""

    def body(data: Any) -> None:
        position = numpyro.sample(_SITE, dist.ImproperUniform(dist.constraints.real_vector, (), (size,)))
        with handlers.block():  # hide the sites of the program from the guide
            value = log_joint(position, data)
        numpyro.factor("log_joint", value)

    return body


class LaplaceState(NamedTuple):
    """The data, and the Gaussian at the mode: position = mode + root @ noise."""

    buffer: Buffer
    mode: Float[Array, " K"]
    root: Float[Array, "K K"]


def laplace(model: RewardModel, *, capacity: int = 64, discount: float = 1.0) -> Engine:
    """Return the engine that approximates the posterior by a Gaussian at its mode, in unconstrained space.

    It is fast, and correct in the limit of many rows; before that, skewness and tails are lost. k-hat measures the loss.

    Args:
        capacity: rows of data that the first state has room for.
        discount: weight of a row's log likelihood relative to the next row's; 1 discounts nothing.
    """
    check_settings(discount, capacity=capacity)
    refuse_moving(model, "laplace")
    space = unconstrained_space(model)
    blocks = one_block(model, space)

    def posterior_of(buffer: Buffer) -> LogDensity:
        return block_posterior(space, blocks, 0, buffer, jnp.zeros(space.size), discount)

    def init(key: Key) -> LaplaceState:
        del key  # the mode of the prior is not random
        buffer = empty_buffer(model, capacity)
        mode = find_mode(posterior_of(buffer), jnp.zeros(space.size))
        return LaplaceState(buffer, mode.position, mode.root)

    def update(key: Key, state: LaplaceState, interaction: Interaction) -> tuple[LaplaceState, Info]:
        rows, has_room = rows_that_fit(state.buffer, interaction)
        buffer = append_rows(model, state.buffer, rows, merges=discount == 1.0)
        target = posterior_of(buffer)
        mode = find_mode(target, state.mode)
        noise = jr.normal(key, (NUM_CHECK_DRAWS, space.size))
        positions = mode.position + noise @ mode.root.T
        log_weights = sum(jax.vmap(target.parts)(positions)) + 0.5 * jnp.sum(jnp.square(noise), axis=1)
        measures = measure_fit(positions, log_weights)
        return LaplaceState(buffer, mode.position, mode.root), measures.as_info(has_room, mode=mode.is_converged)

    def sample(key: Key, state: LaplaceState, num_samples: int) -> Draws:
        noise = jr.normal(key, (num_samples, space.size))
        return jax.vmap(space.constrain)(state.mode + noise @ state.root.T)

    explanation = explain_approximate(
        model,
        "laplace",
        "draws come from a Gaussian at the posterior's mode, in unconstrained space",
        "Gaussian after mapping to the reals",
        discount,
        {
            "approximated": "the form of the posterior; skewness and heavy tails are lost, and all modes but one",
            "checks": f"convergence, {FIT_CHECKS_TEXT}",
        },
    )
    settings = {"capacity": capacity, "discount": discount}
    capabilities = Capabilities(reserve=reserve)
    return Engine(init, update, sample, explanation, settings, capabilities)
