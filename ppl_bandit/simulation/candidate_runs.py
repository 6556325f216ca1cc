"""Simulate the candidates of `tune` on numbered worlds; candidates that share a program are compiled once."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit import selectors as rules
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.simulation.chunks import run_jobs
from ppl_bandit.simulation.datasets import is_stuck
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.executors import ExecutorLost, Study, prepare
from ppl_bandit.simulation.posterior_regret import has_posterior_regret, posterior_regret
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.simulation.standings import CandidateRegret
from ppl_bandit.types import Engine, Key, Selection, Selector

_CPU_CHUNK, _ACCELERATOR_CHUNK = 16, 1 << 14
_NUM_TRUTHS = 32


class SelectorGroup(NamedTuple):
    """Selectors that are compiled as one function of two numbers.

    Attributes:
        make: numbers -> selector.
        numbers: {name of a selector: its numbers}.
    """

    make: Callable[[Any], Selector]
    numbers: dict[str, tuple[float, float]]


def simulate_candidates(
    candidates: Mapping[str, Selector],
    model: RewardModel,
    engine: Engine,
    environment: Environment,
    *,
    num_steps: int,
    num_worlds: int,
    num_samples: int,
    seed: int,
    num_truths: int | None = None,
    executor: Executor | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, CandidateRegret]:
    """Simulate every candidate in the same worlds, number 0 and those after it; compile several candidates at once.

    After Ctrl-C, or if the executor is lost, the candidates that have played all worlds are returned, if there are any.

    Args:
        num_truths: posterior draws by which each history is judged, where `has_posterior_regret`; None is 32, and 1 the
            world's own truth.
        executor: runs the chunks on its workers, which compile their own functions; None runs them in this process.
        say: called with a line of progress.
    """
    most = _NUM_TRUTHS if has_posterior_regret(model, engine, environment) else 1
    num_truths = most if num_truths is None else min(num_truths, most)
    size = max(1, min(_CPU_CHUNK if is_on_cpu() else _ACCELERATOR_CHUNK, num_worlds))
    is_sequential = is_on_cpu() and not engine.explanation.is_exact
    settings: dict[str, Any] = {"num_steps": int(num_steps), "num_samples": int(num_samples)}

    def study_of(group: SelectorGroup) -> Study:
        def play(engine: Engine, key: Key, number: Array, numbers: Float[Array, " 2"]) -> tuple[Array, Array]:
            key = jr.fold_in(key, number)
            record, contexts, state = rollout(key, model, engine, group.make(numbers), environment, **settings)
            if num_truths == 1:
                return jnp.sum(record.regret)[None], is_stuck(record.regret[None])
            truths = engine.sample(jr.fold_in(key, 3), state, num_truths)  # the rollout uses 0 to 2
            return posterior_regret(model, truths, record.arm, contexts)

        return Study(model, engine, play, size, is_sequential)

    begun, key, groups = time.perf_counter(), jr.key(seed), group_selectors(candidates)
    say(f"compiling {len(groups)} functions for {len(candidates)} candidates ...")
    example = (jnp.zeros(2),)
    traced = [prepare(study_of(group), key, size, arguments=example, executor=executor) for group in groups]
    compiled = run_jobs(traced)  # NumPyro keeps its handlers in one global stack, so tracing stays in this thread
    runs = {
        name: (run, numbers)
        for group, run in zip(groups, compiled, strict=True)
        for name, numbers in group.numbers.items()
    }
    say(f"compiled in {time.perf_counter() - begun:.0f} s; simulating {num_worlds} worlds")
    found: dict[str, CandidateRegret] = {}
    try:
        for order, name in enumerate(candidates, 1):
            run, numbers = runs[name]
            chunks = run(key, num_worlds, arguments=(jnp.asarray(numbers),))
            regret, stuck = (np.concatenate(part) for part in zip(*chunks, strict=True))
            found[name] = CandidateRegret(name, candidates[name], regret.astype(float), stuck)
            say(f"{order} of {len(candidates)} candidates have played: {name}")
    except (KeyboardInterrupt, ExecutorLost) as error:
        if not found:
            raise
        say(f"{str(error) or 'interrupted'}: the {len(found)} candidates that have played are compared")
    return found


def group_selectors(candidates: Mapping[str, Selector]) -> list[SelectorGroup]:
    """Group selectors that one compiled function can simulate.

    Indices that differ in patience, or in a positive learning, form a group. So do all selectors that use p-hat only: most
    of their work is computing it.
    """
    groups: dict[Any, SelectorGroup] = {}
    by_probs = {name: rule for name, rule in candidates.items() if _uses_probs_only(rule)}
    for name, rule in candidates.items():
        place: Any = name
        make, numbers = partial(_constant, rule), (0.0, 0.0)
        if name in by_probs:
            place, make = "probabilities", partial(_switch, list(by_probs.values()))
            numbers = float(list(by_probs).index(name)), 0.0
        elif rule.name == rules.optimistic_gittins.__name__:
            horizon, patience, learning = (rule.settings[setting] for setting in ("horizon", "patience", "learning"))
            # A learning of 0 needs nothing that only some engines offer.
            place, make = (horizon, learning > 0), partial(_gittins, horizon, learning > 0)
            numbers = float(patience), float(learning)
        groups.setdefault(place, SelectorGroup(make, {})).numbers[name] = numbers
    return list(groups.values())


def _uses_probs_only(rule: Selector) -> bool:
    return rule.select_from_probs is not None and not rule.uses_marginals


def _gittins(horizon: int, has_learning: bool, numbers: Float[Array, " 2"]) -> Selector:
    return rules.optimistic_gittins(horizon, *(numbers if has_learning else numbers[:1]))


def _constant(rule: Selector, numbers: Float[Array, " 2"]) -> Selector:
    del numbers
    return rule


def _switch(candidates: list[Selector], numbers: Float[Array, " 2"]) -> Selector:
    """Return a selector that behaves like candidate `numbers[0]`, a traced index."""

    def choose(ways: list[Callable[..., Selection]], key: Key, given: Array, step: Any, allowed: Any) -> Selection:
        calls = [lambda way=way: way(key, given, step, allowed=allowed) for way in ways]
        return jax.lax.switch(numbers[0].astype(int), calls)

    def select(key: Key, table: Array, step: Any, *, allowed: Any = None, marginals: Any = None) -> Selection:
        return choose([rule.decide for rule in candidates], key, table, step, allowed)

    def select_from_probs(
        key: Key, probs: Array, step: Any, *, allowed: Any = None, marginals: Any = None
    ) -> Selection:
        return choose(
            [rule.select_from_probs for rule in candidates if rule.select_from_probs], key, probs, step, allowed
        )

    return candidates[0] if len(candidates) == 1 else Selector("one_of", {}, select, select_from_probs)
