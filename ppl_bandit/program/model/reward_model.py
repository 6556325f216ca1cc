"""The reward model: one NumPyro program as prior, likelihood, table of expected rewards and simulator.

`RewardModel` wraps a program with the few facts that it cannot state itself. Its methods are pure functions of arrays; they
run under `jit`, `vmap` and `scan`, in the precision that JAX is set to.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.program.closed_over import changed_name, numbers_closed_over
from ppl_bandit.program.jaxpr.index_limits import first_outside, outside_rows
from ppl_bandit.program.keywords import bind_num_arms, has_clock
from ppl_bandit.program.model import means
from ppl_bandit.program.model.probing import DTYPE_OF_KIND, extreme_latents, vary_contexts
from ppl_bandit.program.model.sites import inside_domains
from ppl_bandit.program.model.tracing import Trace, can_produce, is_prior_term, log_prob, repeat_rows, run_program
from ppl_bandit.program.model.validation import VALIDATION, facts_to_json, validate
from ppl_bandit.runtime.artefact import Artefact
from ppl_bandit.types import Draws, Interaction, InvalidProgram, Key


def check_reward_model(model: Any, argument: str) -> None:
    """Refuse a program or another value in place of a reward model.

    Raises:
        ValueError: says what to give instead.
    """
    if not isinstance(model, RewardModel):
        raise ValueError(
            f"{argument} must be a RewardModel, got {model!r}: wrap a program as RewardModel(program, num_arms)"
        )


class RewardModel:
    """A NumPyro program of the reward, with its number of arms, an example context and the names of its outcomes.

    Args:
        program: function of `arm`, an int array (N,), and, if it wants one, `context`, a pytree whose leaves have a
            leading axis N. It has a sample site of shape (N,) for every outcome and never passes `obs=` to it. If it takes
            the keyword `num_arms`, it gets the number of arms.
        num_arms: number of arms A; the program sees arms 0, ..., A - 1.
        context: one example context, without the leading axis; None for a program of `arm` alone.
        outcomes: names of the sample sites that are observed. With several, or to maximise something other than the mean
            of the outcome, the program has a `numpyro.deterministic("expected_reward", ...)` of shape (N,).

    A program whose latents move takes the keyword `previous`, {latent: value} one step before, or None at the first step, and
    may take `elapsed`, the time since then.

    Attributes:
        latent_shapes: latent site -> shape.
        outcome_kinds: outcome -> "i" for integers and booleans, "f" for reals.
        outcome_groups: the outcomes in groups: the density of an outcome depends on values of its own group only.
        moving_sites: latents that are sampled from `previous`; () for a program whose latents do not move.
        has_clock: whether the time of a step is `context["time"]`; otherwise every step takes 1.

    Raises:
        InvalidProgram: if the program cannot be used; the message says why and what to write instead.
    """

    def __init__(self, program: Callable, num_arms: int, context: Any = None, outcomes: tuple[str, ...] = ("reward",)):
        program = bind_num_arms(program, num_arms)
        self._built, self._numbers = program, numbers_closed_over(program)
        facts = validate(program, num_arms, context, outcomes)
        self.program = program
        self.num_arms = int(num_arms)
        self.outcomes = facts.outcomes
        self.context = facts.context
        self.latent_shapes = facts.latent_shapes
        self.outcome_kinds = facts.outcome_kinds
        self.moving_sites = facts.moving_sites
        self.has_clock = has_clock(program, facts.context)
        self._mean_method = facts.mean_method
        self._has_moving_support = facts.has_moving_support
        self.outcome_groups = facts.outcome_groups
        self._largest_integers = facts.largest_integers
        self._facts = facts
        problem = self.outside_index(jax.tree.map(lambda leaf: np.asarray(leaf)[None], facts.context), "context")
        if problem is not None:
            raise InvalidProgram(problem)

    def __repr__(self) -> str:
        name = getattr(self.program, "__name__", "program")
        return f"RewardModel({name}, num_arms={self.num_arms}, outcomes={self.outcomes})"

    def replaced(self, **fields: Any) -> "RewardModel":
        """Return a copy with other attributes; what was read from the program is kept, and nothing is checked."""
        view = copy.copy(self)
        vars(view).update(fields)
        return view

    @property
    def is_reward_an_outcome(self) -> bool:
        """Whether the quantity to maximise is the mean of the only outcome, and not one that `expected_reward` names."""
        return self._mean_method is not None

    @property
    def has_index_limits(self) -> bool:
        """Whether an entry of the context indexes an axis of the program."""
        return bool(self._facts.index_limits)

    def outside_index(self, contexts: Any, argument: str) -> str | None:
        """Return which entry of contexts indexes an axis of the program out of range, in words; None if none does.

        Args:
            contexts: arrays with a leading axis.
            argument: the name that the message gives to the contexts.
        """
        paths, _ = jax.tree_util.tree_flatten_with_path(contexts)
        leaves = [np.reshape(leaf, (np.shape(leaf)[0], -1)) for _, leaf in paths]
        for limit in self._facts.index_limits:
            outside = first_outside(limit, leaves)
            if outside is not None:
                row, what = outside
                entries = " and ".join(
                    f"{argument}{jax.tree_util.keystr(paths[leaf][0])}{f'[{entry}]' if leaves[leaf].shape[1] > 1 else ''} = "
                    f"{leaves[leaf][row, entry]:g}"
                    for leaf, entry, _ in limit.terms
                )
                where = f" in row {row}" if leaves[0].shape[0] > 1 else ""
                return (
                    f"{entries}{where}: the program reads {what}, and JAX would silently read another one; correct the "
                    "value, give the program more entries, or clip the index in the program"
                )
        return None

    def indexes_inside(self, contexts: Any) -> Bool[Array, " N"] | bool:
        """Return whether contexts index every axis of the program inside its range; runs under `jit`.

        Args:
            contexts: arrays with a leading axis.
        """
        leaves = [jnp.reshape(leaf, (jnp.shape(leaf)[0], -1)) for leaf in jax.tree.leaves(contexts)]
        is_inside: Bool[Array, " N"] | bool = True
        for limit in self._facts.index_limits:
            is_inside &= ~outside_rows(limit, leaves)
        return is_inside

    @property
    def artefact(self) -> Artefact:
        """Where results about this program are kept for later processes, under its fingerprint."""
        return self._facts.artefact

    def load_result(self, name: str) -> tuple[Any, list[bytes]] | None:
        """Return a result about this program from its artefact, JSON values and bytes; None if there is none."""
        return self.artefact.load(name)

    def save_result(self, name: str, values: Any, parts: Sequence[bytes] = ()) -> None:
        """Store a result about this program in its artefact, with what validation found; without effect if that is off."""
        self.artefact.save({VALIDATION: (facts_to_json(self._facts), ()), name: (values, parts)})

    @property
    def expected_reward_method(self) -> str:
        """How the expected reward is computed, in words."""
        if self._mean_method is None:
            return "the program's own expected_reward site"
        return f"the mean of '{self.outcomes[0]}', from {self._mean_method.description}"

    @property
    def may_leave_domains(self) -> bool:
        """Whether arguments of outcomes may leave their domains, although they did so at no draw from the prior."""
        return self._facts.may_leave_domains

    def share_outside_domains(self, draws: Draws, context: Any = None) -> Float[Array, ""]:
        """Return the share of draws at which an argument of an outcome is outside of its domain, on some arm.

        Args:
            draws: {site: (M, ...)}.
            context: the context of the decision, without a leading axis.
        """
        arms, rows = jnp.arange(self.num_arms), self.context_rows(self.num_arms, context)
        inside = jax.vmap(lambda latents: inside_domains(self._trace_undrawn(latents, arms, rows), self.outcomes))
        return 1.0 - jnp.mean(inside(dict(draws)))

    @property
    def expected_reward_note(self) -> str:
        """A warning about the expected rewards; "" if they differ between arms and are as accurate as floating point allows."""
        if not self._facts.uses_arm:
            return (
                "all arms have the same expected reward, whatever the data: the program does not use `arm`, or all arms get "
                "the same value of what it computes from it, as in `0 * arm`; index the latents by it, as in `rate[arm]`"
            )
        if self._facts.idle_arm is not None:
            return (
                f"nothing can be learnt about arm {self._facts.idle_arm}: the program multiplies all latents by 0 for it, as "
                "with a jax.nn.one_hot that has fewer entries than there are arms; give every arm an entry of its own"
            )
        return means.MONTE_CARLO_NOTE if self._mean_method is means.MONTE_CARLO else ""

    def log_prior(self, latents: Mapping[str, Array]) -> Float[Array, ""]:
        """Return the log prior density of the latents.

        Sites that the program itself observes and `numpyro.factor` terms are part of the prior: they count once, whatever the
        number of rows.
        """
        return self.log_prior_of(self._trace_undrawn(latents, jnp.zeros(1, int), self.context_rows(1)))

    def log_prior_of(self, trace: Trace) -> Float[Array, ""]:
        """Return the log prior density from the sites of a run with any arms, contexts and outcomes."""
        terms = [log_prob(site).sum() for name, site in trace.items() if is_prior_term(name, site, self.outcomes)]
        return jnp.asarray(sum(terms, start=0.0))

    def log_likelihood(self, latents: Mapping[str, Array], interaction: Interaction) -> Float[Array, " N"]:
        """Return the log likelihood of each row, summed over the outcomes; 0 for masked rows."""
        arm, reward, context, mask = interaction
        trace = self.trace(latents, arm, context, self.outcome_values(reward))
        return sum((log_prob(trace[name], mask) for name in self.outcomes), start=jnp.zeros(jnp.shape(arm)))

    def expected_rewards(self, draws: Draws, context: Any = None) -> Float[Array, "M A"]:
        """Return the table of expected rewards: one row per draw, one column per arm.

        Args:
            draws: {site: (M, ...)}.
            context: the context of the decision, without a leading axis.
        """
        arms = jnp.arange(self.num_arms)

        def row(latents: Mapping[str, Array]) -> Float[Array, " A"]:
            # One arm at a time, so that all arms use the same random numbers.
            if self._mean_method is not None and self._mean_method.uses_draws:
                return jax.vmap(lambda arm: self._expected(latents, arm[None], self.context_rows(1, context))[0])(arms)
            return self._expected(latents, arms, self.context_rows(self.num_arms, context))

        return jax.vmap(row)(dict(draws))

    def reward_variances(self, draws: Draws, context: Any = None) -> Float[Array, "M A"]:
        """Return the variance of one reward given each draw: one row per draw, one column per arm.

        Raises:
            NotImplementedError: if the program has an `expected_reward` site, or the outcome's distribution has no formula
                for its variance.
        """
        arms, rows = jnp.arange(self.num_arms), self.context_rows(self.num_arms, context)
        return jax.vmap(
            lambda latents: means.reward_variance(
                self._trace_undrawn(latents, arms, rows), self.outcomes, self._mean_method
            )
        )(dict(draws))

    def draw_reward(self, key: Key, latents: Mapping[str, Array], arm: Int[Array, "..."], context: Any = None) -> Any:
        """Draw the outcomes of playing `arm`, a scalar or (N,); `context` has a leading axis if `arm` has one."""
        arm = jnp.asarray(arm)
        if arm.ndim == 0:
            context = repeat_rows(context, 1)
        trace = self.trace(latents, jnp.atleast_1d(arm), context, key=key)
        values = {name: jnp.reshape(trace[name]["value"], arm.shape) for name in self.outcomes}
        return values if len(self.outcomes) > 1 else values[self.outcomes[0]]

    def sample_prior(self, key: Key, num_samples: int) -> Draws:
        """Draw latents from the program's generative prior, which ignores factors and observed constants."""

        def one(key: Key) -> Draws:
            trace = self.trace({}, jnp.zeros(1, int), self.context_rows(1), key=key)
            return {name: jnp.asarray(trace[name]["value"]) for name in self.latent_shapes}

        return jax.vmap(one)(jr.split(key, num_samples))

    def terms_beside_draws(self) -> tuple[str, ...]:
        """Return the names of factors and observed constants: they change the prior density but not `sample_prior`."""
        names: list[str] = []

        def collect() -> None:
            trace = self.trace({}, jnp.zeros(1, int), self.context_rows(1))
            names.extend(name for name, site in trace.items() if is_prior_term(name, site, self.outcomes))

        jax.eval_shape(collect)
        return tuple(name for name in names if name not in self.latent_shapes)

    def log_transition(
        self, latents: Mapping[str, Array], previous: Mapping[str, Array], elapsed: Array | float | None = None
    ) -> Float[Array, ""]:
        """Return the log density of a step: that of the moving latents given those of the step before.

        Args:
            latents: present values of the moving latents; the static ones are those of `previous`.
            elapsed: time since the step before, for a program that takes it; None is the program's default.
        """
        present = {**previous, **{name: latents[name] for name in self.moving_sites}}
        trace = self._trace_step(present, None, previous, elapsed)
        return jnp.asarray(sum(log_prob(trace[name]).sum() for name in self.moving_sites))

    def draw_transition(
        self, key: Key, previous: Mapping[str, Array], elapsed: Array | float | None = None
    ) -> dict[str, Array]:
        """Draw the latents of the next step; the arguments are those of `log_transition`."""
        static = {name: value for name, value in previous.items() if name not in self.moving_sites}
        trace = self._trace_step(static, key, previous, elapsed)
        return {name: jnp.asarray(trace[name]["value"]) for name in self.latent_shapes}

    def in_support(self, latents: Mapping[str, Array], interaction: Interaction) -> dict[str, Bool[Array, " N"]]:
        """Return, for each outcome and row, whether the program can produce the reward.

        Rows of an outcome that the program itself masks (no spend without a conversion) may hold any value. If a support
        depends on a latent, a reward only has to be in the support at some value of that latent. A row whose scale is below 0
        is nothing that a program can produce.
        """
        values, raw = self.outcome_values(interaction.reward), self._by_outcome(interaction.reward)

        def in_supports(latents: Mapping[str, Array]) -> dict[str, Bool[Array, " N"]]:
            trace = self.trace(latents, interaction.arm, interaction.context, values)
            found = {name: can_produce(trace[name]["fn"], jnp.asarray(raw[name])) for name in self.outcomes}
            scales = {name: trace[name]["scale"] for name in self.outcomes if trace[name]["scale"] is not None}
            return found | {name: found[name] & (jnp.asarray(scale) >= 0) for name, scale in scales.items()}

        if not self._has_moving_support:
            return in_supports(latents)
        far = jax.vmap(in_supports)(extreme_latents(self.program, tuple(self.latent_shapes), self.context))
        return {name: found | far[name].any(axis=0) for name, found in in_supports(latents).items()}

    def trace(
        self,
        latents: Mapping[str, Array],
        arm: Int[Array, " N"],
        context: Any,
        outcomes: Mapping[str, Array] | None = None,
        key: Key | None = None,
        previous: Mapping[str, Array] | None = None,
        elapsed: Array | float | None = None,
    ) -> Trace:
        """Run the program with latents, and outcomes if given, fixed, and return its sites."""
        changed = changed_name(self._built, self._numbers)
        if changed is not None:
            raise InvalidProgram(
                f"{changed}, which the program reads, has changed since the model was built: functions compiled before and "
                "after would see different numbers; give what changes as context, or build a new model and bandit"
            )
        values = {**latents, **(outcomes or {})}
        return run_program(self.program, arm, context, values, key, previous=previous, elapsed=elapsed)

    def outcome_values(self, reward: Any) -> dict[str, Array]:
        """Return rewards as {outcome: (N,)}, integer or real as the outcome."""
        raw = self._by_outcome(reward)
        return {name: jnp.asarray(raw[name]).astype(DTYPE_OF_KIND[self.outcome_kinds[name]]) for name in self.outcomes}

    def zero_outcomes(self, num_rows: int) -> dict[str, Array]:
        """Return {outcome: zeros (N,)}, for quantities that do not depend on the outcomes; sampling would be slower."""
        return self.outcome_values(dict.fromkeys(self.outcomes, jnp.zeros(num_rows)))

    def context_rows(self, num_rows: int, context: Any = None) -> Any:
        """Repeat a context, the example by default, over rows."""
        return repeat_rows(self.context if context is None else context, num_rows)

    def varied_context_rows(self, rng: np.random.Generator, is_kept: Bool[np.ndarray, " N"]) -> Any:
        """Return variations of the example context, and the example itself in the rows that `is_kept` marks."""
        rows = self.context_rows(len(is_kept))
        return None if rows is None else vary_contexts(rows, self._largest_integers, rng, is_kept)

    def _by_outcome(self, reward: Any) -> Mapping[str, Array]:
        return reward if isinstance(reward, Mapping) else {self.outcomes[0]: reward}

    def _expected(self, latents: Mapping[str, Array], arm: Int[Array, " N"], context: Any) -> Float[Array, " N"]:
        return means.expected_reward(self._trace_undrawn(latents, arm, context), self.outcomes, self._mean_method)

    def _trace_step(self, latents: Mapping[str, Array], key: Key | None, previous: Any, elapsed: Any) -> Trace:
        rows = jnp.zeros(1, int), self.context_rows(1), self.zero_outcomes(1)
        return self.trace(latents, *rows, key, previous=previous, elapsed=elapsed)

    def _trace_undrawn(self, latents: Mapping[str, Array], arm: Int[Array, " N"], context: Any) -> Trace:
        """Run the program with outcomes fixed to 0."""
        return self.trace(latents, arm, context, self.zero_outcomes(arm.shape[0]))
