"""What the looks of a design, live and simulated, have in common: program, engine, posterior of the arms, allocation.

For simulated trials the engine learns the rows between two looks by their sums, where that is possible. The update of a
conjugate program adds a vector that depends on arm and outcome y. If it is a polynomial of y of degree at most two, N rows are
one update, from the number, the sum and the sum of squares of each arm's outcomes, without the certificates of single rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.decide import decision_function
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import outside_trace
from ppl_bandit.trials.arm_posterior import ArmPosterior, arm_posterior
from ppl_bandit.trials.design import Design
from ppl_bandit.types import Engine, Interaction, Key, Selection

__all__ = ["Setting", "engine_of_sums", "simulated_setting", "sums_by_arm"]

_NUM_TRIED = 64  # outcomes from the prior predictive, of which some serve as nodes of the polynomial
_NUM_CHECKED = 6
_RTOL = 1e-7


class Setting(NamedTuple):
    """What all looks of a design have in common.

    Attributes:
        control: index of the first control; -1 without one.
        num_samples: posterior draws M, where a probability has no closed form.
        method: how simulated rows are learnt, in words.
    """

    model: RewardModel
    engine: Engine
    design: Design
    control: int
    num_samples: int
    method: str = "row by row"

    def __reduce__(self) -> Any:
        """Describe the setting by what it was made of: an engine of sums holds functions."""
        return simulated_setting, (self.model, self.engine, self.design, self.control, self.num_samples)

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


def simulated_setting(model: RewardModel, engine: Engine, design: Design, control: int, num_samples: int) -> Setting:
    """Return the setting of simulated trials, whose engine learns sums if it can."""
    summed = engine_of_sums(model, engine)
    if summed is None:
        return Setting(model, engine, design, control, num_samples)
    return Setting(model, summed, design, control, num_samples, "one update per block, from sums of outcomes")


def engine_of_sums(model: RewardModel, engine: Engine) -> Engine | None:
    """Return the engine with an update that learns all rows at once; None unless it is a polynomial of the outcome."""
    tabulate = engine.capabilities.tabulate_rows
    if tabulate is None or model.context is not None or len(model.outcomes) > 1:
        return None
    with outside_trace(), jax.enable_x64(True):
        nodes, others = _nodes(model)
        add, direct = (tabulate(_each_arm(model, values)) if values.size else None for values in (nodes, others))
        is_checked = direct is not None and add is not None and _agree(model, engine, nodes, add, others, direct)
        if add is None or (others.size and not is_checked):
            return None
    to_weights = np.linalg.inv(np.vander(nodes, increasing=True).T)  # (1, y, y^2) sums -> weights of the nodes

    def update(key: Key, state: Any, rows: Interaction) -> tuple[Any, None]:
        powers = sums_by_arm(rows, model, nodes.size)  # (nodes, A)
        weights = jnp.asarray(to_weights, powers.dtype) @ powers
        return add(state, weights.T.ravel(), jnp.sum(powers[0]).astype(int)), None

    return engine._replace(update=update)


def sums_by_arm(rows: Interaction, model: RewardModel, num_powers: int) -> Float[Array, "P A"]:
    """Return the sums of each arm's outcomes to the powers 0, 1, ...; of the first outcome, if there are several."""
    values = rows.reward[model.outcomes[0]] if isinstance(rows.reward, dict) else rows.reward
    is_kept = jnp.ones(rows.arm.shape, bool) if rows.mask is None else rows.mask
    own = (is_kept[:, None] & (rows.arm[:, None] == jnp.arange(model.num_arms))).astype(jnp.result_type(float))
    values = jnp.where(is_kept, values, 0).astype(own.dtype)
    powers = jnp.stack([values**power for power in range(num_powers)])  # (P, N)
    return powers * own if rows.arm.shape[0] == 1 else powers @ own


def _nodes(model: RewardModel) -> tuple[np.ndarray, np.ndarray]:
    """Return three outcomes, or two where there are no more, and others to check the polynomial through them."""

    def draw() -> Array:
        key_prior, key_rows = jr.split(jr.key(20))
        latents = model.sample_prior(key_prior, _NUM_TRIED)
        arms, keys = jnp.arange(_NUM_TRIED) % model.num_arms, jr.split(key_rows, _NUM_TRIED)
        return jax.vmap(lambda key, own, arm: jnp.asarray(model.draw_reward(key, own, arm)))(keys, latents, arms)

    tried = np.unique(np.asarray(run_once(draw), float))
    tried = tried[np.isfinite(tried)]
    chosen = np.unique(np.quantile(tried, np.linspace(0.1, 0.9, 3 + _NUM_CHECKED), method="nearest"))
    if chosen.size < 2:
        chosen = tried[[0, -1]]
    nodes = np.unique(chosen[np.linspace(0, chosen.size - 1, 3).round().astype(int)])
    return nodes, np.setdiff1d(chosen, nodes)


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
