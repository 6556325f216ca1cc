"""What the looks of a design, live and simulated, have in common: program, engine, posterior of the arms, allocation.

Also here: what stopping rules read of a posterior: probabilities of events of the arms' expected rewards theta.

From closed forms where the engine offers them (`Marginals` of independent arms), from a table of M draws otherwise.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.decide import decision_function
from ppl_bandit.numerics.joint_events import JointEvents
from ppl_bandit.numerics.tail_excess import losses_from_moments
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.selectors.selector_contract import winner_frequencies
from ppl_bandit.trials.design import Design
from ppl_bandit.types import Engine, Interaction, Key, Marginals, Selection


class ArmPosterior(NamedTuple):
    """The posterior of the arms' expected rewards, as functions that run inside `jit` and `vmap`.

    Attributes:
        best_arm_probs: active arms (A,) -> (A,), P(a is best among these), 0 for the others.
        gap_probs: (delta, arm b) -> (A,), P(theta_a - theta_b > delta).
        range_prob: (delta, active arms) -> P(max - min < delta) over these.
        near_best_prob: (ratio, active arms, arm a) -> P(max theta - theta_a <= ratio abs(theta_a)).
        expected_losses: active arms -> (A,), E[max theta - theta_a], with the maximum over these.
        quantile: order -> (A,).
        mean: () -> (A,).
        is_exact: whether these are closed forms; False if they are shares of draws.
    """

    best_arm_probs: Callable[[Bool[Array, " A"]], Float[Array, " A"]]
    gap_probs: Callable[[Any, Any], Float[Array, " A"]]
    range_prob: Callable[[Any, Bool[Array, " A"]], Float[Array, ""]]
    near_best_prob: Callable[[Any, Bool[Array, " A"], Any], Float[Array, ""]]
    expected_losses: Callable[[Bool[Array, " A"]], Float[Array, " A"]]
    quantile: Callable[[Any], Float[Array, " A"]]
    mean: Callable[[], Float[Array, " A"]]
    is_exact: bool


def arm_posterior(
    key: Key,
    model: RewardModel,
    engine: Engine,
    state: Any,
    context: Any,
    num_samples: int,
    deltas: Sequence[float] = (),
) -> ArmPosterior:
    """Return the posterior of the arms' expected rewards of an engine's state.

    Args:
        key: for the draws, where there is no closed form.
        context: at which expected rewards are compared; None for a program without.
        num_samples: M, number of draws.
        deltas: absolute differences for which `range_prob` and `gap_probs` will be asked, besides 0.
    """
    marginals = None if engine.capabilities.marginals is None else engine.capabilities.marginals(state, context)
    if marginals is not None and marginals.joint_events is not None:
        return from_marginals(marginals, deltas)
    if marginals is not None and marginals.table is not None:
        return from_table(marginals.table(key, num_samples))
    return from_table(model.expected_rewards(engine.sample(key, state, num_samples), context))


def from_marginals(marginals: Marginals, deltas: Sequence[float] = ()) -> ArmPosterior:
    """Return the posterior of independent arms from closed forms; `marginals.joint_events` is not None.

    Args:
        deltas: as in `arm_posterior`.
    """
    assert marginals.joint_events is not None and marginals.best_arm_moments is not None and marginals.tail is not None
    joint_events, tail, moments = marginals.joint_events, marginals.tail, marginals.best_arm_moments
    # Computed here, and not where they are asked for, which may be inside a loop.
    joint = {float(delta): joint_events(float(delta)) for delta in {0.0, *deltas}}

    def at(delta: float) -> JointEvents:
        return joint[delta] if delta in joint else joint_events(delta)

    def gap_probs(delta: float, arm: Any) -> Float[Array, " A"]:
        return at(delta).exceeding_probs(arm) if delta >= 0 else 1.0 - at(-delta).falling_short_probs(arm)

    return ArmPosterior(
        joint[0.0].best_arm_probs,
        gap_probs,
        lambda delta, active: at(delta).range_prob(active),
        joint[0.0].near_best_prob,
        lambda active: losses_from_moments(moments(active)),
        lambda order: marginals.quantile(jnp.asarray(order)),
        lambda: tail().mean,
        is_exact=True,
    )


def from_table(table: Float[Array, "M A"]) -> ArmPosterior:
    """Return the posterior from draws of all arms' expected rewards; its probabilities are shares of draws."""

    def largest(active: Bool[Array, " A"]) -> Float[Array, " M"]:
        return jnp.max(jnp.where(active, table, -jnp.inf), axis=1)

    def range_prob(delta: Any, active: Bool[Array, " A"]) -> Float[Array, ""]:
        smallest = jnp.min(jnp.where(active, table, jnp.inf), axis=1)
        return jnp.mean(largest(active) - smallest < delta)

    return ArmPosterior(
        lambda active: winner_frequencies(table, active),
        lambda delta, arm: jnp.mean(table - table[:, arm][:, None] > delta, axis=0),
        range_prob,
        lambda ratio, active, arm: jnp.mean(largest(active) - table[:, arm] <= ratio * jnp.abs(table[:, arm])),
        lambda active: jnp.mean(largest(active)[:, None] - table, axis=0),
        lambda order: jnp.quantile(table, order, axis=0),
        lambda: jnp.mean(table, axis=0),
        is_exact=False,
    )


class Setting(NamedTuple):
    """What all looks of a design have in common.

    Attributes:
        control: index of the first control; -1 without one.
        num_samples: posterior draws M, where a probability has no closed form.
    """

    model: RewardModel
    engine: Engine
    design: Design
    control: int
    num_samples: int

    @property
    def learner(self) -> Engine:
        """The engine for simulated rows, with an update without certificates where the engine offers it."""
        add_rows = self.engine.capabilities.add_rows
        if add_rows is None:
            return self.engine

        def update(key: Key, state: Any, rows: Interaction) -> tuple[Any, Any]:
            with jax.default_matmul_precision("highest"):
                state, is_sound = add_rows(state, rows)
            return state, SimpleNamespace(is_trusted=is_sound)

        return self.engine._replace(update=update)

    @property
    def method(self) -> str:
        """How simulated rows are learnt, in words."""
        return "row by row" if self.engine.capabilities.add_rows is None else "one update per block"

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


def sums_by_arm(rows: Interaction, model: RewardModel, num_powers: int) -> Float[Array, "P A"]:
    """Return the sums of each arm's outcomes to the powers 0, 1, ...; of the first outcome, if there are several."""
    values = rows.reward[model.outcomes[0]] if isinstance(rows.reward, dict) else rows.reward
    is_kept = jnp.ones(rows.arm.shape, bool) if rows.mask is None else rows.mask
    own = (is_kept[:, None] & (rows.arm[:, None] == jnp.arange(model.num_arms))).astype(jnp.result_type(float))
    values = jnp.where(is_kept, values, 0).astype(own.dtype)
    powers = jnp.stack([values**power for power in range(num_powers)])  # (P, N)
    return powers * own if rows.arm.shape[0] == 1 else powers @ own
