"""Choose an engine: exact if that is proved, exact given a few sites if that is proved, weighted particles otherwise.

For programs whose latents move, the exact engine is a Kalman filter and the particles are those of a particle filter. A
deferred engine is built when one of its functions is first called: after a warm start, the first decision and update run
exported functions and need no proof.
"""

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Engine, Explanation, NotConjugate


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Return what `deferred_engine` needs to know of an engine, as JSON values; no text that describes a program."""
    capabilities = engine.capabilities._asdict()
    return {
        "engine": engine.explanation.engine,
        "is_exact": engine.explanation.is_exact,
        "settings": dict(engine.settings),
        "capabilities": [name for name, own in capabilities.items() if own is not None],
    }


def deferred_engine(facts: Mapping[str, Any], build: Callable[[], Engine]) -> Engine:
    """Return an engine that is built when one of its functions, or the text of its explanation, is first needed.

    Args:
        facts: the `engine_facts` of what `build` returns.
        build: builds the engine.
    """
    built = _once(build)

    def later(find: Callable[[Engine], Any], name: str) -> Callable:
        return lambda *args: getattr(find(built()), name)(*args)

    init, update, sample = (later(lambda engine: engine, name) for name in ("init", "update", "sample"))
    optional = {name: later(lambda engine: engine.capabilities, name) for name in facts["capabilities"]}
    explanation = deferred_explanation(facts["engine"], facts["is_exact"], lambda: built().explanation)
    return Engine(init, update, sample, explanation, facts["settings"], Capabilities(**optional))


def deferred_explanation(engine: str, is_exact: bool, explain: Callable[[], Explanation]) -> Explanation:
    """Return an explanation whose reason, sites and report are made when one of them is first read.

    Args:
        explain: returns the whole explanation.
    """
    explanation = _DeferredExplanation(engine, is_exact, "", {})
    explanation.explain = _once(explain)
    return explanation


class _DeferredExplanation(Explanation):
    explain: Callable[[], Explanation]
    reason = property(lambda self: self.explain().reason)  # type: ignore[assignment]
    sites = property(lambda self: self.explain().sites)  # type: ignore[assignment]
    report = property(lambda self: self.explain().report)  # type: ignore[assignment]

    def _replace(self, **fields: Any) -> Explanation:  # type: ignore[override]
        return self.explain()._replace(**fields)


def _once(build: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that builds something on its first call, in float64, as a live bandit builds its engines."""
    lock, found = threading.Lock(), list[Any]()

    def in_float64() -> Any:
        with jax.enable_x64(True):
            return build()

    def built() -> Any:
        with lock:
            if not found:
                # In another thread: the caller may be inside a trace, which must not record what building computes.
                with ThreadPoolExecutor(1) as pool:
                    found.append(pool.submit(in_float64).result())
            return found[0]

    return built


def _imported(name: str, **settings: Any) -> Callable[[RewardModel], Engine]:
    """Return a factory that is imported when it is called."""
    return lambda model: getattr(importlib.import_module(__package__), name)(model, **settings)


# Factories that prove their claim about a program or raise NotConjugate, in order of preference.
_PROVED = {"conjugate": _imported("conjugate"), "collapsed": _imported("collapsed", is_selective=True)}
_PROVED_MOVING = {name: _imported(name) for name in ("kalman", "collapsed_kalman")}


def choose(model: RewardModel) -> Engine:
    """Return the exact engine of a program if its posterior is proved conjugate, else `collapsed`, else `reweight`.

    For a program whose latents move these are `kalman`, `collapsed_kalman` and `particle_filter`. `collapsed` is chosen if
    the posterior is proved conjugate given a few sites that are not most of the program. The explanation contains the
    reasons of the engines that refused, with what would make the program conjugate.

    The name of the chosen engine is cached on disk. A later process then skips the proofs that failed, until the text of the
    explanation is read.
    """
    cached = model.load_result("choose")
    if cached is None:
        engine = _first_accepted(model)
        if not engine.explanation.is_exact:  # its proof is needed to build it
            model.save_result("choose", engine.explanation.engine)
        return engine
    name, _ = cached
    proved, otherwise = candidates(model)
    engine = proved.get(name, otherwise)(model)
    own = engine.explanation
    explanation = deferred_explanation(own.engine, own.is_exact, lambda: _first_accepted(model).explanation)
    return engine._replace(explanation=explanation)


def as_engine(model: RewardModel, engine: Any) -> Engine:
    """Return an engine of a model: given itself, its factory, or None for `choose`.

    Raises:
        ValueError: for the name of an engine, and for anything else that is no factory.
    """
    if isinstance(engine, Engine):
        return engine
    if isinstance(engine, str):
        raise ValueError(f"engine is the text {engine!r}: pass the factory itself, as in engine=engines.conjugate")
    if engine is not None and not callable(engine):
        raise ValueError(f"engine must be an engine or a factory such as engines.conjugate, got {engine!r}")
    built = (choose if engine is None else engine)(model)
    if not isinstance(built, Engine):
        raise ValueError(f"engine must be a factory that returns an Engine, it returned {type(built).__name__}")
    return built


def _first_accepted(model: RewardModel) -> Engine:
    refusals: list[NotConjugate] = []
    proved, otherwise = candidates(model)
    for factory in proved.values():
        try:
            return _with_refusals(factory(model), refusals)
        except NotConjugate as refusal:
            refusals.append(refusal)
    return _with_refusals(otherwise(model), refusals)


def candidates(model: RewardModel) -> tuple[Mapping[str, Callable[[RewardModel], Engine]], Callable[..., Engine]]:
    """Return the factories that prove their claim about a program, and the one for any program."""
    return (_PROVED_MOVING, _imported("particle_filter")) if model.moving_sites else (_PROVED, _imported("reweight"))


def _with_refusals(engine: Engine, refusals: Sequence[NotConjugate]) -> Engine:
    """Return an engine whose explanation contains why other engines refused the program."""
    if not refusals:
        return engine
    reasons = [str(error) if error.explanation is None else error.explanation.reason for error in refusals]
    reports = [str(error) if error.explanation is None else error.explanation.report for error in refusals]
    own = engine.explanation
    explanation = own._replace(
        reason=f"{reasons[0]}; so {own.reason}",
        report="\n".join([own.report, "", "Not exact, because:", *reports]),
    )
    return engine._replace(explanation=explanation)
