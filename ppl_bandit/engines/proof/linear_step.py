"""A linear Gaussian step, x_2 = F x_1 + b + noise with covariance Q: its proof, and its derivation from the program's step.

The latents of two steps in a row are one program, whose prior is examined. If the joint density of (x_1, x_2) and the density
of x_1 are Gaussian, then x_2 given x_1 is Gaussian, its mean is affine in x_1 and its covariance is fixed. So the proof and the
certificate of the exact engine apply as they are.

Time (`Clock`): every learnt row is one step, in the order in which rows are learnt. Without a clock a step takes one unit of
time. With a clock, `context["time"]`, it takes the time since the latest row so far; a row from before it is learnt at that
latest time.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpyro import handlers

from ppl_bandit.engines.inner.density import Coordinates, Posterior, latents_at
from ppl_bandit.engines.inner.gaussian import blocks_of, invert_blocks, padding
from ppl_bandit.engines.inner.layout import REAL, Layout
from ppl_bandit.engines.proof.analyticity import Gap, not_conjugate
from ppl_bandit.engines.proof.assignment import read_supports
from ppl_bandit.engines.proof.certificate import NO_RESIDUAL, Residual
from ppl_bandit.engines.proof.examination import read_prior
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once

PREFIX = "previous"

_TIMES = 10.0 ** np.arange(-15, 16)  # candidates for the shortest step, in any unit of time
_NEGLIGIBLE = 1e-8  # of the prior's variances; certificates of shorter steps are lost in rounding


class LinearStep(NamedTuple):
    """A step of the Gaussian blocks of a layout; a static element has a row of the identity, no offset and no noise.

    Attributes:
        matrix: F.
        offset: b.
        noise: Q.
    """

    matrix: Float[Array, "R S S"]
    offset: Float[Array, "R S"]
    noise: Float[Array, "R S S"]


def two_steps(model: RewardModel, elapsed: Array | float | None = None) -> RewardModel:
    """Return the model of two steps in a row: its latents are all those of the first and the moving ones of the second.

    Args:
        elapsed: time between the steps, which may be traced; None is the program's default.
    """
    static = [name for name in model.latent_shapes if name not in model.moving_sites]
    once = [*model.terms_beside_draws(), *static]

    def program(*rows: Any) -> None:
        outcomes = model.zero_outcomes(rows[0].shape[0])
        first = handlers.block(handlers.substitute(model.program, data=outcomes), hide=list(model.outcomes))
        with handlers.scope(prefix=PREFIX):
            trace = handlers.trace(first).get_trace(*rows)
        previous = {name: trace[f"{PREFIX}/{name}"]["value"] for name in model.latent_shapes}
        fixed = handlers.substitute(model.program, data={name: previous[name] for name in static})
        keywords = {} if elapsed is None else {"elapsed": elapsed}
        handlers.block(fixed, hide=once)(*rows, previous=previous, **keywords)

    both = {f"{PREFIX}/{name}": shape for name, shape in model.latent_shapes.items()}
    both |= {name: model.latent_shapes[name] for name in model.moving_sites}
    return model.replaced(program=program, latent_shapes=both, moving_sites=())


def joint_layout(model: RewardModel) -> Layout:
    """Return the layout of the latents of two steps: all reals in one block.

    Raises:
        NotConjugate: if a support belongs to no conjugate family.
    """
    return read_supports(two_steps(model))


def measure_step(model: RewardModel, layout: Layout, elapsed: Array | float | None = None) -> Residual:
    """Return how far the joint prior of two steps is from Gaussian; runs under `jit`.

    Args:
        layout: from `joint_layout`.
    """
    return read_prior(two_steps(model, elapsed), layout)[1]


def prove_step(model: RewardModel, layout: Layout) -> Gap | None:
    """Return where a step could deviate from a linear Gaussian one between the points of a certificate; None if it cannot.

    Args:
        layout: from `joint_layout`.
    """
    found: list[Gap | None] = []

    def prove(elapsed: Array | None) -> None:
        joint = two_steps(model, elapsed)
        found[:] = [not_conjugate(joint, layout, is_prior=True)]

    jax.eval_shape(prove, jnp.ones(()) if model.has_clock else None)
    return found[0]


def step_residual(model: RewardModel, layout: Layout | None, elapsed: Array) -> Residual:
    """Return how far a step that takes some time is from linear Gaussian; no time takes no step.

    Args:
        layout: from `joint_layout`; None without a clock, where the proof of the build covers the only step.
    """
    if layout is None:
        return Residual(*(jnp.full_like(elapsed, own) for own in NO_RESIDUAL))
    return measure_step(model, layout, jnp.where(elapsed > 0.0, elapsed, 1.0))


def derive_step(
    model: RewardModel,
    layout: Layout,
    elapsed: Array | float | None = None,
    fixed: Mapping[str, Array] = MappingProxyType({}),
) -> LinearStep:
    """Derive the step of a program whose step is linear Gaussian; what it returns for another program is meaningless.

    With H the second derivatives of log p(x_2 | x_1), the covariance is -inverse(H_22), and F = -inverse(H_22) H_21.

    Args:
        fixed: values of the static latents that are not in the layout.
    """
    num_real = layout.count(REAL)
    is_moving = np.zeros(num_real, bool)
    for site in layout.of(REAL):
        is_moving[site.span] = site.name in model.moving_sites
    (moving,) = np.nonzero(is_moving)

    def log_density(both: Float[Array, "2 D"]) -> Array:
        before, after = ({**fixed, **latents_at(layout, Coordinates({}, real))} for real in both)
        return model.log_transition(after, before, elapsed)

    origin = jnp.zeros((2, num_real))
    slope = jax.grad(log_density)(origin)[1, moving]
    curvature = jax.hessian(log_density)(origin)[1, moving]  # (moving, 2, D)
    noise = -jnp.linalg.inv(curvature[:, 1, moving])
    noise = 0.5 * (noise + noise.T)
    eye = jnp.eye(num_real)
    matrix = eye.at[moving].set(noise @ curvature[:, 0])
    offset = jnp.zeros(num_real).at[moving].set(noise @ slope)
    spread = jnp.zeros((num_real, num_real)).at[np.ix_(moving, moving)].set(noise)
    blank = padding(layout, spread.dtype)
    return LinearStep(_matrices(layout, matrix) + blank, blocks_of(layout, offset), _matrices(layout, spread))


def shortest_step(
    model: RewardModel, layout: Layout, prior: Posterior, fixed: Mapping[str, Array] = MappingProxyType({})
) -> float:
    """Return a time so short that the step changes nothing, up to rounding: the longest such power of ten, or 0.

    The density of such a step is nearly singular, or not finite. Rows that are no further apart are learnt at one time.

    Args:
        prior: the law at the first step, whose standard deviations are the unit of a change.
        fixed: as in `derive_step`.
    """

    def changes() -> Array:
        sd = jnp.sqrt(jnp.diagonal(invert_blocks(jnp.asarray(prior.precision)), axis1=-2, axis2=-1))

        def largest(elapsed: Array) -> Array:
            step = derive_step(model, layout, elapsed, fixed)
            moved = (step.matrix - jnp.eye(sd.shape[-1])) * sd[:, None, :] / sd[:, :, None]
            spread = step.noise / (sd[:, None, :] * sd[:, :, None])
            return jnp.max(jnp.stack([jnp.max(jnp.abs(own)) for own in (moved, step.offset / sd, spread)]))

        return jax.vmap(largest)(jnp.asarray(_TIMES))

    found = np.asarray(run_once(changes))
    is_short = ~np.isfinite(found) | (found < _NEGLIGIBLE)
    num_short = len(found) if is_short.all() else int(np.argmin(is_short))
    (short,) = np.nonzero(np.isfinite(found[:num_short]))
    return float(_TIMES[short[-1]]) if short.size else 0.0


def predict(step: LinearStep, posterior: Posterior) -> Posterior:
    """Return the law of the latents one step later."""
    matrix, offset, noise = (jnp.asarray(leaf, posterior.mean.dtype) for leaf in step)
    covariance = invert_blocks(posterior.precision)
    if matrix.shape[-1] == 1:
        later = matrix * covariance * matrix + noise
        return posterior._replace(mean=matrix[..., 0] * posterior.mean + offset, precision=1.0 / later)
    later = matrix @ covariance @ jnp.swapaxes(matrix, -1, -2) + noise
    mean = jnp.einsum("rst,rt->rs", matrix, posterior.mean) + offset
    return posterior._replace(mean=mean, precision=invert_blocks(0.5 * (later + jnp.swapaxes(later, -1, -2))))


def _matrices(layout: Layout, dense: Float[Array, "D D"]) -> Any:
    """Return the blocks of a matrix over all reals, with 0 as padding."""
    found = dense[layout.members[:, :, None], layout.members[:, None, :]]
    return jnp.where(layout.is_pair, found, 0.0)


class Clock(NamedTuple):
    """The time of a state.

    Attributes:
        time: that of the latest row so far; 0 without a clock.
        is_due: whether the latents must take a step before they are read again: true once a row was learnt.
    """

    time: Float[Array, ""]
    is_due: Bool[Array, ""]

    def after_row(self) -> "Clock":
        """Return the clock once a row of this time was learnt."""
        return self._replace(is_due=jnp.ones_like(self.is_due))


def first_clock() -> Clock:
    """Return the clock before the first row."""
    return Clock(jnp.zeros(()), jnp.array(False))


def elapsed_until(
    model: RewardModel, clock: Clock, context: Any, shortest: float = 0.0
) -> tuple[Float[Array, ""], Clock]:
    """Return the time from a state to a decision or a row, 0 for no step, and the clock then.

    Args:
        context: of the decision or row; None reads the next step, and with a clock the latest time.
        shortest: up to this time, a clock stands still; a later step takes that time too.
    """
    if not model.has_clock:
        return jnp.where(clock.is_due, 1.0, 0.0), clock._replace(is_due=jnp.zeros_like(clock.is_due))
    given = clock.time if context is None else jnp.asarray(context["time"], clock.time.dtype)
    time = jnp.where(clock.is_due & (given - clock.time <= shortest), clock.time, given)
    return jnp.where(clock.is_due, time - clock.time, 0.0), Clock(time, jnp.zeros_like(clock.is_due))


def time_text(model: RewardModel) -> str:
    """Return how time passes in a program, for an explanation."""
    step = 'context["time"] is the time of a step' if model.has_clock else "every learnt reward is one step"
    return f"{step}; a decision predicts to its own time, then reads the table"


def require_moving(model: RewardModel, engine: str) -> None:
    """Check that a latent of a program moves.

    Raises:
        ValueError: if none does.
    """
    if not model.moving_sites:
        raise ValueError(
            f"{engine} is for programs whose latents move, and this one does not take the keyword `previous`: use "
            "engines.choose"
        )
