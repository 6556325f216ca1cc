"""The engine that a program deserves: exact where that is proved, exact given a few sites where that is, draws elsewhere."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ppl_bandit.engines.approximate.reweight import reweight
from ppl_bandit.engines.collapsed.collapsed import collapsed
from ppl_bandit.engines.exact.conjugate import conjugate
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Engine, Explanation, NotConjugate

__all__ = ["PROVED", "choose"]

# The engines that have to prove what they claim, in the order in which they are asked.
PROVED = (conjugate, functools.partial(collapsed, is_selective=True))
_REFUSALS = "refusals"  # of all of them are kept under this


def choose(model: RewardModel) -> Engine:
    """Return the exact engine of a program if its posterior is proved conjugate, else `collapsed` if it is given a few sites.

    Where neither is proved, or the sites are most of the program, it is `reweight`. The explanation says which, and carries
    the refusals, with what would make the program conjugate.
    """
    refusals: list[_Refusal] = model.found(_REFUSALS) or []
    if not refusals:
        for factory in PROVED:
            try:
                return _with_refusals(factory(model), refusals)
            except NotConjugate as refusal:
                refusals.append(_Refusal(str(refusal), refusal.explanation))
        model.keep(refusals, _REFUSALS)
    return _with_refusals(reweight(model), refusals)


class _Refusal(NamedTuple):
    """What a `NotConjugate` says."""

    message: str
    explanation: Explanation | None


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
