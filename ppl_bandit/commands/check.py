"""`ppl-bandit check`: report for each model whether its posterior is exact, and why."""

import argparse
from typing import NamedTuple

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.engines.choose import candidates
from ppl_bandit.journal.model_files import ModelFileError, load_model
from ppl_bandit.types import InvalidProgram, NotConjugate


class CheckResult(NamedTuple):
    """What is known about a model without data.

    Attributes:
        verdict: "exact"; "exact given ..." a few sites; "not exact"; or "invalid".
        families: posterior family of each site; empty unless the model is exact, or exact given a few sites.
        reason: one sentence: what was proved, why the proof failed, or why the program is invalid.
        report: the full explanation.
    """

    name: str
    verdict: str
    families: str
    reason: str
    expected_reward: str
    report: str


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Check the models; the status is 2 if one of them is invalid."""
    results = []
    for spec in arguments.models:
        result = check_model(spec)
        results.append(result)
        show(f"{result.name:<24} {result.verdict:<9} {result.families or result.reason}")
        if arguments.explain and result.report:
            show(f"{result.report}\n")
    return results, 2 if any(r.verdict == "invalid" for r in results) else 0


def check_model(spec: str) -> CheckResult:
    """Load a model and find out whether it is exact, or exact given a few sites.

    An invalid program is a result, not an exception.
    """
    try:
        file = load_model(spec)
        model = file.reward_model()
    except (ModelFileError, InvalidProgram) as error:
        return CheckResult(spec, "invalid", "", str(error), "", "")
    refusals = []
    proved, _ = candidates(model)
    for factory in proved.values():
        try:
            explanation = factory(model).explanation
        except NotConjugate as refusal:
            refusals.append(refusal)
            continue
        families = ", ".join(f"{site}: {family}" for site, family in explanation.sites.items())
        verdict = "exact" if explanation.is_exact else explanation.reason.partition(":")[0]
        way = model.expected_reward_method
        return CheckResult(file.name, verdict, families, explanation.reason, way, explanation.report)
    first = refusals[0]
    reason = str(first) if first.explanation is None else first.explanation.reason
    report = "\n".join("" if refusal.explanation is None else refusal.explanation.report for refusal in refusals)
    return CheckResult(file.name, "not exact", "", reason, model.expected_reward_method, report)
