"""Learn from a block of simulated rows, given how often each arm was played.

Rows of one block are exchangeable, so that counts of plays describe them. Where the posterior depends on the outcomes through
their number, sum and sum of squares per arm (any conjugate program whose natural parameters are a polynomial of the outcome, of
degree at most two), a block is one update, and the sums are drawn from their own law where it is known. Otherwise rows are
drawn, and the engine's own update learns from them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.decide import decision_function
from ppl_bandit.numerics import sampling
from ppl_bandit.numerics.counts import binomial
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import outside_trace
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import initial_state
from ppl_bandit.trials.arm_posterior import ArmPosterior, arm_posterior
from ppl_bandit.trials.design import Design
from ppl_bandit.types import Engine, Interaction, Key, Selection

__all__ = ["BlockOutcomes", "Learner", "Setting", "learner_of", "make_setting", "sums_of_outcomes"]

Sums = Callable[[Key, Float[Array, " A"]], tuple[Array, Array | None]]

_NUM_TRIED = 64  # outcomes from the prior predictive, of which some serve as nodes of the polynomial
_NUM_CHECKED = 6
_RTOL = 1e-7


class BlockOutcomes(NamedTuple):
    """What was learned from a block.

    Attributes:
        state: the engine's state.
        sums: (A,), the sum of each arm's rewards; of the first outcome, if there are several.
        is_trusted: whether the engine trusts its update.
    """

    state: Any
    sums: Float[Array, " A"]
    is_trusted: Bool[Array, ""]


class Learner(NamedTuple):
    """An engine that learns from blocks.

    Attributes:
        init: key -> state, with capacity for all rows of an experiment.
        learn: (key, state, world, counts (A,), most rows) -> `BlockOutcomes`; the last argument is static.
        method: how a block is learned from, in words.
        uses_sums: whether a block is one update, whatever its number of rows.
    """

    init: Callable[[Key], Any]
    learn: Callable[[Key, Any, Environment, Float[Array, " A"], int], BlockOutcomes]
    method: str
    uses_sums: bool


class Setting(NamedTuple):
    """What all simulated trials of a design have in common.

    Attributes:
        control: index of the first control; -1 without one.
        num_samples: posterior draws M, where a probability has no closed form.
    """

    model: RewardModel
    engine: Engine
    learner: Learner
    design: Design
    control: int
    num_samples: int

    def __reduce__(self) -> Any:
        """Describe the setting by what it was made of: learners hold functions of the engine."""
        return make_setting, (self.model, self.engine, self.design, self.control, self.num_samples)

    def posterior(self, key: Key, state: Any, deltas: Sequence[float] = ()) -> ArmPosterior:
        """Return the posterior of the arms' expected rewards; the arguments are those of `arm_posterior`."""
        return arm_posterior(key, self.model, self.engine, state, self.model.context, self.num_samples, deltas)

    def allocation(
        self, key: Key, state: Any, active: Bool[Array, " A"], best_arm_probs: Float[Array, " A"], num_rows: Any
    ) -> Float[Array, " A"]:
        """Return the selector's probabilities of the arms until the next look.

        Args:
            active: the arms that are left.
            best_arm_probs: P(a is best among these), as the look has computed it.
            num_rows: decisions so far.
        """
        selector, context, marginals_of = self.design.selector, self.model.context, self.engine.capabilities.marginals
        key_draw, key_select = jr.split(key)
        step = jnp.asarray(num_rows + 1)
        marginals = None if marginals_of is None else marginals_of(state, context)
        if selector.select_from_probs is not None and (
            not selector.required_marginals or (marginals is not None and selector.can_skip_table(marginals))
        ):
            chosen = selector.select_from_probs(key_select, best_arm_probs, step, allowed=active, marginals=marginals)
        else:
            chosen = self.decision_function()(key_draw, key_select, state, context, step, active)
        probs = jnp.where(active, chosen.propensities, 0.0)
        return probs / jnp.sum(probs)

    def decision_function(self) -> Callable[..., Selection]:
        """Return the function that decides with the selector of the design; see `engines.decide`."""
        return decision_function(self.model.expected_rewards, self.engine, self.design.selector, self.num_samples)


def make_setting(model: RewardModel, engine: Engine, design: Design, control: int, num_samples: int) -> Setting:
    """Return the setting of a design, with the learner of its engine."""
    return Setting(model, engine, learner_of(model, engine, design.last_rows), design, control, num_samples)


