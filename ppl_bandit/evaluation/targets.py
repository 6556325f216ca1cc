"""What is evaluated: of whom (an arm, a difference of two, a policy, also one that depends on the context), and in which unit.

Every target is one or two components, each with the probabilities that it plays the arms with in every logged decision. What a
decision earned is an outcome, or a function of the outcomes; the model has a word on it if that is what the program maximises.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.display.terminal import shown_name
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.inputs.numbers import as_plain_numbers
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.numpyro_adapter import mask_of
from ppl_bandit.types import Selector, UnknownArm

_NUM_DRAWS, _NUM_PLAYS = 400, 100  # latents from the prior, and plays of every arm given each
_LARGEST_DEVIATION = 5.0  # standard errors


class Component(NamedTuple):
    """One policy whose mean reward is estimated.

    Attributes:
        label: in words.
        probs: (T, A), probability that it plays each arm in each logged decision.
        arm: index of the arm that it always plays; None for any other policy.
    """

    label: str
    probs: np.ndarray
    arm: int | None = None


def resolve_target(
    log: LoggedDecisions, target: Any, probs_of: Callable[[Any], np.ndarray] | None = None
) -> list[Component]:
    """Return the components of a target: one, or two for a difference, the second of which is subtracted.

    Args:
        target: an arm; a pair of arms (first minus second); {arm: probability}; a function of a context that returns the
            probabilities of all arms, as a dict or in the order of the arms; or a selector.
        probs_of: selector -> (T, A), its probabilities on the logged path; None without a model.

    Raises:
        ValueError: for an unknown arm, or probabilities that are none.
    """
    if isinstance(target, Mapping):
        probs = _fixed(log, target)
        return [Component(_policy_words(target), np.broadcast_to(probs, (log.arm.size, len(log.names))))]
    if isinstance(target, np.ndarray):
        raise ValueError(f"target is an array, {target!r}: give the probabilities by arm, {{arm: probability}}")
    if isinstance(target, tuple | list) and target not in log.names:
        if len(target) != 2 or target[0] == target[1]:
            raise ValueError(f"target is {target!r}, expected a pair of two different arms (first minus second)")
        return [_arm(log, target[0]), _arm(log, target[1])]
    if isinstance(target, Selector):
        if probs_of is None:
            raise ValueError("target is a selector: give model=, whose posterior it decides from")
        return [Component(f"{target} on the logged path", probs_of(target))]
    if callable(target):
        return [Component(getattr(target, "__name__", "policy"), _by_context(log, target))]
    return [_arm(log, target)]


def contrast_words(components: list[Component]) -> str:
    """Name what is estimated."""
    return " minus ".join(component.label for component in components)


def _arm(log: LoggedDecisions, name: Any) -> Component:
    if name not in log.names:
        raise UnknownArm(f"target names the arm {name!r}, expected one of {list(log.names)}")
    index = log.names.index(name)
    probs = np.zeros(len(log.names))
    probs[index] = 1.0
    return Component(str(shown_name(name)), np.broadcast_to(probs, (log.arm.size, len(log.names))), index)


def _policy_words(target: Mapping[Any, float]) -> str:
    shown = ", ".join(f"{shown_name(name)}: {float(prob):.3g}" for name, prob in list(target.items())[:4])
    return f"policy {{{shown}{', ...' if len(target) > 4 else ''}}}"


def _fixed(log: LoggedDecisions, target: Mapping[Any, float]) -> np.ndarray:
    unknown = [name for name in target if name not in log.names]
    if unknown:
        raise UnknownArm(f"target names the arms {unknown}, expected some of {list(log.names)}")
    probs = as_plain_numbers([target.get(name, 0.0) for name in log.names], "the probabilities of target")
    if probs.ndim > 1:
        raise ValueError(f"target is {target!r}, expected one probability for each arm")
    return _checked(probs[None], "target")[0]


def _by_context(log: LoggedDecisions, policy: Callable[[Any], Any]) -> np.ndarray:
    if log.contexts is None:
        raise ValueError("target is a function of the context, but the log has no contexts; give {arm: probability}")
    found = []
    for row in range(log.arm.size):
        answer = policy(jax.tree.map(lambda leaf, row=row: leaf[row], log.contexts))
        found.append([answer.get(name, 0.0) for name in log.names] if isinstance(answer, Mapping) else answer)
    probs = np.asarray(found, float)
    if probs.shape != (log.arm.size, len(log.names)):
        raise ValueError(f"target returned {probs.shape[1:]} numbers, expected one for each of {len(log.names)} arms")
    return _checked(probs, "target")


def _checked(probs: np.ndarray, name: str) -> np.ndarray:
    wrong = np.flatnonzero((probs < 0).any(1) | ~(np.abs(probs.sum(1) - 1.0) < 1e-6))
    if wrong.size:
        raise ValueError(f"{name} gives {probs[wrong[0]].tolist()}, expected probabilities that add up to 1")
    return probs / probs.sum(1, keepdims=True)


_OTHER_QUANTITY = (
    "the program maximises another quantity than the one that is evaluated here, so the outcome model is a running mean, and "
    "the model has no interval of its own"
)


def with_value(
    log: LoggedDecisions, model: RewardModel | None, value: Callable[..., Any] | None, outcome: str | None
) -> tuple[LoggedDecisions, bool]:
    """Return a log whose rewards are what is evaluated, and whether the model's expected reward, if any, is the mean of that.

    Args:
        value: a function of the outcomes, as an array (T,), or as {outcome: (T,)} of several; it may also take the arms,
            (T,), and the contexts, with a leading axis. None takes `outcome`.
        outcome: None takes the only one, if its mean is what the program maximises.

    Raises:
        ValueError: if it is not clear what to evaluate, or the function cannot be used.
    """
    if value is not None and outcome is not None:
        raise ValueError(f"value= and outcome={outcome!r} both say what to evaluate: give one of them")
    outcomes = {"reward" if model is None else model.outcomes[0]: log.reward} if log.outcomes is None else log.outcomes
    log = log._replace(outcomes=dict(outcomes))  # the model learns these, whatever is evaluated
    if value is not None:
        if not callable(value):
            raise ValueError(f"value must be a function of the outcomes, got {value!r}; outcome= names one of them")
        contexts = log.contexts if log.learnt_contexts is None else log.learnt_contexts
        reward = _call(value, outcomes, log.arm, contexts)
        return _judged(log._replace(reward=reward), model is None or _is_maximised(model, value, log))
    if outcome is None and len(outcomes) > 1:
        raise ValueError(
            f"the experiment has the outcomes {list(outcomes)}: name the one to evaluate with outcome=, or give value=, a "
            "function of {outcome: array}"
        )
    name = next(iter(outcomes)) if outcome is None else outcome
    if name not in outcomes:
        raise ValueError(f"outcome is {name!r}, expected one of {list(outcomes)}")
    log = log._replace(reward=np.asarray(outcomes[name], float))
    if model is None or model.is_reward_an_outcome:
        return log, True
    is_maximised = _is_maximised(model, lambda given: given[name] if isinstance(given, Mapping) else given, log)
    if outcome is None and not is_maximised:
        raise ValueError(
            f"the program maximises its own expected_reward, which is not the mean of {name!r}: say what a decision earned "
            "with value=, a function of the outcome (and of arm and context), such as lambda outcome, arm: price[arm] * "
            f"outcome; or evaluate the outcome itself with outcome={name!r}"
        )
    return _judged(log, is_maximised)


def _judged(log: LoggedDecisions, is_maximised: bool) -> tuple[LoggedDecisions, bool]:
    return log if is_maximised else log._replace(cautions=(*log.cautions, _OTHER_QUANTITY)), is_maximised


def _call(value: Callable[..., Any], outcomes: Mapping[str, np.ndarray], arm: np.ndarray, contexts: Any) -> np.ndarray:
    given = next(iter(outcomes.values())) if len(outcomes) == 1 else dict(outcomes)
    try:
        found = np.asarray(value(*(given, arm, contexts)[: _num_arguments(value)]), float)
    except Exception as error:
        what = "an array" if len(outcomes) == 1 else f"{{outcome: array}} of {list(outcomes)}"
        raise ValueError(f"value= was called once with {what} of {arm.size} rows, and raised {error!r}") from error
    if found.shape != arm.shape:
        raise ValueError(
            f"value= returned an array of shape {found.shape}, expected {arm.shape}: one number for each row"
        )
    wrong = np.flatnonzero(~np.isfinite(found))
    if wrong.size:
        raise ValueError(f"value= returned {found[wrong[0]]} for row {wrong[0]}, expected finite numbers")
    return found


def _num_arguments(value: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # a function without a signature
        return 1
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 3
    needed = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    required = [one for one in needed if one.default is one.empty or one.name in ("arm", "context")]
    return min(max(len(required), 1), 3)


def _is_maximised(model: RewardModel, value: Callable[..., Any], log: LoggedDecisions) -> bool:
    """Return whether the program's expected reward is the mean of a value at the contexts of a log, judged by simulation.

    The difference of the two has mean 0 at every value of the latents and at every context, so its product with any function of
    them has too. Three are taken: 1; the side of the median on which the expected reward lies; and for every context the sign
    that the mean difference there has in the other half of the draws.
    """
    decided, learnt = _context_rows(model, log.contexts), _context_rows(model, log.learnt_contexts)
    learnt = decided if log.learnt_contexts is None else learnt
    shape = _NUM_DRAWS, _NUM_PLAYS

    @jax.jit
    def play(keys: Any, draws: Any, rows: Any) -> dict[str, Any]:
        def one(key: Any, latents: Any) -> dict[str, Any]:
            trace = model.trace(latents, rows, learnt, key=key)
            masks = {name: mask_of(trace[name]["fn"]) for name in model.outcomes}
            values = {name: trace[name]["value"] for name in model.outcomes}
            return {
                name: own if masks[name] is None else jnp.where(masks[name], own, 0) for name, own in values.items()
            }

        return jax.vmap(one)(keys, draws)

    @jax.jit
    def expect(draws: Any) -> Any:
        if decided is None:
            return jnp.repeat(model.expected_rewards(draws, None)[:, None], _NUM_PLAYS, axis=1)
        return jax.vmap(lambda context: model.expected_rewards(draws, context), out_axes=1)(decided)

    with jax.enable_x64(True):
        key_latents, key_plays = jr.split(jr.key(0))
        draws = model.sample_prior(key_latents, _NUM_DRAWS)
        table = np.asarray(expect(draws))
        each = jax.tree.map(lambda leaf: np.concatenate([np.asarray(leaf)] * _NUM_DRAWS), learnt)
        for arm in range(model.num_arms):
            plays = play(jr.split(jr.fold_in(key_plays, arm), _NUM_DRAWS), draws, jnp.full(_NUM_PLAYS, arm))
            flat = {name: np.asarray(values, float).reshape(-1) for name, values in plays.items()}
            expected = table[:, :, arm]
            difference = _call(value, flat, np.full(expected.size, arm), each).reshape(shape) - expected
            first, second = np.sign([half.mean(axis=0) for half in np.array_split(difference, 2)])
            by_context = np.repeat([second, first], _NUM_DRAWS // 2, axis=0)
            by_latents = np.where(expected > np.median(expected), 1.0, -1.0)
            rounding = 1e-6 * float(np.abs(expected).mean())
            for sign in (1.0, by_latents, by_context):
                error = float(np.std(sign * difference)) / math.sqrt(difference.size)
                if abs(float(np.mean(sign * difference))) > _LARGEST_DEVIATION * error + rounding:
                    return False
    return True


def _context_rows(model: RewardModel, contexts: Any) -> Any:
    """Return a row for each play: contexts of the log, evenly spaced and repeated; without any, the example."""
    num_rows = len(jax.tree.leaves(contexts)[0]) if jax.tree.leaves(contexts) else 0
    if not num_rows:
        return model.context_rows(_NUM_PLAYS)
    rows = np.linspace(0, num_rows - 1, min(num_rows, _NUM_PLAYS)).astype(int)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[np.resize(rows, _NUM_PLAYS)], contexts)
