"""The engine that a program deserves: exact where that is proved, exact given a few sites where that is, draws elsewhere."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ppl_bandit.engines.approximate.reweight import reweight
from ppl_bandit.engines.collapsed.collapsed import collapsed
from ppl_bandit.engines.exact.conjugate import conjugate
from ppl_bandit.numerics.keeping import keep, kept, newest, place
from ppl_bandit.program.fingerprints import code_fingerprint
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Engine, Explanation, NotConjugate

__all__ = ["PROVED", "choose"]

# The engines that have to prove what they claim, in the order in which they are asked.
PROVED = (conjugate, functools.partial(collapsed, is_selective=True))


def choose(model: RewardModel) -> Engine:
    """Return the exact engine of a program if its posterior is proved conjugate, else `collapsed` if it is given a few sites.

    Where neither is proved, or the sites are most of the program, it is `reweight`. The explanation says which, and carries
    the refusals, with what would make the program conjugate.
    """
    where = place("refusals", code_fingerprint(model.program), model.num_arms, model.outcomes)
    refusals = _known_refusals(where, model)
    if len(refusals) < len(PROVED):
        refusals.clear()
        for factory in PROVED:
            try:
                return _with_refusals(factory(model), refusals)
            except NotConjugate as refusal:
                refusals.append(_Refusal(str(refusal), refusal.explanation))
        if where is not None and model.close_fingerprint is not None:
            keep(where + model.close_fingerprint, refusals)
            model.keep_facts()
    return _with_refusals(reweight(model), refusals)


class _Refusal(NamedTuple):
    """What a `NotConjugate` says."""

    message: str
    explanation: Explanation | None


def _known_refusals(where: str | None, model: RewardModel) -> list[_Refusal]:
    """Return what every engine that has to prove something said of this very program, in this process or another."""
    if where is None or newest(where) is None or model.close_fingerprint is None:
        return []
    return kept(where + model.close_fingerprint) or []


def _with_refusals(engine: Engine, refusals: Sequence[_Refusal]) -> Engine:
    if not refusals:
        return engine
    reasons = [message if why is None else why.reason for message, why in refusals]
    reports = [message if why is None else why.report for message, why in refusals]
    own = engine.explanation
    explanation = own._replace(
        reason=f"{reasons[0]}; so {own.reason}",
        report="\n".join([own.report, "", "Not exact, because:", *reports]),
    )
    return engine._replace(explanation=explanation)
