"""`ppl-bandit check`: one finding per model."""

from typing import NamedTuple

from ppl_bandit.commands.model_files import ModelFileError, load_model
from ppl_bandit.engines.choose import PROVED
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import InvalidProgram, NotConjugate

__all__ = ["Finding", "check_model"]


class Finding(NamedTuple):
    """What is known about a model without data.

    Attributes:
        verdict: "exact"; "exact given ..." a few sites; "not exact"; or "invalid".
        families: posterior families by site, for a model that is exact or exact given a few sites.
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
    """Load a model and say whether it is exact, or exact given a few sites; never raises for a model that is merely wrong."""
    try:
        file = load_model(spec)
        model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    except (ModelFileError, InvalidProgram) as error:
        return Finding(spec, "invalid", "", str(error), "", "")
    refusals = []
    for factory in PROVED:
        try:
            explanation = factory(model).explanation
        except NotConjugate as refusal:
            refusals.append(refusal)
            continue
        families = ", ".join(f"{site}: {words}" for site, words in explanation.sites.items())
        verdict = "exact" if explanation.is_exact else explanation.reason.partition(":")[0]
        return Finding(file.name, verdict, families, explanation.reason, model.expected_reward_way, explanation.report)
    report = "\n".join("" if refusal.explanation is None else refusal.explanation.report for refusal in refusals)
    return Finding(file.name, "not exact", "", str(refusals[0]), model.expected_reward_way, report)
