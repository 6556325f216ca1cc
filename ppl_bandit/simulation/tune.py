"""Choose a selector by simulation: play worlds drawn from the program's prior, and take the one with the least regret.

All candidates see the same worlds, contexts and rewards (common random numbers), so that their differences have much smaller
standard errors than their means.

Also here: posterior regret: judge a simulated history by draws from its exact posterior ("hindsight").

In a world drawn from the prior, the truth and a draw from the exact posterior at the end have the same law given the history.
So the regret of the plays under posterior draws has the same law as their regret under the truth, and averaging over several
draws removes the variance due to the truth (Rao-Blackwell). Rules that explore too little fail rarely and badly; one such
history counts the failures that could have happened. To compare rules, one history is worth ten to forty without it.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit import selectors as rules
from ppl_bandit.engines.choose import as_engine
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.simulation.environment import Environment, check_world
from ppl_bandit.simulation.executors import ExecutorLost, Study, check_executor, prepare
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.simulation.simulate import LAST_QUARTER, check_sizes, is_stuck
from ppl_bandit.simulation.standings import CandidateRegret, Tuned, choose_candidate
from ppl_bandit.types import Draws, Engine, Key, Selector, check_function

_CPU_CHUNK, _ACCELERATOR_CHUNK = 16, 1 << 14
_NUM_TRUTHS = 32


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
    """Simulate every candidate in the same worlds, number 0 and those after it, with one compiled function.

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

    def play(engine: Engine, key: Key, number: Array, place: Array) -> tuple[Array, Array]:
        key, rules = jr.fold_in(key, number), list(candidates.values())
        record, contexts, state = rollout(key, model, engine, rules, environment, **settings, place=place)
        if num_truths == 1:
            return jnp.sum(record.regret)[None], is_stuck(record.regret[None])
        truths = engine.sample(jr.fold_in(key, 3), state, num_truths)  # the rollout uses 0 to 2
        return posterior_regret(model, truths, record.arm, contexts)

    begun, key = time.perf_counter(), jr.key(seed)
    say(f"compiling a function for {len(candidates)} candidates ...")
    study = Study(model, engine, play, size, is_sequential)
    run = prepare(study, key, size, arguments=(jnp.asarray(0),), executor=executor)()
    say(f"compiled in {time.perf_counter() - begun:.0f} s; simulating {num_worlds} worlds")
    found: dict[str, CandidateRegret] = {}
    try:
        for order, name in enumerate(candidates, 1):
            chunks = run(key, num_worlds, arguments=(jnp.asarray(order - 1),))
            regret, stuck = (np.concatenate(part) for part in zip(*chunks, strict=True))
            found[name] = CandidateRegret(name, candidates[name], regret.astype(float), stuck)
            say(f"{order} of {len(candidates)} candidates have played: {name}")
    except (KeyboardInterrupt, ExecutorLost) as error:
        if not found:
            raise
        sys.stderr.write(
            f"\n{str(error) or 'interrupted'}: the {len(found)} candidates that have played are compared\n"
        )
    return found


PATIENCES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # steps of about three: smaller steps change the regret little


