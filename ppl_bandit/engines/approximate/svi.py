"""Variational inference: a NumPyro autoguide, fitted again at every update from where the last fit ended."""

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

from ppl_bandit.engines.approximate.explanation import explain
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.particles.diagnostics import (
    MAX_K_HAT,
    MAX_MEAN_SHIFT,
    MAX_SD_SHIFT,
    moment_shifts,
    pareto_k_hat,
    weight_ess,
)
from ppl_bandit.engines.row_buffer import (
    Buffer,
    BufferedRows,
    append_rows,
    empty_buffer,
    has_room_for,
    read_buffer,
    reserve,
    row_mask,
)
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import program_lock
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

__all__ = ["SviInfo", "SviState", "svi"]

GUIDES: dict[str, type[AutoGuide]] = {"mvn": AutoMultivariateNormal, "normal": AutoNormal, "flow": AutoBNAFNormal}

_NUM_CHECKS = 1000  # draws of the guide that k-hat is read from
_NUM_GLANCES = 200  # draws that tell whether a guide fits nearly as well as before the new rows
_DECAY = 0.01  # last step size of a fit relative to its first
_TOUCH_UP = 0.2  # share of the steps, and of their size, for a guide that fits nearly as well as before the new rows
_ENOUGH = 0.6  # share of an effective sample that ends a fit,
_NEAR_ENOUGH = (
    0.1  # where no standard deviation is off by more than this: three standard errors of what 1,000 draws show
)
_MAX_ROUNDS = 5  # of a fit to rows that move the posterior far
_SITE = "position"


class SviState(NamedTuple):
    """The data, and the guide's parameters.

    Attributes:
        buffer: every row so far.
        params: of the guide, unconstrained.
        centre: the prior's median in unconstrained space; the guide lives on (position - centre) / scale.
        scale: half the width of the prior's central 68% there.
        ess: effective sample size of 1,000 draws of the guide, weighted to the posterior.
    """

    buffer: Buffer
    params: dict[str, Any]
    centre: Float[Array, " K"]
    scale: Float[Array, " K"]
    ess: Float[Array, ""]


