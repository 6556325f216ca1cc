"""The engine that a program deserves: exact where that is proved, draws with evidence elsewhere."""

from ppl_bandit.engines.approximate.reweight import reweight
from ppl_bandit.engines.exact.conjugate import conjugate
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Engine, NotConjugate

__all__ = ["choose"]


def choose(model: RewardModel) -> Engine:
    """Return the exact engine of a program if its posterior is proved conjugate, and `reweight` otherwise.

    The explanation says which, and carries the refusal of the exact engine, with what would make the program conjugate.
    """
    try:
        return conjugate(model)
    except NotConjugate as refusal:
        engine = reweight(model)
        exact = refusal.explanation
    refused = exact.reason if exact is not None else "the program is not provably conjugate"
    remedy = exact.report if exact is not None else refused
    explanation = engine.explanation._replace(
        reason=f"{refused}; so {engine.explanation.reason}",
        report=f"{engine.explanation.report}\n\nNot exact, because:\n{remedy}",
    )
    return engine._replace(explanation=explanation)
