"""Choose an engine: exact if that is proved, exact given a few sites if that is proved, weighted particles otherwise."""

import functools
from collections.abc import Callable, Mapping, Sequence

from ppl_bandit.engines.approximate.reweight import reweight
from ppl_bandit.engines.collapsed.collapsed import collapsed
from ppl_bandit.engines.deferred import deferred_explanation
from ppl_bandit.engines.exact.conjugate import conjugate
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime import disk_cache
from ppl_bandit.types import Engine, NotConjugate

__all__ = ["PROVED", "choose"]

# Factories that prove their claim about a program or raise NotConjugate, in order of preference.
PROVED: Mapping[str, Callable[[RewardModel], Engine]] = {
    "conjugate": conjugate,
    "collapsed": functools.partial(collapsed, is_selective=True),
}


def choose(model: RewardModel) -> Engine:
    """Return the exact engine of a program if its posterior is proved conjugate, else `collapsed`, else `reweight`.

    `collapsed` is chosen if the posterior is proved conjugate given a few sites that are not most of the program. The
    explanation contains the reasons of the engines that refused, with what would make the program conjugate.

    The name of the chosen engine is cached on disk. A later process then skips the proofs that failed, until the text of the
    explanation is read.
    """
    entry = model.cache_entry("choose")
    cached = disk_cache.load(entry)
    if cached is None:
        engine = _first_accepted(model)
        if engine.explanation.engine != "conjugate":  # its proof is needed to build it
            disk_cache.save(entry, engine.explanation.engine)
            model.save_validation()
        return engine
    name, _ = cached
    engine = PROVED.get(name, reweight)(model)
    own = engine.explanation
    explanation = deferred_explanation(own.engine, own.is_exact, lambda: _first_accepted(model).explanation)
    return engine._replace(explanation=explanation)


def _first_accepted(model: RewardModel) -> Engine:
    refusals: list[NotConjugate] = []
    for factory in PROVED.values():
        try:
            return _with_refusals(factory(model), refusals)
        except NotConjugate as refusal:
            refusals.append(refusal)
    return _with_refusals(reweight(model), refusals)


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