def learner_of(model: RewardModel, engine: Engine, num_rows: int) -> Learner:
    """Return the learner of an engine.

    Args:
        num_rows: most rows of an experiment.
    """
    found = _tabulated(model, engine)
    if found is None:
        init = lambda key: initial_state(key, engine, num_rows)  # noqa: E731
        return Learner(init, _learn_rows(model, engine), "row by row", False)
    values, add = found
    to_weights = np.linalg.inv(np.vander(values, increasing=True).T)  # (1, y, y^2) sums -> weights of the nodes

    def learn(key: Key, state: Any, world: Environment, counts: Array, most: int) -> BlockOutcomes:
        arms, rows = jnp.arange(model.num_arms), model.context_rows(model.num_arms)
        assert world.truth is not None
        zeros = model.zero_outcomes(arms.shape[0])
        truth = {name: jnp.asarray(value) for name, value in world.truth.items()}
        draw = sums_of_outcomes(model.trace(truth, arms, rows, zeros)[model.outcomes[0]]["fn"])
        sums, squares = (None, None) if draw is None else draw(key, counts)
        if sums is None or (len(values) == 3 and squares is None):
            sums, squares = _sums_by_arm(model, _draw_rows(key, world, counts, most), counts)
        powers = [counts, sums] if squares is None or len(values) == 2 else [counts, sums, squares]
        weights = jnp.asarray(to_weights, counts.dtype) @ jnp.stack(powers)  # (nodes, A)
        return BlockOutcomes(add(state, weights.T.ravel(), jnp.sum(counts).astype(int)), sums, jnp.asarray(True))

    return Learner(engine.init, learn, "one update per block, from sums of outcomes", True)


def _tabulated(model: RewardModel, engine: Engine) -> tuple[np.ndarray, Callable[..., Any]] | None:
    """Return the nodes and the update with tabulated rows; None unless the update is a polynomial of the outcome.

    Of degree one through two nodes, else of degree two through three, checked at further outcomes.
    """
    tabulate = engine.capabilities.tabulate_rows
    if tabulate is None or model.context is not None or len(model.outcomes) > 1:
        return None
    with outside_trace(), jax.enable_x64(True):

        def draw() -> Array:
            key_prior, key_rows = jr.split(jr.key(20))
            latents = model.sample_prior(key_prior, _NUM_TRIED)
            arms = jnp.arange(_NUM_TRIED) % model.num_arms
            keys = jr.split(key_rows, _NUM_TRIED)
            return jax.vmap(lambda key, own, arm: jnp.asarray(model.draw_reward(key, own, arm)))(keys, latents, arms)

        tried = np.unique(np.asarray(run_once(draw), float))
        tried = tried[np.isfinite(tried)]
        if tried.size < 2:
            return None
        chosen = np.unique(np.quantile(tried, np.linspace(0.1, 0.9, 3 + _NUM_CHECKED), method="nearest"))
        if chosen.size < 2:
            chosen = tried[[0, -1]]
        for degree in (1, 2):
            if chosen.size <= degree:
                break
            nodes = chosen[np.linspace(0, chosen.size - 1, degree + 1).round().astype(int)]
            others = np.setdiff1d(chosen, nodes)
            add = tabulate(_each_arm(model, nodes))
            if add is None:
                return None
            direct = tabulate(_each_arm(model, others)) if others.size else None
            if others.size and direct is None:
                return None
            if direct is None or _agree(model, engine, nodes, add, others, direct):
                return nodes, add
    return None


def _each_arm(model: RewardModel, values: np.ndarray) -> Interaction:
    """Return one row per arm and value, the arms in order."""
    arms = np.repeat(np.arange(model.num_arms), values.size)
    return Interaction(jnp.asarray(arms), jnp.asarray(np.tile(values, model.num_arms)))


def _agree(model: RewardModel, engine: Engine, nodes: np.ndarray, add: Any, others: np.ndarray, direct: Any) -> bool:
    """Return whether adding other outcomes equals adding the weighted nodes, for every arm."""
    powers = np.vander(others, nodes.size, increasing=True).T  # (nodes, others)
    weights = np.linalg.solve(np.vander(nodes, increasing=True).T, powers)

    def compare() -> list[Array]:
        state = engine.init(jr.key(0))
        gaps = []
        for place in range(others.size):
            once = jnp.tile(jnp.asarray(np.eye(others.size)[place]), model.num_arms)
            mixed = jnp.tile(jnp.asarray(weights[:, place]), model.num_arms)
            pairs = zip(jax.tree.leaves(direct(state, once, 1)), jax.tree.leaves(add(state, mixed, 1)), strict=True)
            gaps += [jnp.max(jnp.abs(a - b) / (1.0 + jnp.abs(a)), initial=0.0) for a, b in pairs]
        return gaps

    return bool(np.all(np.asarray(run_once(compare)) < _RTOL))


