"""`collapsed_kalman`: programs that move and are linear Gaussian given a few static sites.

A particle is a value of these outer latents with the Kalman filter of the others given it (Rao-Blackwellised). The predictive
density of each row weights the particles. After a resampling, Metropolis-Hastings moves of the outer latents run the filter
again over the rows of a window (`window`). Each row is expanded about the mean of the latents when it was learnt: about a
distant origin, the squares of rewards of a million would lose the digits of a noise of 1.

The proof, for every value of the outer latents, is that of the collapsed engine, on the program of two steps in a row: given
the outer latents, the latents of both steps and the likelihood are Gaussian.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.checks import check_settings, checks_text
from ppl_bandit.engines.explanation import explain, residual_text
from ppl_bandit.engines.inner.density import (
    Coordinates,
    Natural,
    Posterior,
    absorb,
    coordinates_at,
    generic_point,
    latents_at,
    log_mass,
    posterior_of,
    relative_to,
)
from ppl_bandit.engines.inner.gaussian import invert_blocks, reals_of
from ppl_bandit.engines.inner.layout import REAL
from ppl_bandit.engines.inner.reading import derive
from ppl_bandit.engines.proof.assignment import kind_of_support, read_supports, split_gaussian_blocks, supports_of
from ppl_bandit.engines.proof.certificate import excess_of
from ppl_bandit.engines.proof.inspection import Split, inspect
from ppl_bandit.engines.proof.linear_step import (
    PREFIX,
    LinearStep,
    derive_step,
    joint_layout,
    predict,
    require_moving,
    shortest_step,
    step_residual,
    time_text,
    two_steps,
)
from ppl_bandit.engines.proof.outer import given, outer_space
from ppl_bandit.engines.refusals import refusal
from ppl_bandit.engines.updates.exact import certify_row
from ppl_bandit.engines.updates.filters import NUM_FILTERS, FilterParts, Weighed, filter_engine
from ppl_bandit.engines.updates.window import Window, empty_window, log_base, move_each
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Draws, Engine, Explanation, Interaction, Key, NotConjugate

_MAX_OUTER_DIMS = 6  # of particles that moves replay
_MAX_TRIES = 4  # sets of outer latents that are inspected, at some seconds each


def split_program(model: RewardModel, outer: tuple[str, ...] | None) -> Split:
    """Return the split of a program at `outer`, or at the smallest set of static latents that works; runs in float64.

    Raises:
        NotConjugate: if there is none.
        ValueError: if `outer` does not name static latents.
    """
    static = [name for name in model.latent_shapes if name not in model.moving_sites]
    if outer is not None and (not outer or not set(outer) <= set(static)):
        raise ValueError(f"outer must name some of the static latents {static}, got {list(outer)}")
    if not static:
        raise _refused(model, "all latents move, so there is no static latent for particles", [])
    supports = supports_of(model)
    kinds = {name: None if support is None else kind_of_support(support) for name, support in supports.items()}
    bent = [name for name in model.moving_sites if kinds[name] != REAL]
    if bent:
        raise _refused(model, f"'{bent[0]}' moves and is not real", [])
    joint = two_steps(model)
    joint_supports, tried = supports_of(joint), list[str]()
    for names in [tuple(outer)] if outer is not None else itertools.islice(_candidates(model, kinds), _MAX_TRIES):
        try:
            split = inspect(joint, tuple(f"{PREFIX}/{name}" for name in names), joint_supports)
        except NotConjugate as refused:
            tried.append(f"given {', '.join(names)}: {refused}")
            continue
        if any(site.kind != REAL for site in split.layout.sites):
            tried.append(f"given {', '.join(names)}: other latents are not Gaussian")
            continue
        return _split_of_one_step(model, names, supports, split)
    raise _refused(model, "no few static latents leave the rest linear Gaussian", tried)


def _candidates(model: RewardModel, kinds: dict[str, str | None]) -> Iterator[tuple[str, ...]]:
    """Yield sets of static latents: those that are not real, then with one, two, ... real ones."""
    static = [name for name in model.latent_shapes if name not in model.moving_sites]
    always = [name for name in static if kinds[name] != REAL]
    real = [name for name in static if kinds[name] == REAL]
    for count in range(len(real) + 1):
        for more in itertools.combinations(real, count):
            names = tuple(name for name in static if name in (*always, *more))
            size = sum(int(np.prod(model.latent_shapes[name], dtype=int)) for name in names)
            if names and size <= _MAX_OUTER_DIMS:
                yield names


def _split_of_one_step(model: RewardModel, names: tuple[str, ...], supports: dict[str, Any], joint: Split) -> Split:
    """Return the split of a program, given that of two steps in a row."""
    box, values = {name: joint.box[f"{PREFIX}/{name}"] for name in names}, _first(joint)
    view = given(model, values)
    layout = split_gaussian_blocks(view, read_supports(view))
    space, centre = outer_space(model, names, supports), generic_point(layout)
    split = joint._replace(space=space, layout=layout, centre=centre, box=box)
    prior = run_once(lambda: _Given(model, split).first_law(space.unconstrain(values))[0])
    return split._replace(prior=prior, centre=jax.device_get(coordinates_at(layout, prior)))


def _first(split: Split) -> dict[str, Any]:
    """Return the first outer values that were tried, with the names of one step."""
    return {name.removeprefix(f"{PREFIX}/"): value[0] for name, value in split.values.items()}


def _refused(model: RewardModel, reason: str, tried: list[str]) -> NotConjugate:
    details = "; ".join(tried)
    return refusal(
        model, f"has no Kalman filters over particles: {reason}", "engines.particle_filter needs no proof", details
    )


def explain_split(model: RewardModel, split: Split, num_own: int, window: int) -> Explanation:
    """Explain a program that is linear Gaussian given its outer latents."""
    outer, inner = ", ".join(split.space.names), ", ".join(site.name for site in split.layout.sites)
    sites = {site.name: f"Gaussian, given {outer}" for site in split.layout.sites}
    sites |= {name: f"{2 * num_own} weighted particles" for name in split.space.names}
    facts = {
        "time": time_text(model),
        "proved": f"for every value of {outer}, the step and the likelihood are real-analytic in {inner}",
        "certified": f"two steps in a row and the likelihood are Gaussian at random values of {outer};\n"
        f"    largest residual {residual_text(split.evidence)}; every new datum is certified at two particles",
        "approximated": f"{outer}, by 2 independent sets of {num_own} particles; Markov steps after a resampling replay the "
        f"last rows\n    (at most {window}) from the filters at the start of the window",
        "checks": checks_text(("ess", "k_hat", "law_disagreement")),
    }
    reason = f"exact given {outer}: {inner} by Kalman filters, {outer} represented by {2 * num_own} particles"
    verdict = f"EXACT GIVEN {outer}: {inner} by a Kalman filter at each particle."
    ordered = {name: sites[name] for name in model.latent_shapes}
    return explain(model, "collapsed_kalman", verdict, reason, ordered, facts)


_SCALES = (1.5, 0.7)  # of the proposals of the moves, in standard deviations, divided by sqrt(K)


class KalmanParticles(NamedTuple):
    """Values of the outer latents, with the filter of the others given them.

    Attributes:
        positions: of the outer latents, in unconstrained space.
        laws: of the other latents at the last step.
        steps: of the other latents; None if a step depends on the time elapsed.
    """

    positions: Float[Array, "2 H K"]
    laws: Posterior
    steps: LinearStep | None


class _Given(NamedTuple):
    """A program split into outer latents and the others, which are linear Gaussian given them; `at` is a position (K,)."""

    model: RewardModel
    split: Split

    def view(self, at: Float[Array, " K"]) -> RewardModel:
        """Return the model of the other latents."""
        return given(self.model, self.split.space.constrain(at)[0])

    def first_law(self, at: Float[Array, " K"]) -> tuple[Posterior, Float[Array, ""]]:
        """Return the law of the other latents at the first step, and the log prior density of the position."""
        layout, view = self.split.layout, self.view(at)
        centre = jax.tree.map(lambda leaf: jnp.asarray(leaf, at.dtype), self.split.centre)
        law = posterior_of(
            layout, derive(layout, lambda point: view.log_prior(latents_at(layout, point)), centre), centre
        )
        return law, log_mass(layout, law) + self.split.space.constrain(at)[1]

    def step(self, at: Float[Array, " K"], elapsed: Array | None = None) -> LinearStep:
        """Return the step of the other latents."""
        return derive_step(self.model, self.split.layout, elapsed, self.split.space.constrain(at)[0])

    def predict(self, at: Array, step: LinearStep | None, law: Posterior, elapsed: Float[Array, ""]) -> Posterior:
        """Return a law after a step that takes the time, or the same law if it is 0."""
        taken = self.step(at, jnp.where(elapsed > 0.0, elapsed, 1.0)) if step is None else step
        return jax.tree.map(lambda new, old: jnp.where(elapsed > 0.0, new, old), predict(taken, law), law)

    def form(self, at: Float[Array, " K"], row: Interaction, centre: Float[Array, " D"]) -> Natural:
        """Return the log likelihood of a row as a quadratic form about a centre."""
        layout, view, single = self.split.layout, self.view(at), jax.tree.map(lambda leaf: leaf[None], row)
        point = Coordinates({}, centre)
        return derive(layout, lambda point: view.log_likelihood(latents_at(layout, point), single)[0], point)

    def absorb(self, law: Posterior, form: Natural, centre: Float[Array, " D"]) -> tuple[Posterior, Float[Array, ""]]:
        """Return the law after a row, and the log density of the row."""
        layout = self.split.layout
        own = relative_to(layout, form, Coordinates({}, centre), coordinates_at(layout, law))
        after = absorb(layout, law, own, 1)
        return after, log_mass(layout, after) - log_mass(layout, law)

    def excess(self, at: Float[Array, " K"], law: Posterior, row: Interaction) -> Float[Array, ""]:
        """Return how close the certificate of a row comes to failing: at most 1 if it is certified."""
        _, found = certify_row(self.view(at), self.split.layout, law, row)
        excess = excess_of(found.residuals)[0]
        return jnp.where(found.is_held & ~jnp.isnan(excess), excess, jnp.inf)

    def replay(
        self, window: Window, mean: Array, root: Array, base: Posterior, at: Float[Array, " K"]
    ) -> tuple[Float[Array, ""], tuple[Posterior, LinearStep | None]]:
        """Return the log density of a position over a window, its filter after the rows, and its step without a clock.

        Args:
            mean, root, base: of the set of particles and of the particle, at the start of a later window.
        """
        forms = jax.vmap(lambda row, centre: self.form(at, row, centre))(window.rows, window.places)
        step = None if self.model.has_clock else self.step(at)
        law, log_prior = self.first_law(at)
        law = jax.tree.map(lambda new, old: jnp.where(window.is_first, new, old), law, base)

        def absorb_place(carry: tuple[Posterior, Array], place: Any) -> tuple[tuple[Posterior, Array], None]:
            law, total = carry
            form, centre, elapsed, is_read = place
            after, log_density = self.absorb(self.predict(at, step, law, elapsed), form, centre)
            kept = jax.tree.map(lambda new, old: jnp.where(is_read, new, old), after, law)
            return (kept, total + jnp.where(is_read, log_density, 0.0)), None

        start = law, log_base(window, mean, root, at, log_prior)
        places = forms, window.places, window.elapsed, window.is_read
        (law, total), _ = jax.lax.scan(absorb_place, start, places)
        return total, (law, step)

    def draw(self, key: Key, at: Float[Array, " K"], law: Posterior) -> dict[str, Array]:
        """Draw all latents of a particle."""
        layout, covariance = self.split.layout, invert_blocks(law.precision)
        noise = jr.normal(key, law.mean.shape, law.mean.dtype)
        if covariance.shape[-1] == 1:
            steps = jnp.sqrt(covariance[..., 0]) * noise
        else:
            steps = jnp.einsum("rst,rt->rs", jnp.linalg.cholesky(covariance), noise)
        inner = latents_at(layout, Coordinates({}, reals_of(layout, law.mean + steps)))
        return {**inner, **self.split.space.constrain(at)[0]}


def collapsed_kalman(
    model: RewardModel, outer: tuple[str, ...] | None = None, *, num_particles: int = 1000, window: int = 200
) -> Engine:
    """Return Kalman filters over particles of a few static latents, or refuse.

    A batch with a row that is not linear Gaussian given the outer latents is not learnt.

    Args:
        outer: static latents given which the program is linear Gaussian; None finds the smallest set.
        num_particles: of both sets together.
        window: rows that a move of the outer latents replays at most.

    Raises:
        NotConjugate: if the program is not linear Gaussian given a few static latents, or not provably so.
        ValueError: if no latent moves, or a setting is invalid.
    """
    require_moving(model, "collapsed_kalman")
    check_settings(1.0, num_particles=num_particles, window=window)
    num_own = -(-num_particles // NUM_FILTERS)
    with jax.enable_x64(True):
        split = split_program(model, outer)
        values = _first(split)
        shortest = shortest_step(model, split.layout, split.prior, values) if model.has_clock else 0.0
        of_step = given(model, values)  # any outer values: the density of a step is proved analytic in them
        joint = joint_layout(of_step) if model.has_clock else None
    own, layout, space = _Given(model, split), split.layout, split.space

    def start(key: Key) -> tuple[KalmanParticles, Window]:
        drawn = model.sample_prior(key, NUM_FILTERS * num_own)
        positions = jax.vmap(space.unconstrain)({name: drawn[name] for name in space.names})
        positions = positions.reshape(NUM_FILTERS, num_own, space.size)
        laws, _ = _each(own.first_law)(positions)
        steps = None if model.has_clock else _each(own.step)(positions)
        centre = jnp.zeros(split.centre.real.shape, positions.dtype)
        return KalmanParticles(positions, laws, steps), empty_window(model, window, centre, laws, positions)

    def predict_all(key: Key, particles: KalmanParticles, elapsed: Float[Array, ""]) -> KalmanParticles:
        del key  # a prediction is not random
        positions, laws, steps = particles
        later = _each(lambda at, step, law: own.predict(at, step, law, elapsed))(positions, steps, laws)
        return particles._replace(laws=later)

    def weigh(
        particles: KalmanParticles, weights: Float[Array, "2 H"], row: Interaction, elapsed: Float[Array, ""]
    ) -> Weighed:
        positions, laws, _ = particles
        row = row._replace(mask=None)
        centre = reals_of(layout, jnp.einsum("fh,fhrs->rs", weights, laws.mean) / NUM_FILTERS)
        after, log_densities = _each(lambda at, law: own.absorb(law, own.form(at, row, centre), centre))(
            positions, laws
        )
        # The proof holds for every value of the outer latents; the certificate is evaluated at two.
        first_of_each = jax.tree.map(lambda leaf: leaf[:, 0], (positions, laws))
        excess = jnp.max(jax.vmap(lambda at, law: own.excess(at, law, row))(*first_of_each))
        excess = jnp.maximum(excess, excess_of(step_residual(of_step, joint, elapsed)))
        variances = jnp.diagonal(invert_blocks(after.precision), axis1=-2, axis2=-1)
        means = jnp.concatenate([positions, after.mean.reshape(*weights.shape, -1)], axis=-1)
        within = jnp.concatenate([jnp.zeros_like(positions), variances.reshape(*weights.shape, -1)], axis=-1)
        return Weighed(particles._replace(laws=after), log_densities, means, within, excess, centre)

    def move(key: Key, window: Window, particles: KalmanParticles) -> KalmanParticles:
        positions, laws, steps = particles

        def target(fixed: Any, proposed: Float[Array, "H K"]) -> tuple[Float[Array, " H"], Any]:
            mean, root, bases = fixed
            return jax.vmap(lambda base, at: own.replay(window, mean, root, base, at))(bases, proposed)

        fixed = window.mean, window.root, window.base
        positions, (laws, steps) = move_each(key, target, fixed, positions, (laws, steps), _SCALES)
        return KalmanParticles(positions, laws, steps)

    def draw(key: Key, particles: KalmanParticles) -> Draws:
        keys = jr.split(key, len(particles.positions))
        return jax.vmap(own.draw)(keys, particles.positions, particles.laws)

    def known(particles: KalmanParticles) -> tuple[Posterior, Float[Array, "2 H K"]]:
        return particles.laws, particles.positions

    parts = FilterParts(start, predict_all, weigh, known, move, draw, "certificate", "law_disagreement", shortest)
    explanation = explain_split(model, split, num_own, window)
    return filter_engine(model, parts, explanation, num_particles=num_particles, window=window)


def _each(function: Callable) -> Callable:
    """Return a function of one particle as a function of (2, H) particles."""
    return jax.vmap(jax.vmap(function))
