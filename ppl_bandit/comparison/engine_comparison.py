"""Compare engines on one program and the same rows: posteriors, decisions and cost, also after fewer rows."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit import engines as library, selectors
from ppl_bandit.comparison.engine_runs import (
    ComparisonSetup,
    CompiledEngine,
    EngineFactory,
    EngineRun,
    check_certified,
    compile_engine,
    flatten_latents,
    make_decide,
    run_engine,
)
from ppl_bandit.comparison.reference_posterior import exact_factory, find_references
from ppl_bandit.comparison.results import (
    INTERRUPTED,
    Comparison,
    DecisionErrors,
    EngineResult,
    LatentErrors,
    Reference,
    StreamPoint,
    element_labels,
    estimate,
    latent_errors,
    r_hat,
    total_variation,
)
from ppl_bandit.comparison.tables import comparison_text, overviews
from ppl_bandit.display.terminal import printable
from ppl_bandit.engines.particles.diagnostics import chain_ess
from ppl_bandit.inputs.checks import check_data
from ppl_bandit.inputs.numbers import Arms, check_count, check_text
from ppl_bandit.live.overview import subsample_contexts
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.runtime import artefact
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.types import Interaction, Key, NotConjugate, Selector, check_function

_DEFAULT_ENGINES = (library.conjugate, library.nuts, library.svi, library.laplace, library.reweight)
_MOVING_ENGINES = (library.kalman, library.collapsed_kalman, library.particle_filter)
_MAX_CONTEXTS = 8  # contexts in which decisions are compared


def compare(
    reward_model: RewardModel,
    data: Interaction,
    engines: Sequence[EngineFactory] | Mapping[str, EngineFactory] | None = None,
    reference: EngineFactory | None = None,
    *,
    num_samples: int = 1000,
    num_runs: int = 4,
    checkpoints: Sequence[int] | None = None,
    selector: Selector | None = None,
    arms: Sequence[str] | None = None,
    seed: int = 0,
    name: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run engines on the same rows, and measure their errors against the exact posterior.

    If the program is not conjugate, a long run of NUTS replaces the exact posterior (`reference.is_exact` is then False). For
    a program whose latents move, the posterior is the law of the next step given the rows: a Kalman filter if it is exact,
    otherwise a long run of Kalman filters over particles, or of a particle filter. All engines run as in the live bandit, in
    float64. After Ctrl-C it returns the finished engines and lists the others as interrupted.

    Args:
        reward_model: the program.
        data: the rows: arms by number (or by name, with `arms`), rewards, contexts.
        engines: engine factories, such as `engines.nuts`; a mapping names them. None takes `conjugate`, `nuts`, `svi`,
            `laplace` and `reweight`; for latents that move, `kalman`, `collapsed_kalman` and `particle_filter`.
        reference: factory of another reference engine, with 20 M draws, such as `partial(engines.nuts, num_draws=20_000)`
            for M = 1000.
        num_samples: posterior draws M of each run, as in a live bandit.
        num_runs: independent runs of each engine, at least 2, for the standard errors.
        checkpoints: numbers of rows after which to compare too; None takes 1/8, 1/4 and 1/2 of the rows.
        selector: makes decisions from the draws; None is double sampling.
        arms: names of the arms.
        seed: random seed.
        name: name of the program, for titles; None takes the function's name.
        say: called with a line of progress.

    Raises:
        ValueError: if an argument is invalid.
    """
    check_reward_model(reward_model, "reward_model")
    if engines is None:
        engines = _MOVING_ENGINES if reward_model.moving_sites else _DEFAULT_ENGINES
    factories = _labelled(engines)
    if reference is not None and not callable(reference):
        raise ValueError(f"reference must be an engine factory, such as engines.nuts, got {reference!r}")
    check_function(say, "say", "of a line of text, such as print")
    if name is not None:
        check_text(name, "name")
    check_count(num_samples, "num_samples", 20)
    check_count(num_runs, "num_runs", 2)
    check_count(seed, "seed", 0)
    selector = selectors.double_sampling() if selector is None else as_selector(selector)
    names = Arms(reward_model.num_arms, arms)
    with jax.enable_x64(True):
        data = check_data(reward_model, data, names)
        parts = _parts(data, _checkpoints(checkpoints, len(data.arm)))
        contexts = jax.tree.map(jnp.asarray, subsample_contexts(data.context, _MAX_CONTEXTS))
        decide = make_decide(reward_model, selector, contexts)
        key_reference, key_engines = jr.split(jr.key(seed))
        setup = ComparisonSetup(reward_model, data, parts, decide, num_samples, num_runs)
        references, exact, refusal = find_references(setup, key_reference, reference, say)
        own_factory = exact_factory(reward_model)
        refused = {_name_of(own_factory): refusal} if refusal else {}
        ready = {label: exact for label, factory in factories.items() if exact is not None and factory is own_factory}
        results, streams = _run_engines(setup, key_engines, factories, ready, refused, references[-1], say)
        stream = [
            StreamPoint(
                setup.num_rows_after(number),
                point,
                {label: _measure_errors(setup, point, [runs[number]]) for label, runs in streams.items()},
            )
            for number, point in enumerate(references[:-1])
        ]
    end = {label: (result.latents, result.decisions) for label, result in results.items()}
    stream.append(StreamPoint(len(data.arm), references[-1], end))
    draws = {"reference": references[-1].target.samples.reshape(-1, references[-1].target.mean.size)}
    for label, result in results.items():
        draws[label] = np.concatenate([flatten_latents(reward_model, at.draws) for at in result.runs])
    found = Comparison(
        getattr(reward_model.program, "__name__", "program") if name is None else name,
        reward_model,
        names.names,
        data,
        contexts,
        element_labels(reward_model, names.names),
        references[-1],
        results,
        {label: why for label, why in refused.items() if label in factories},
        stream,
        num_samples,
        seed,
        selector.name,
        artefact.folder() is not None,
        overviews(reward_model, names.names, data, contexts, draws),
    )
    return dataclasses.replace(found, text=printable(comparison_text(found)))


