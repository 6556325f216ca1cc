"""What the looks of a design, live and simulated, have in common: program, engine, posterior of the arms, allocation."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.decide import decision_function
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.trials.arm_posterior import ArmPosterior, arm_posterior
from ppl_bandit.trials.design import Design
from ppl_bandit.types import Engine, Interaction, Key, Selection


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