def sums_of_outcomes(law: Any) -> Sums | None:
    """Return (key, numbers of outcomes (A,)) -> sum and sum of squares of each arm's outcomes; None for another family.

    They are drawn at once from their own law: n Bernoulli outcomes add up to a Binomial number, n Poisson outcomes to a Poisson
    number, n Normal outcomes to a Normal number with an independent chi-squared sum of squares.

    The sum of squares is None where the family needs none: its likelihood depends on the sum alone.

    Args:
        law: a NumPyro distribution with one entry per arm.
    """
    while isinstance(law, dist.ExpandedDistribution):
        law = law.base_dist
    if isinstance(law, dist.BernoulliProbs | dist.BernoulliLogits):
        probs = law.mean
        return lambda key, num: (binomial(key, num, jnp.broadcast_to(probs, num.shape)), None)
    if isinstance(law, dist.BinomialProbs | dist.BinomialLogits):
        each, probs = law.total_count, law.mean / law.total_count
        return lambda key, num: (binomial(key, num * each, jnp.broadcast_to(probs, num.shape)), None)
    if isinstance(law, dist.Poisson):
        return lambda key, num: (jr.poisson(key, num * law.rate).astype(num.dtype), None)
    if isinstance(law, dist.Exponential):
        return lambda key, num: (_gamma(key, num) / law.rate, None)
    if isinstance(law, dist.Gamma):
        return lambda key, num: (_gamma(key, num * law.concentration) / law.rate, None)
    if isinstance(law, dist.Normal):
        return lambda key, num: _normal_sums(key, num, law.loc, law.scale)
    return None


def _gamma(key: Key, shape: Float[Array, " A"]) -> Float[Array, " A"]:
    """Draw Gamma variables; 0 for shape 0."""
    return jnp.where(shape > 0, jnp.exp(sampling.log_gamma(key, jnp.where(shape > 0, shape, 1.0))), 0.0)


def _normal_sums(key: Key, num: Float[Array, " A"], mean: Any, sd: Any) -> tuple[Array, Array]:
    key_mean, key_squares = jr.split(key)
    total = num * mean + jnp.sqrt(num) * sd * jr.normal(key_mean, num.shape, num.dtype)
    around = 2.0 * sd**2 * _gamma(key_squares, jnp.maximum(0.5 * (num - 1.0), 0.0))
    return total, around + total**2 / jnp.maximum(num, 1.0)


def _learn_rows(model: RewardModel, engine: Engine) -> Callable[..., BlockOutcomes]:
    def learn(key: Key, state: Any, world: Environment, counts: Array, most: int) -> BlockOutcomes:
        key_rows, key_update = jr.split(key)
        rows = _draw_rows(key_rows, world, counts, most)
        state, info = engine.update(key_update, state, rows)
        return BlockOutcomes(
            state, _sums_by_arm(model, rows, counts)[0], jnp.asarray(getattr(info, "is_trusted", True))
        )

    return learn


def _draw_rows(key: Key, world: Environment, counts: Array, most: int) -> Interaction:
    """Draw rows, the plays of arm 0 first, padded to a fixed number."""
    key_context, key_reward = jr.split(key)
    passed = jnp.cumsum(counts)
    number = jnp.arange(most)
    arm = jnp.minimum(jnp.searchsorted(passed, number, side="right"), counts.size - 1)
    model = world.reward_model
    context = None if model.context is None else jax.vmap(world.draw_context)(jr.split(key_context, most))
    return Interaction(arm, world.draw_reward(key_reward, arm, context), context, number < passed[-1])


def _sums_by_arm(model: RewardModel, rows: Interaction, counts: Array) -> tuple[Array, Array]:
    """Return the sum of each arm's rewards, of the first outcome if there are several, and of their squares."""
    assert rows.mask is not None
    reward = rows.reward[model.outcomes[0]] if isinstance(rows.reward, dict) else rows.reward
    is_own = (rows.arm[:, None] == jnp.arange(counts.size)) & rows.mask[:, None]
    values = jnp.where(is_own, reward[:, None].astype(counts.dtype), 0.0)
    return jnp.sum(values, axis=0), jnp.sum(values**2, axis=0)