def _run_engines(
    setup: ComparisonSetup,
    key: Key,
    factories: Mapping[str, EngineFactory],
    ready: Mapping[str, CompiledEngine],
    refused: dict[str, str],
    reference: Reference,
    say: Callable[[str], None],
) -> tuple[dict[str, EngineResult], dict[str, list[EngineRun]]]:
    """Return the result of each engine, and its runs after each part of the rows but the last.

    Args:
        ready: {label: engine that is compiled already}.
        refused: {label: why it is not run}; those that are refused here are added.
    """
    say(f"compiling and running {len(factories)} engines; Ctrl-C keeps the finished ones")
    results: dict[str, EngineResult] = {}
    streams: dict[str, list[EngineRun]] = {}
    for number, (label, factory) in enumerate(factories.items()):
        try:
            if label in refused:
                raise NotConjugate(refused[label])
            runner = ready.get(label) or compile_engine(factory, setup.model, setup.all_rows, setup.num_samples)
            results[label], streams[label] = _run_and_measure(setup, jr.fold_in(key, number), runner, reference)
        except NotConjugate as refusal:
            refused[label] = str(refusal)
            say(f"{label}: not run: {refusal}")
            continue
        except KeyboardInterrupt:
            if not results:
                raise
            say(f"interrupted in {label}: the finished engines are kept")
            refused |= dict.fromkeys((name for name in factories if name not in {*results, *refused}), INTERRUPTED)
            break
        seconds = results[label].seconds_cold, results[label].seconds_warm.value
        say(f"{label}: {setup.num_runs} runs, {seconds[0]:.3g} s cold, {seconds[1]:.3g} s warm")
    return results, streams


def _labelled(engines: Sequence[EngineFactory] | Mapping[str, EngineFactory]) -> dict[str, EngineFactory]:
    is_mapping = isinstance(engines, Mapping)
    given = list(engines.values()) if isinstance(engines, Mapping) else engines
    if callable(given) or not isinstance(given, list | tuple) or not given or not all(map(callable, given)):
        raise ValueError(
            f"engines must be a sequence of engine factories, such as (engines.conjugate, engines.nuts), or a mapping of "
            f"names to them, got {engines!r}"
        )
    labels = [check_text(name, "a name in engines") for name in engines] if is_mapping else list(map(_name_of, given))
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"engines has {labels}: give them different names with a mapping, such as {{'long nuts': factory}}"
        )
    return dict(zip(labels, given, strict=True))


