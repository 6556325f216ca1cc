"""Proof that a step is linear Gaussian: the latents of two steps in a row are one program, whose prior is examined.

If the joint density of (x_1, x_2) and the density of x_1 are Gaussian, then x_2 given x_1 is Gaussian, its mean is affine in
x_1 and its covariance is fixed. So the proof and the certificate of the exact engine apply as they are.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool
from numpyro import handlers

from ppl_bandit.engines.exact.certificate.certificate import Residual, is_affine
from ppl_bandit.engines.exact.families.layout import Layout
from ppl_bandit.engines.exact.proof.analyticity import Gap, not_conjugate
from ppl_bandit.engines.exact.proof.assignment import read_supports
from ppl_bandit.engines.exact.proof.examination import read_prior
from ppl_bandit.program.model.reward_model import RewardModel

__all__ = ["PREFIX", "is_linear_step", "joint_layout", "measure_step", "prove_step", "two_steps"]

PREFIX = "previous"


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

    view = copy.copy(model)
    view.program = program
    before = {f"{PREFIX}/{name}": shape for name, shape in model.latent_shapes.items()}
    view.latent_shapes = {**before, **{name: model.latent_shapes[name] for name in model.moving_sites}}
    view.moving_sites = ()
    return view


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
    arm, context = jnp.zeros(1, int), jax.tree.map(jnp.asarray, model.context_rows(1))
    found: list[Gap | None] = []

    def prove(elapsed: Array | None) -> None:
        joint = two_steps(model, elapsed)
        found[:] = [not_conjugate(joint, layout, arm, context, model.zero_outcomes(1), is_prior=True)]

    jax.eval_shape(prove, jnp.ones(()) if model.has_clock else None)
    return found[0]


def is_linear_step(model: RewardModel, layout: Layout, elapsed: Array) -> Bool[Array, ""]:
    """Return whether a step that takes some time is certified linear Gaussian; true for no time, because no step is taken.

    Args:
        layout: from `joint_layout`.
    """
    return is_affine(measure_step(model, layout, jnp.where(elapsed > 0.0, elapsed, 1.0)))