def tune(
    reward_model: RewardModel,
    horizon: int,
    selectors: Mapping[str, Selector] | Sequence[Selector] | None = None,
    *,
    criterion: str | float = "mean",
    environment: Environment | None = None,
    contexts: Callable[[Key], Any] | None = None,
    engine: Engine | Callable[[RewardModel], Engine] | None = None,
    num_worlds: int = 256,
    num_samples: int = 1000,
    precision: str = "float64",
    seed: int = 0,
    executor: Executor | None = None,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Find the selector with the least regret over a horizon, in worlds drawn from the program's prior.

    Every candidate plays the same worlds, and the differences are paired. If several candidates are equal to the leader within
    sampling error, it takes one whose index has `learning`, which is least sensitive to a wrong prior; else the one with the
    lowest 99th percentile (`ppl_bandit.simulation.standings.choose_candidate`). The result depends on the prior: to see what
    a wrong one costs, give an `environment` of a program with another prior.

    If the engine is exact and worlds come from its own prior, each history is judged by 32 draws from its posterior instead of
    its truth (`ppl_bandit.simulation.tune`): the same law, and at most a tenth of the worlds for the same errors.

    After Ctrl-C, or if the executor is lost, the candidates that have played all worlds are compared: see `is_complete`.

    Args:
        horizon: decisions in the experiment.
        selectors: candidates, {name: selector} or a sequence; None is `candidates(...)`: every selector, and
            `optimistic_gittins` with six values of patience.
        criterion: "mean", or a quantile of regret such as 0.95 if bad runs matter more than the average.
        environment: source of the worlds; None is `Environment.from_prior(reward_model, contexts)`.
        contexts: key -> one context, for a program that takes one.
        engine: an engine of the reward model or its factory; None is `engines.choose`.
        num_worlds: worlds that each candidate plays; with four times as many, differences are known twice as well.
        num_samples: posterior draws M behind a decision, where any are drawn.
        precision: "float64", or "float32", several times faster on a GPU.
        seed: random seed.
        executor: as in `simulate`.
        say: called with a line of progress: the compilation, and each candidate that has played.

    Returns:
        The chosen selector and the scores of all candidates.

    Raises:
        ValueError: if an argument is invalid.
    """
    check_sizes({"horizon": horizon, "num_worlds": num_worlds, "num_samples": num_samples}, precision)
    check_reward_model(reward_model, "reward_model")
    if environment is not None:
        check_world(reward_model, environment, horizon)
    is_quantile = isinstance(criterion, float) and 0.0 < criterion < 1.0
    if criterion != "mean" and not is_quantile:
        raise ValueError(f'criterion must be "mean" or a quantile strictly inside (0, 1), got {criterion!r}')
    if environment is not None and contexts is not None:
        raise ValueError("contexts was given together with environment, which draws its own: leave one of them out")
    check_executor(executor)
    check_count(seed, "seed", 0)
    say = (lambda line: None) if say is None else check_function(say, "say", "of a line of text, such as print")
    with jax.enable_x64(precision == "float64"):
        if environment is None:
            environment = Environment.from_prior(reward_model, contexts)
        built = as_engine(reward_model, engine)
        if selectors is None:
            named = candidates(reward_model, built, horizon)
        else:
            named = {name: as_selector(rule) for name, rule in _named(selectors).items()}
        begun = time.perf_counter()
        found = simulate_candidates(
            named,
            reward_model,
            built,
            environment,
            num_steps=horizon,
            num_worlds=num_worlds,
            num_samples=num_samples,
            seed=seed,
            executor=executor,
            say=say,
        )
        tuned = choose_candidate(found, criterion, horizon, time.perf_counter() - begun)
        return replace(tuned, is_complete=len(found) == len(named))


def candidates(reward_model: RewardModel, engine: Engine, horizon: int) -> dict[str, Selector]:
    """Return the default candidates: every selector, and `optimistic_gittins` with several values of patience."""
    named = {
        "double sampling": rules.double_sampling(),
        "Thompson": rules.thompson(),
        "Bayes-UCB": rules.bayes_ucb(),
        "top-two": rules.top_two(),
        "greedy": rules.greedy(),
        "information-directed": rules.information_directed(),
    }
    for patience in PATIENCES:
        named[f"Gittins, patience {patience:g}"] = rules.optimistic_gittins(horizon, patience)
    if _has_pseudo_counts(reward_model, engine):
        # The second explores more: for users to whom bad runs matter more than the average.
        for patience, learning in ((2.0, 1.0), (4.0, 0.5)):
            rule = rules.optimistic_gittins(horizon, patience, learning)
            named[f"Gittins, patience {patience:g}, learning {learning:g}"] = rule
    return named


def _has_pseudo_counts(reward_model: RewardModel, engine: Engine) -> bool:
    """Return whether the engine knows how many rewards each arm's posterior is worth."""
    known: list[bool] = []

    def read() -> None:
        marginals = engine.capabilities.marginals
        offered = None if marginals is None else marginals(engine.init(jr.key(0)), reward_model.context)
        counts = None if offered is None or offered.tail is None else offered.pseudo_counts
        known.append(counts is not None and counts() is not None)

    with jax.enable_x64(True):
        jax.eval_shape(read)
    return known[0]


def _named(selectors: Mapping[str, Selector] | Sequence[Selector]) -> dict[str, Selector]:
    if not isinstance(selectors, Mapping | Sequence) or isinstance(selectors, str):
        raise ValueError(f"selectors must be {{name: selector}}, or a sequence of selectors, got {selectors!r}")
    named = dict(selectors) if isinstance(selectors, Mapping) else {str(as_selector(s)): s for s in selectors}
    if not named:
        raise ValueError("selectors is empty: give at least one candidate, or None for all of them")
    return named


def has_posterior_regret(reward_model: RewardModel, engine: Engine, environment: Environment) -> bool:
    """Return whether posterior draws have the law of the truth: the posterior is exact, and worlds come from its prior.

    This fails for latents that move, whose posterior is that of the last step, and for programs with factors or observed
    constants: worlds are drawn without them, the posterior includes them.
    """
    is_given = any(own is not None for own in (environment.truth, environment.draws, environment.path))
    is_prior = not is_given and not reward_model.moving_sites
    is_own = is_prior and environment.reward_model is reward_model
    has_posterior = engine.explanation.is_exact and engine.settings.get("discount", 1.0) == 1.0
    return is_own and has_posterior and not reward_model.terms_beside_draws()


def posterior_regret(
    reward_model: RewardModel, truths: Draws, arms: Int[Array, " T"], contexts: Any
) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
    """Return the cumulative regret of a history under each of K truths, and whether it ended stuck (see `is_stuck`).

    Args:
        truths: {site: (K, ...)}.
        contexts: with a leading axis T; None for a program without.
    """
    num_steps = arms.shape[0]
    is_last = np.arange(num_steps) >= num_steps - max(1, num_steps // LAST_QUARTER)
    if contexts is None:
        gaps = _gaps(reward_model, truths, None)
        plays = (arms[:, None] == jnp.arange(gaps.shape[1])).astype(gaps.dtype)
        # A step without regret plays an arm without a gap.
        num_right = (gaps == 0).astype(gaps.dtype) @ jnp.sum(plays * is_last[:, None], axis=0)
        return gaps @ jnp.sum(plays, axis=0), num_right == 0

    def step(carry: tuple[Array, Array], row: Any) -> tuple[tuple[Array, Array], None]:
        (regret, is_stuck), (arm, context, counts) = carry, row
        step_regret = _gaps(reward_model, truths, context)[:, arm]
        return (regret + step_regret, is_stuck & ((step_regret > 0) | ~counts)), None

    num_truths = jax.tree.leaves(truths)[0].shape[0]
    zero = jnp.zeros(num_truths, jnp.result_type(float)), jnp.ones(num_truths, bool)
    return jax.lax.scan(step, zero, (arms, contexts, jnp.asarray(is_last)))[0]


def _gaps(reward_model: RewardModel, truths: Draws, context: Any) -> Float[Array, "K A"]:
    rewards = reward_model.expected_rewards(truths, context)
    return jnp.max(rewards, axis=1, keepdims=True) - rewards
