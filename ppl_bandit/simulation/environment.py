"""The simulated world: a program whose latents are fixed to a truth, drawn for each realization, or moving.

A world whose program takes `previous` moves: after every decision its latents take the program's own step. With a clock,
`context["time"]` is the number of the decision.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.runtime.jax_adapter import is_tracer
from ppl_bandit.types import Draws, Key


class Environment:
    """A world that produces contexts and rewards.

    Its program may differ from the bandit's reward model; it must have the same arms, outcomes and contexts.

    Attributes:
        draws: truths to choose from, {latent site: (M, ...)}; None if the truth is given or comes from the prior.
        path: the truth of every step, {latent site: (T, ...)}; None if it is not given step by step.

    Args:
        reward_model: the program of the world.
        truth: {latent site: value}, all of its latents; None draws one from the prior for every realization (`from_prior`).
            If the program's latents move, it is the truth of the first step.
        contexts: key -> one context, for a program that takes one; None repeats the program's example context.
        changes: {step: truth}: from that step on, counted from 1, the world has this truth.
    """

    def __init__(
        self,
        reward_model: RewardModel,
        truth: Mapping[str, Any] | None,
        contexts: Callable[[Key], Any] | None = None,
        *,
        changes: Mapping[int, Mapping[str, Any]] | None = None,
    ):
        check_reward_model(reward_model, "reward_model")
        changes = dict(sorted(_mapping(changes or {}, "changes").items()))
        for step in changes:
            if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 2:
                raise ValueError(f"changes has the step {step!r}, expected integers of at least 2: step 1 uses `truth`")
        if truth is not None:
            _check_truth(reward_model, truth, "truth")
        elif changes:
            raise ValueError("changes was given without a truth: give truth, or leave changes out")
        if changes and reward_model.moving_sites:
            raise ValueError(
                "changes was given for a program whose latents move: give the whole path with Environment.from_path"
            )
        for step, later in changes.items():
            _check_truth(reward_model, later, f"changes[{step}]")
        if contexts is not None and not callable(contexts):
            raise ValueError(f"contexts must be a function key -> one context, got {contexts!r}")
        if contexts is not None and reward_model.context is None:
            raise ValueError("contexts was given, but the program takes only arm: leave contexts out")
        self.reward_model = reward_model
        self.truth = None if truth is None else dict(truth)
        self.changes = {int(step): dict(later) for step, later in changes.items()}
        self.draws: Draws | None = None
        self.path: Draws | None = None
        self._contexts = contexts

    @classmethod
    def from_prior(cls, reward_model: RewardModel, contexts: Callable[[Key], Any] | None = None) -> "Environment":
        """Return an environment that draws a new truth from the program's prior for every realization.

        Regret averaged over its realizations is Bayes regret. To simulate a bandit with a wrong prior, give the program of the
        worlds here and the bandit's program to `simulate`. Factors and observed constants of the program are ignored (see
        `RewardModel.sample_prior`).
        """
        return cls(reward_model, None, contexts)

    @classmethod
    def from_draws(
        cls, reward_model: RewardModel, draws: Mapping[str, Any], contexts: Callable[[Key], Any] | None = None
    ) -> "Environment":
        """Return an environment in which the truth of every realization is one of some draws, chosen at random.

        With the posterior draws of an experiment, such as `bandit.posterior()`, it simulates worlds that are plausible
        after its data.

        Args:
            draws: {latent site: (M, ...)}, all latents of the program.
        """
        check_reward_model(reward_model, "reward_model")
        sizes = {name: len(value) if np.ndim(value) else 0 for name, value in _mapping(draws, "draws").items()}
        if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise ValueError(f"draws must have the same positive number of draws of every site, got {sizes}")
        _check_truth(reward_model, {name: np.asarray(value)[0] for name, value in draws.items()}, "draws[0]")
        found = cls(reward_model, None, contexts)
        found.draws = {name: np.asarray(value) for name, value in draws.items()}  # type: ignore[misc]
        return found

    @classmethod
    def from_path(
        cls, reward_model: RewardModel, path: Mapping[str, Any], contexts: Callable[[Key], Any] | None = None
    ) -> "Environment":
        """Return an environment whose truth is given for every step.

        Args:
            path: {latent site: (T, ...)}, all latents of the program; a simulation may have at most T steps.
        """
        if not _mapping(path, "path"):
            raise ValueError("path is empty, expected {latent site: (T, ...)} with all latents of the program")
        found = cls.from_draws(reward_model, path, contexts)
        found.path, found.draws = found.draws, None
        return found

    @property
    def num_steps(self) -> int | None:
        """The number of steps of a given path; None if there is no last step."""
        return None if self.path is None else len(next(iter(self.path.values())))

    @property
    def moving_truth(self) -> dict[str, Array] | None:
        """The truth of the present step, if it takes random steps; None if it does not."""
        return self._latents(1) if self.reward_model.moving_sites and self.path is None else None

    def at(self, truth: Mapping[str, Array]) -> "Environment":
        """Return the same world with another truth."""
        return Environment(self.reward_model, truth, self._contexts)

    def step(self, key: Key) -> dict[str, Array] | None:
        """Draw the `moving_truth` of the next step."""
        truth = self.moving_truth
        return None if truth is None else self.reward_model.draw_transition(key, truth)

    def world(self, key: Key) -> "Environment":
        """Return the world of one realization: itself if the truth is given, else one that is drawn."""
        if self.truth is not None or self.path is not None:
            return self
        return self.at(self._draw(key))

    def _draw(self, key: Key) -> dict[str, Array]:
        if self.draws is not None:
            index = jax.random.randint(key, (), 0, len(next(iter(self.draws.values()))))
            return {name: jnp.asarray(value)[index] for name, value in self.draws.items()}
        return {name: value[0] for name, value in self.reward_model.sample_prior(key, 1).items()}

    def draw_context(self, key: Key, step: int | Int[Array, ""] = 1) -> Any:
        """Draw the context of the decision at a step; None for a program without."""
        if self.reward_model.context is None:
            return None
        context = self.reward_model.context if self._contexts is None else self._contexts(key)
        return {**context, "time": jnp.asarray(step, float)} if self.reward_model.has_clock else context

    def draw_reward(self, key: Key, arm: Int[Array, ""], context: Any, step: int | Int[Array, ""] = 1) -> Any:
        """Draw the outcomes of playing an arm at a step."""
        return self.reward_model.draw_reward(key, self._latents(step), arm, context)

    def expected_rewards(self, context: Any, step: int | Int[Array, ""] = 1) -> Float[Array, " A"]:
        """Return the true expected reward of every arm at a step."""
        draws = {name: value[None] for name, value in self._latents(step).items()}
        return self.reward_model.expected_rewards(draws, context)[0]

    def _latents(self, step: int | Int[Array, ""]) -> dict[str, Array]:
        if self.path is not None:
            return {name: jnp.asarray(value)[jnp.asarray(step) - 1] for name, value in self.path.items()}
        if self.truth is None:
            raise ValueError(
                "the truth is not drawn yet: call environment.world(key) to draw the world of one realization"
            )
        if not self.changes:
            return {name: jnp.asarray(value) for name, value in self.truth.items()}
        era = jnp.sum(jnp.asarray(step) >= np.array(list(self.changes)))
        return {
            name: jnp.stack([jnp.asarray(truth[name]) for truth in (self.truth, *self.changes.values())])[era]
            for name in self.truth
        }


def check_world(reward_model: RewardModel, environment: Any, num_steps: int, argument: str = "environment") -> None:
    """Refuse another value in place of an environment, a world with other arms, and a path that ends before `num_steps`.

    Raises:
        ValueError: says what to give instead.
    """
    if not isinstance(environment, Environment):
        raise ValueError(
            f"{argument} must be an Environment, got {environment!r}: build Environment(reward_model, truth)"
        )
    if environment.reward_model.num_arms != reward_model.num_arms:
        raise ValueError(
            f"{argument} has {environment.reward_model.num_arms} arms and reward_model {reward_model.num_arms}: a bandit "
            "and its world must have the same arms"
        )
    if environment.num_steps is not None and num_steps > environment.num_steps:
        raise ValueError(
            f"{num_steps} steps were asked for, but the path of {argument} has {environment.num_steps}: give a longer path"
        )


def _check_truth(reward_model: RewardModel, truth: Mapping[str, Any], argument: str) -> None:
    expected = reward_model.latent_shapes
    truth = _mapping(truth, argument)
    if set(truth) != set(expected):
        raise ValueError(
            f"{argument} has the sites {sorted(truth)}, expected {sorted(expected)}: all latents and no others"
        )
    if any(is_tracer(value) for value in truth.values()):  # drawn inside a trace: there are no values to check
        return
    for name, value in truth.items():
        array = np.asarray(value)
        if array.shape != expected[name]:
            raise ValueError(f"{argument}[{name!r}] has shape {array.shape}, expected {expected[name]}")
        if array.dtype.kind not in "fiub" or not np.all(np.isfinite(array)):
            raise ValueError(f"{argument}[{name!r}] is {array.tolist()}, expected finite numbers")
    with jax.enable_x64(True):  # the precision in which the reward model keeps its context
        _check_supports(reward_model, truth, argument)


def _mapping(value: Any, argument: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{argument} must be a mapping such as {{latent site: value}}, got {value!r}")
    return value


def _check_supports(reward_model: RewardModel, truth: Mapping[str, Any], argument: str) -> None:
    """Check each value against its site's support, if that does not depend on other sites."""
    supports: dict[str, Any] = {}

    def read(values: Mapping[str, Array]) -> None:
        trace = reward_model.trace(values, jnp.zeros(1, int), reward_model.context_rows(1))
        supports.update({name: trace[name]["fn"].support for name in reward_model.latent_shapes})

    jax.eval_shape(read, {name: jnp.asarray(value) for name, value in truth.items()})
    for name, support in supports.items():
        try:
            fits = bool(np.all(support(jnp.asarray(truth[name]))))
        except (jax.errors.UnexpectedTracerError, jax.errors.ConcretizationTypeError, NotImplementedError, TypeError):
            continue  # the support depends on other sites
        if not fits:
            raise ValueError(
                f"{argument}[{name!r}] is {np.asarray(truth[name]).tolist()}, outside the support of the site ({support}): "
                "give a value that its prior can draw"
            )