class SviInfo(NamedTuple):
    """Evidence of an update.

    Attributes:
        is_trusted: whether k-hat and the shifts allow the guide and the rows were absorbed.
        k_hat: Pareto k-hat of the posterior's density relative to the guide's.
        mean_shift: largest error of a mean in posterior standard deviations, as importance weights show it.
        sd_shift: largest error of a standard deviation, relative to itself, as they show it.
        ess: effective sample size of 1,000 draws of the guide, weighted to the posterior.
        elbo: evidence lower bound, from these draws.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    k_hat: Float[Array, ""]
    mean_shift: Float[Array, ""]
    sd_shift: Float[Array, ""]
    ess: Float[Array, ""]
    elbo: Float[Array, ""]
    is_full: Bool[Array, ""]


class _Target(NamedTuple):
    data: BufferedRows
    centre: Float[Array, " K"]
    scale: Float[Array, " K"]


class _Round(NamedTuple):
    number: Int[Array, ""]
    params: dict[str, Any]
    positions: Float[Array, "M K"]
    log_weights: Float[Array, " M"]
    ess_before: Float[Array, ""]
    shift_before: Float[Array, ""]


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

    The guide lives on the unconstrained latents, in units of the prior, so that one step size suits most programs.

    Args:
        guide: "mvn" (a Gaussian with all correlations), "normal" (independent Gaussians), "flow" (a block neural
            autoregressive flow), or an autoguide class of NumPyro.
        num_steps: steps of Adam at an update; a fifth of them where the new rows cost the guide, as it is, less than a
            tenth of its effective sample size, and up to five times as many while these improve a poor fit.
        step_size: of the first of them; it decays to a hundredth of this.
        num_particles: draws of the guide that a step averages the evidence lower bound over.
        capacity: rows of data that the first state has room for.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.

    Raises:
        ValueError: where the guide does not fit the program, such as a flow on a single number.
    """
    check_settings(discount, num_steps=num_steps, num_particles=num_particles, capacity=capacity)
    space = unconstrained_space(model)
    make = _guide_class(guide, space.size)
    # The guide is set up here, eagerly, on a model of the same shape and no content: set up inside jit it would keep tracers.
    blank = _surrogate(space.size, lambda position, target: jnp.zeros(()))
    auto = make(blank, init_loc_fn=init_to_feasible)
    starter = SVI(blank, auto, Adam(step_size), Trace_ELBO())
    with program_lock():
        first_params = jax.device_get(starter.optim.get_params(starter.init(jr.key(0), None).optim_state))
    constrain_params = starter.constrain_fn
    objective = Trace_ELBO(num_particles=num_particles)

    def log_joint(position: Float[Array, " K"], target: _Target) -> Float[Array, ""]:
        return space.log_joint(target.centre + target.scale * position, target.data)

    surrogate = _surrogate(space.size, log_joint)

    def fit(key: Key, params: dict[str, Any], target: _Target, is_near: Bool[Array, ""]) -> dict[str, Any]:
        share = jnp.where(is_near, _TOUCH_UP, 1.0)
        total = jnp.ceil(share * num_steps)
        optimiser = Adam(lambda number: jnp.maximum(share * _DECAY ** (number / total), _DECAY) * step_size)

        def step(number: Array, carry: Any) -> Any:
            def loss(params: dict[str, Any]) -> tuple[Float[Array, ""], None]:
                key_loss = jr.fold_in(key, number)
                with program_lock():
                    return objective.loss(key_loss, constrain_params(params), surrogate, auto, target), None

            return optimiser.eval_and_stable_update(loss, carry)[1]

        end = jax.lax.fori_loop(0, total.astype(int), step, optimiser.init(params))
        return optimiser.get_params(end)

    def draw(key: Key, params: dict[str, Any]) -> tuple[Float[Array, " K"], Float[Array, ""]]:
        with program_lock():
            log_guide, trace = log_density(handlers.seed(auto, key), (None,), {}, constrain_params(params))
        return trace[_SITE]["value"], log_guide

    def weigh(
        key: Key, params: dict[str, Any], target: _Target, num_draws: int
    ) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
        """Return draws of the guide, and the log weights of the posterior relative to the guide."""
        positions, log_guide = jax.vmap(draw, (0, None))(jr.split(key, num_draws), params)
        return positions, jax.vmap(log_joint, (0, None))(positions, target) - log_guide

    def init(key: Key) -> SviState:
        key_prior, key_fit = jr.split(key)
        buffer = empty_buffer(model, capacity)
        prior, _ = space.draw_prior(key_prior, _NUM_CHECKS)
        low, centre, high = jnp.quantile(prior, jnp.array([0.16, 0.5, 0.84]), axis=0)  # a prior may have no variance
        scale = jnp.maximum((high - low) / 2, 1e-6)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), first_params)
        params = fit(key_fit, params, _Target(read_buffer(buffer), centre, scale), jnp.array(False))
        return SviState(
            buffer, params, centre, scale, jnp.asarray(jnp.inf, float)
        )  # the first fit to data is a full one

    def update(key: Key, state: SviState, interaction: Interaction) -> tuple[SviState, SviInfo]:
        key_fit, key_check = jr.split(key)
        has_room = has_room_for(state.buffer, interaction)
        buffer = append_rows(
            model, state.buffer, interaction._replace(mask=row_mask(interaction) & has_room), merges=discount == 1.0
        )
        target = _Target(read_buffer(buffer, discount), state.centre, state.scale)
        positions, log_weights = weigh(key_check, state.params, target, _NUM_GLANCES)
        ess, shift = weight_ess(log_weights), moment_shifts(positions, log_weights)[1]
        is_near = (ess / _NUM_GLANCES >= 0.9 * state.ess / _NUM_CHECKS) & (shift <= MAX_SD_SHIFT)
        # A batch can move the posterior further than one fit goes: Adam remembers the steep way there in its step sizes. A
        # guide that is still too wide has a low k-hat and a large effective sample size, and only its moments tell. So fit
        # again while that helps and either leaves room.
        zero = jnp.zeros(())
        none = jnp.zeros(_NUM_CHECKS)
        begin = _Round(
            jnp.zeros((), int), state.params, jnp.zeros((_NUM_CHECKS, space.size)), none, zero, zero + jnp.inf
        )

        def quality(last: _Round) -> tuple[Float[Array, ""], Float[Array, ""]]:
            return weight_ess(last.log_weights), moment_shifts(last.positions, last.log_weights)[1]

        def needs_more(last: _Round) -> Bool[Array, ""]:
            ess, shift = quality(last)
            is_wanting = ((ess < _ENOUGH * _NUM_CHECKS) & ~is_near) | (shift > MAX_SD_SHIFT)
            is_better = (ess > 1.1 * last.ess_before) | (shift < 0.9 * last.shift_before)
            return (last.number == 0) | (is_wanting & is_better & (last.number < _MAX_ROUNDS))

        def fit_once(last: _Round) -> _Round:
            params = fit(jr.fold_in(key_fit, last.number), last.params, target, is_near)
            is_first = last.number == 0
            ess, shift = quality(last)
            before = jnp.where(is_first, 0.0, ess), jnp.where(is_first, jnp.inf, shift)
            return _Round(last.number + 1, params, *weigh(key_check, params, target, _NUM_CHECKS), *before)

        _, params, positions, log_weights, *_ = jax.lax.while_loop(needs_more, fit_once, begin)
        k_hat, ess = pareto_k_hat(log_weights), weight_ess(log_weights)
        mean_shift, sd_shift = moment_shifts(positions, log_weights)
        is_trusted = (k_hat <= MAX_K_HAT) & (mean_shift <= MAX_MEAN_SHIFT) & (sd_shift <= MAX_SD_SHIFT) & has_room
        info = SviInfo(is_trusted, k_hat, mean_shift, sd_shift, ess, jnp.mean(log_weights), ~has_room)
        return state._replace(buffer=buffer, params=params, ess=ess), info

    def sample(key: Key, state: SviState, num_samples: int) -> Draws:
        positions, _ = jax.vmap(draw, (0, None))(jr.split(key, num_samples), state.params)
        return jax.vmap(space.constrain)(state.centre + state.scale * positions)

    name = getattr(make, "__name__", "the given guide")
    explanation = explain(
        model,
        "svi",
        f"draws come from {name}, fitted to the posterior by stochastic variational inference",
        f"{name} after mapping to the reals",
        discount,
        [
            "approximated: the form of the posterior, by the guide's; such fits tend to be too narrow",
            f"evidence: Pareto k-hat of the posterior relative to the guide, at most {MAX_K_HAT}, the largest error of a "
            f"mean, at most {MAX_MEAN_SHIFT} standard deviations, and of a standard deviation, at most {MAX_SD_SHIFT:.0%}",
        ],
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


def _guide_class(guide: Any, size: int) -> Callable[..., AutoGuide]:
    if isinstance(guide, str):
        if guide not in GUIDES:
            raise ValueError(f"guide must be one of {sorted(GUIDES)} or an autoguide class, got {guide!r}")
        guide = GUIDES[guide]
    if not callable(guide) or isinstance(guide, AutoGuide):
        raise ValueError(
            f"guide must be an autoguide class, not {type(guide).__name__}: it is built on the program here"
        )
    if size == 1 and guide is AutoBNAFNormal:
        raise ValueError('a flow needs two latent numbers or more, and the program has one: use guide="mvn"')
    return guide


def _surrogate(size: int, log_joint: Callable[[Any, Any], Float[Array, ""]]) -> Callable[[Any], None]:
    """Return a NumPyro model of one real vector with a given log density."""

    def body(target: Any) -> None:
        position = numpyro.sample(_SITE, dist.ImproperUniform(dist.constraints.real_vector, (), (size,)))
        with handlers.block():  # the program that runs inside has sites of its own, which are none of the guide's
            value = log_joint(position, target)
        numpyro.factor("log_joint", value)

    return body
