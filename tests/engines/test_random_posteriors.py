"""Programs drawn at random with one latent, whose posterior is known by quadrature: draws are right, or flagged.

Each shape of program is compiled once; its constants - noise from a tenth to a millionth of the prior, weights of
mixtures, bounded terms - are parts of the context. Draws that are trusted must have the distribution function that quadrature
gives, and the table must hold the expected reward of each draw. A standard deviation would be no measure here: a mode with a
millionth of the mass, a million of the main mode's widths away, determines it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats as st

from ppl_bandit import engines
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_ROWS = 12
# Modes below 2% of the mass may be missed. 1,000 draws with an effective size of 250 or more are within 1.95 / sqrt(250) of the
# distribution function in 999 of 1,000 cases (Kolmogorov).
MAX_DISTANCE = 0.02 + 1.95 / np.sqrt(250)


class Shape(NamedTuple):
    """A family of programs.

    Attributes:
        program: of arm and constants, with a latent `m`.
        draw: rng -> constants, and rewards (NUM_ROWS,).
        log_density: (m, constants, rewards) -> log posterior up to a constant, in NumPy.
        expected: (m, constants) -> expected reward.
    """

    program: Callable[[Any, Any], None]
    draw: Callable[[np.random.Generator], tuple[dict[str, float], np.ndarray]]
    log_density: Callable[..., np.ndarray]
    expected: Callable[..., np.ndarray]


def decades(rng, low, high):
    return float(10.0 ** rng.uniform(low, high))


def prior():
    return numpyro.sample("m", dist.Normal(0.0, 1.0))


def narrow_noise(rng):
    return {"noise": decades(rng, -6, -1)}


def in_mixture(is_heavy):
    """Narrow noise, or with some probability wide noise about 0; with Student-t tails if it is heavy."""

    def program(arm, context):
        m = prior() + 0.0 * arm
        loc = jnp.stack([m, jnp.zeros_like(m)], axis=-1)
        scale = jnp.stack([context["noise"], jnp.ones_like(m)], axis=-1)
        parts = dist.StudentT(3.0, loc, scale) if is_heavy else dist.Normal(loc, scale)
        weights = jnp.stack([1.0 - context["wild"], context["wild"]], axis=-1)
        numpyro.sample("reward", dist.MixtureSameFamily(dist.Categorical(weights), parts))

    def draw(rng):
        constants = {**narrow_noise(rng), "wild": float(rng.choice([0.02, 0.1, 0.3]))}
        truths = rng.normal(size=rng.choice([1, 1, 2]))  # sometimes rows that disagree
        noise = rng.standard_t(3, NUM_ROWS) if is_heavy else rng.normal(size=NUM_ROWS)
        rewards = rng.choice(truths, NUM_ROWS) + constants["noise"] * noise
        is_wild = rng.uniform(size=NUM_ROWS) < constants["wild"]
        return constants, np.where(is_wild, rng.normal(size=NUM_ROWS), rewards)

    def log_density(m, c, rewards):
        law = st.t(3) if is_heavy else st.norm()
        total = st.norm.logpdf(m)
        for y in rewards:
            near = np.log1p(-c["wild"]) + law.logpdf((y - m) / c["noise"]) - np.log(c["noise"])
            total = total + np.logaddexp(near, np.log(c["wild"]) + law.logpdf(y))
        return total

    return Shape(program, draw, log_density, lambda m, c: (1.0 - c["wild"]) * m)


def bounded():
    """A bounded term in the mean of a Normal likelihood."""

    def program(arm, context):
        m = prior() + 0.0 * arm
        x = (m - context["place"]) / context["width"]
        numpyro.deterministic("expected_reward", m)
        numpyro.sample("reward", dist.Normal(m + context["height"] / (1.0 + x**8), context["noise"]))

    def draw(rng):
        noise = decades(rng, -2, 1)
        bump = {"place": rng.normal(), "width": decades(rng, -1, 0.5), "height": noise * rng.uniform(-3.0, 3.0)}
        return {"noise": noise, **bump}, rng.normal() + noise * rng.normal(size=NUM_ROWS)

    def log_density(m, c, rewards):
        mean = m + c["height"] / (1.0 + ((m - c["place"]) / c["width"]) ** 8)
        return st.norm.logpdf(m) + sum(st.norm.logpdf(y, mean, c["noise"]) for y in rewards)

    return Shape(program, draw, log_density, lambda m, c: m)


def folded():
    """An outcome without a formula for its mean, and a likelihood with two modes, down to a millionth of the prior."""

    def program(arm, context):
        m = prior() + 0.0 * arm
        numpyro.sample("reward", dist.FoldedDistribution(dist.Normal(m, context["noise"])))

    def draw(rng):
        constants = narrow_noise(rng)
        return constants, np.abs(rng.normal() + constants["noise"] * rng.normal(size=NUM_ROWS))

    def log_density(m, c, rewards):
        total = st.norm.logpdf(m)
        for y in rewards:
            total = total + np.logaddexp(st.norm.logpdf(y, m, c["noise"]), st.norm.logpdf(-y, m, c["noise"]))
        return total

    return Shape(program, draw, log_density, lambda m, c: st.foldnorm(np.abs(m) / c["noise"], scale=c["noise"]).mean())


SHAPES = {
    "narrow": in_mixture(is_heavy=False),
    "narrow and heavy-tailed": in_mixture(is_heavy=True),
    "bounded": bounded(),
    "folded": folded(),
}


def quadrature(shape, constants, rewards):
    """Return a grid that is fine at the prior and at every reward, and the distribution function of the posterior there."""
    noise = constants["noise"]
    centres = np.concatenate([rewards, -rewards, [np.mean(rewards)]])
    fine = [centre + noise * np.linspace(-12.0, 12.0, 1201) for centre in centres]
    grid = np.unique(np.concatenate([np.linspace(-8.0, 8.0, 16001), *fine]))
    log_density = shape.log_density(grid, constants, rewards)
    mass = np.exp(log_density - log_density.max()) * np.gradient(grid)
    return grid, np.cumsum(mass) / mass.sum()


def examine_many(name, num_programs, seed):
    """Return how many programs were flagged, and a description of each that was trusted and wrong."""
    shape, rng = SHAPES[name], np.random.default_rng(seed)
    flagged, wrong = 0, []
    with jax.enable_x64(True):
        example = {key: np.array(1.0) if key != "wild" else np.array(0.1) for key in shape.draw(rng)[0]}
        model = RewardModel(shape.program, 1, context=example)
        engine = engines.reweight(model, capacity=16)

        @jax.jit
        def run(key, rows):
            key_init, key_update, key_sample = jr.split(key, 3)
            state, info = engine.update(key_update, engine.init(key_init), rows)
            draws = engine.sample(key_sample, state, 1000)
            context = jax.tree.map(lambda leaf: leaf[0], rows.context)
            return draws["m"], model.expected_rewards(draws, context)[:, 0], info.is_trusted

        for number in range(num_programs):
            constants, rewards = shape.draw(rng)
            context = {key: jnp.full(NUM_ROWS, value) for key, value in constants.items()}
            rows = Interaction(jnp.zeros(NUM_ROWS, int), jnp.asarray(rewards), context)
            m, table, is_trusted = jax.device_get(run(jr.key(number), rows))
            if not is_trusted:
                flagged += 1
                continue
            ranks = np.interp(np.sort(m), *quadrature(shape, constants, rewards))
            distance = np.max(np.abs(ranks - (np.arange(m.size) + 0.5) / m.size))
            expected = shape.expected(m, constants)
            table_gap = np.max(np.abs(table - expected)) / expected.std()
            if distance > MAX_DISTANCE or table_gap > 0.05:
                wrong.append(f"{name} {number}: off by {distance:.2g}, {table_gap:.2g}; {constants}, {rewards}")
    return flagged, wrong


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(3))
@pytest.mark.parametrize("name", list(SHAPES))
def test_random_posteriors_are_right_or_flagged(name, shard):
    num_programs = 2000 // (3 * len(SHAPES)) + 1
    flagged, wrong = examine_many(name, num_programs, seed=shard)
    print(f"\n{name} {shard}: {num_programs} programs, {flagged} flagged, {len(wrong)} wrong")
    assert not wrong, wrong
    assert flagged <= 0.2 * num_programs
