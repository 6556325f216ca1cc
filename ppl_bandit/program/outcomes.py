"""Outcomes of a program: which are counted when some are missing, and how much each says about the latents.

With such a site, reward and information can differ: in a duel of two items, the outcome tells which of them is better, and
the reward is how good they are. At a few draws of latents, the scores (gradients of the log density of drawn outcomes) span the
directions about which the outcome tells something. The gradient of the expected reward must be one of them.

Also here: a reward model whose rows say which of their outcomes count.

The outcomes of one decision may become known one after another. A program samples them in order, so the density of those that
are known is the product of their own factors: a later outcome, of which nothing else depends, integrates to 1. The model here
is the same program with a mask on every outcome, which is one more entry of the context. So every engine learns the known
outcomes now and the factors of the others later, with the same compiled functions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree

from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.model.probing import feasible_latents, feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import log_prob
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import mask_sites
from ppl_bandit.types import Interaction, Selector

_NUM_WORLDS = 3
_NUM_OUTCOMES = 128
_MAX_SIZE = 10**7
_ROUNDING = 1e-7


class OutcomeInformation(NamedTuple):
    """Arms whose outcome does not tell about their own expected reward.

    Attributes:
        uninformative: the expected reward depends on latents, the density of the outcome on none.
        misleading: the outcome tells about latents, but not, or not only, about those that the expected reward depends on.
    """

    uninformative: tuple[int, ...] = ()
    misleading: tuple[int, ...] = ()


def outcome_information(model: RewardModel) -> OutcomeInformation:
    """Find the arms whose outcome does not tell about their expected reward; none if that is the mean of the outcome."""
    size = sum(int(np.prod(shape)) for shape in model.latent_shapes.values())
    if model.is_reward_an_outcome or model.num_arms * _NUM_OUTCOMES * size > _MAX_SIZE:
        return OutcomeInformation()
    cached = model.load_result("outcome_information")
    if cached is not None:
        return OutcomeInformation(*map(tuple, cached[0]))

    def read() -> tuple[Any, Any]:
        # Other contexts than the example, which may be all zeros.
        contexts = model.varied_context_rows(np.random.default_rng(0), np.zeros(_NUM_WORLDS, bool))
        keys = jr.split(jr.key(0), _NUM_WORLDS)
        return jax.vmap(lambda key, context: _gradients(model, key, context))(keys, contexts)

    with jax.enable_x64(True):
        rewards, scores = map(np.asarray, run_once(read))  # (worlds, A, D), (worlds, A, outcomes, D)
    uninformative, misleading = [], []
    for arm in range(model.num_arms):
        depends, tells, fits = zip(*map(_judge, rewards[:, arm], scores[:, arm]), strict=True)
        if any(depends) and not any(tells):
            uninformative.append(arm)
        elif any(tells) and not any(fits):
            misleading.append(arm)
    model.save_result("outcome_information", [uninformative, misleading])
    return OutcomeInformation(tuple(uninformative), tuple(misleading))


def check_information_directed(model: RewardModel, selector: Selector) -> None:
    """Refuse information-directed sampling where it would measure information by the wrong quantity.

    Raises:
        ValueError: if the selector is, or wraps, `information_directed`, and the outcome of an arm does not tell about its
            expected reward.
    """
    inner: Any = selector
    while isinstance(inner, Selector) and inner.name != "information_directed":
        inner = inner.settings.get("selector")
    if inner is None or model.is_reward_an_outcome:
        return
    found = outcome_information(model)
    arms = sorted((*found.uninformative, *found.misleading))
    if arms:
        raise ValueError(
            "selector is information_directed(), which measures the information of an arm by its expected reward, and here "
            f"the outcome of {_listed(arms)} does not tell about the arm's expected_reward: it could play the same arm for "
            "ever; use selectors.thompson(), selectors.double_sampling() or selectors.top_two()"
        )


def uninformative_arms_note(arms: list[Any]) -> str:
    """Return a warning about arms whose outcome tells nothing, in one line."""
    return (
        f"the outcome of {_listed(arms)} does not depend on any latent, but its expected reward does: playing it teaches "
        "nothing, so that a selector that prefers it stops learning; leave such arms out with allowed= while the bandit "
        "learns, or give every arm a floor with selectors.with_floor"
    )


def _listed(arms: list[Any]) -> str:
    shown = ", ".join(map(repr, arms[:5]))
    return f"arm{'s' if len(arms) > 1 else ''} {shown}{f' and {len(arms) - 5} more' if len(arms) > 5 else ''}"


def _judge(reward: np.ndarray, scores: np.ndarray) -> tuple[bool, bool, bool]:
    """Return whether the expected reward depends on latents, the outcome tells about some, and about those of the reward."""
    size, total = float(np.linalg.norm(reward)), float(np.linalg.norm(scores))
    depends, tells = size > _ROUNDING, total > _ROUNDING
    if not depends or not tells or not np.isfinite(scores).all():
        return depends, tells, not depends and not tells
    _, values, directions = np.linalg.svd(scores, full_matrices=False)
    directions = directions[values > _ROUNDING * values[0]]
    rest = reward - directions.T @ (directions @ reward)
    return depends, tells, float(np.linalg.norm(rest)) < 1e-4 * size


def _gradients(model: RewardModel, key: Any, context: Any) -> tuple[Any, Any]:
    """Return the gradient of each arm's expected reward, (A, D), and scores of drawn outcomes, (A, outcomes, D).

    Derivatives are by the latents on the real line, so that the sum of a simplex is not a direction.
    """
    key_latents, key_outcomes = jr.split(key)
    trace = model.trace({}, jnp.zeros(1, int), model.context_rows(1, context), key=key_latents)
    maps = {name: dist.biject_to(trace[name]["fn"].support) for name in model.latent_shapes}
    start, unravel = ravel_pytree({name: maps[name].inv(trace[name]["value"]) for name in maps})

    def latents_at(point: Any) -> dict[str, Any]:
        return {name: maps[name](value) for name, value in unravel(point).items()}

    def expected(point: Any) -> Any:
        draws = jax.tree.map(lambda leaf: leaf[None], latents_at(point))
        return model.expected_rewards(draws, context)[0]

    def score(arm: Any, key: Any) -> Any:
        rows = model.context_rows(1, context)
        reward = model.draw_reward(key, latents_at(start), arm[None], rows)

        def log_density(point: Any) -> Any:
            return jnp.sum(model.log_likelihood(latents_at(point), Interaction(arm[None], reward, rows)))

        return jax.grad(log_density)(start)

    arms = jnp.arange(model.num_arms)
    keys = jr.split(key_outcomes, _NUM_OUTCOMES)
    return jax.jacrev(expected)(start), jax.vmap(lambda arm: jax.vmap(lambda key: score(arm, key))(keys))(arms)


@functools.lru_cache(maxsize=8)
def counting_model(model: RewardModel) -> RewardModel:
    """Return the model of the same program with contexts {"context": its own, "counted": (outcomes,) booleans}."""

    def counting(arm: Any, context: Any) -> Any:
        counted = {name: context["counted"][:, i] for i, name in enumerate(model.outcomes)}
        with mask_sites(counted):
            return model.program(arm) if model.context is None else model.program(arm, context["context"])

    counting.__name__ = getattr(model.program, "__name__", "program")
    example = counting_context(model, model.context, np.ones(len(model.outcomes), bool))
    return RewardModel(counting, model.num_arms, example, model.outcomes)


def counting_context(model: RewardModel, context: Any, counted: Any) -> dict[str, Any]:
    """Return a context of `counting_model`."""
    return {"counted": counted} if model.context is None else {"counted": counted, "context": context}


@functools.lru_cache(maxsize=8)
def any_rewards(model: RewardModel) -> dict[str, float]:
    """Return a value of every outcome that the program can produce, to stand in for one that does not count."""

    def choose() -> Any:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        picks = jnp.zeros((1, len(model.outcomes)), int)
        kinds = {name: model.outcome_kinds[name] for name in model.outcomes}
        return feasible_rewards(model.program, latents, jnp.zeros(1, int), model.context_rows(1), kinds, picks)[0]

    with jax.enable_x64(True):
        return {name: float(value[0]) for name, value in run_once(choose).items()}


def separable_outcomes(model: RewardModel, known: frozenset[str]) -> tuple[str, ...]:
    """Return the known outcomes whose factors can be learnt before the others are known.

    These are the ones whose density depends on no value that is missing. The result is empty if no latent reaches them.
    """
    reads = _reads(model)
    found = tuple(name for name in model.outcomes if name in known and reads[name] - {_LATENTS} <= known)
    return found if any(_LATENTS in reads[name] for name in found) else ()


_LATENTS = ""  # no outcome has this name


@functools.lru_cache(maxsize=8)
def _reads(model: RewardModel) -> dict[str, frozenset[str]]:
    """Return, for each outcome, the outcomes whose values its density depends on, and `_LATENTS` if latents reach it."""

    def densities(latents: Any, outcomes: Any) -> list[Any]:
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1), outcomes)
        return [log_prob(trace[name]) for name in model.outcomes]

    latents = {name: np.zeros(shape) for name, shape in model.latent_shapes.items()}
    with jax.enable_x64(True):
        outcomes = model.zero_outcomes(1)
        closed = jax.make_jaxpr(densities)(latents, outcomes)
    labels = [frozenset([_LATENTS])] * len(latents) + [frozenset([name]) for name in sorted(outcomes)]
    return dict(zip(model.outcomes, dependencies(closed, labels), strict=True))
