"""`ppl-bandit check`: one finding per model."""

from typing import NamedTuple

from ppl_bandit import engines
from ppl_bandit.commands.model_files import ModelFileError, load_model
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import InvalidProgram, NotConjugate

__all__ = ["Finding", "check_model"]


class Finding(NamedTuple):
    """What is known about a model without data.

    Attributes:
        verdict: "exact", "not exact" or "invalid".
        families: posterior families by site, for an exact model.
        reason: one sentence: what was proved, what stopped the proof, or what is wrong with the program.
        report: the whole account.
    """

    name: str
    verdict: str
    families: str
    reason: str
    expected_reward: str
    report: str


def check_model(spec: str) -> Finding:
    """Load a model and say whether it is exact; never raises for a model that is merely wrong."""
    try:
        file = load_model(spec)
        model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    except (ModelFileError, InvalidProgram) as error:
        return Finding(spec, "invalid", "", str(error), "", "")
    try:
        explanation = engines.conjugate(model).explanation
    except NotConjugate as refusal:
        report = "" if refusal.explanation is None else refusal.explanation.report
        return Finding(file.name, "not exact", "", str(refusal), model.expected_reward_way, report)
    families = ", ".join(f"{site}: {words}" for site, words in explanation.sites.items())
    return Finding(file.name, "exact", families, explanation.reason, model.expected_reward_way, explanation.report)