def _name_of(factory: Any) -> str:
    while isinstance(factory, partial):
        factory = factory.func
    return "exact" if factory is library.conjugate else getattr(factory, "__name__", type(factory).__name__)


def _checkpoints(given: Sequence[int] | None, num_rows: int) -> list[int]:
    if given is None:
        return [n for n in sorted({num_rows // 8, num_rows // 4, num_rows // 2}) if n > 0]
    if isinstance(given, str | set | Mapping) or not hasattr(given, "__iter__"):
        raise ValueError(f"checkpoints must be a sequence of numbers of rows, got {given!r}")
    numbers = list(given)
    if any(isinstance(n, bool) or not isinstance(n, int | np.integer) or not 0 < n <= num_rows for n in numbers):
        raise ValueError(f"checkpoints must be numbers of rows between 1 and {num_rows}, got {numbers}")
    return [int(n) for n in sorted(set(numbers)) if n < num_rows]


def _parts(data: Interaction, checkpoints: list[int]) -> list[Interaction]:
    """Split the rows at the checkpoints; parts are masked, not cut, so that an update compiles once."""
    position = np.arange(len(data.arm))
    ends = [*checkpoints, len(data.arm)]
    rows = jax.tree.map(jnp.asarray, data)
    return [
        rows._replace(mask=jnp.asarray((position >= first) & (position < last)))
        for first, last in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _run_and_measure(
    setup: ComparisonSetup, key: Key, runner: CompiledEngine, reference: Reference
) -> tuple[EngineResult, list[EngineRun]]:
    """Run one engine on all rows, several times, and once on the rows up to each checkpoint."""
    key_runs, key_stream = jr.split(key)
    runs = [run_engine(runner, k, [setup.all_rows], setup.decide)[0] for k in jr.split(key_runs, setup.num_runs)]
    if runner.engine.explanation.is_exact:
        check_certified(runs[0])
    stream = run_engine(runner, key_stream, setup.parts[:-1], setup.decide) if len(setup.parts) > 1 else []
    latents, decisions = _measure_errors(setup, reference, runs)
    draws = np.stack([flatten_latents(setup.model, at.draws) for at in runs])
    ess = np.asarray(quick_jit(chain_ess)(jnp.asarray(draws))) / setup.num_runs
    info = dict(runs[-1].info)
    if "divergences" in info:
        info["divergences"] = max(at.info["divergences"] for at in runs)
    if {"autocorrelation", "path_autocorrelation"} & info.keys():  # draws that repeat or are autocorrelated
        ess = np.minimum(ess, info["ess"])
    info["is_trusted"] = float(all(at.info.get("is_trusted", 1.0) for at in runs))
    return EngineResult(
        runner.engine.explanation,
        [at._replace(state=None) for at in runs],
        latents,
        decisions,
        np.minimum(ess, setup.num_samples),
        r_hat(draws),
        info,
        runner.seconds + runs[0].seconds,
        estimate(np.array([at.seconds for at in runs[1:]])),
    ), stream


def _measure_errors(
    setup: ComparisonSetup, reference: Reference, runs: list[EngineRun]
) -> tuple[LatentErrors, DecisionErrors]:
    draws = np.stack([flatten_latents(setup.model, at.draws) for at in runs])
    probs, plays = (np.stack([getattr(at.chosen, part) for at in runs]) for part in ("best_arm_probs", "propensities"))
    decisions = DecisionErrors(
        estimate(probs),
        estimate(np.stack([np.asarray(at.chosen.num_candidates, float) for at in runs])),
        estimate(plays),
        estimate(total_variation(probs, reference.best_arm_probs).mean(axis=1)),
        estimate(total_variation(plays, reference.propensities).mean(axis=1)),
    )
    return latent_errors(draws, reference.target), decisions
