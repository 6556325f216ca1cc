"""OpenFeature's remote evaluation protocol (OFREP 0.3): an experiment is a flag, its arms are the variants.

`targetingKey` is the unit, so that a visitor keeps its variant, and an evaluation repeated is no second decision.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from ppl_bandit.serving.experiments import ServedExperiment
from ppl_bandit.serving.messages import DecisionRequest
from ppl_bandit.serving.problems import Problem, as_problem, or_raise

_CODES = {  # {reason of a refusal: (status, the specification's code)}
    "invalid_json": (400, "PARSE_ERROR"),
    "invalid_body": (400, "INVALID_CONTEXT"),
    "no_targeting_key": (400, "TARGETING_KEY_MISSING"),
    "invalid_context": (400, "INVALID_CONTEXT"),
    "refused": (400, "INVALID_CONTEXT"),
    "unknown_experiment": (404, "FLAG_NOT_FOUND"),
    "experiment_stopped": (400, "GENERAL"),
}


async def evaluate(experiment: ServedExperiment, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluation of one flag.

    Raises:
        Problem: if it cannot be evaluated.
    """
    unit = _unit(attributes)
    request = DecisionRequest.model_construct(context=_context(experiment, attributes), unit=unit)
    decision = or_raise(await experiment.submit(experiment.decisions, request))
    value = (experiment.values or {}).get(decision.arm, decision.arm)  # an arm that was added later has no value
    return {
        "key": experiment.name,
        "value": value,
        "variant": str(decision.arm),
        "reason": "SPLIT",
        "metadata": {"decision": decision.id, "propensity": decision.propensity, "version": decision.version},
    }


async def evaluate_all(experiments: Sequence[ServedExperiment], attributes: Mapping[str, Any]) -> bytes:
    """Return the evaluations of some flags, each with its value or its error.

    Raises:
        Problem: without a targeting key, or if a flag cannot be recorded now.
    """
    _unit(attributes)
    found = await asyncio.gather(*(evaluate(own, attributes) for own in experiments), return_exceptions=True)
    flags = []
    for experiment, result in zip(experiments, found, strict=True):
        if isinstance(result, BaseException):
            problem = as_problem(result)
            if problem.status >= 500:
                raise problem
            result = error_answer(experiment.name, problem)[1]
        flags.append(result)
    return orjson.dumps({"flags": flags})


def entity_tag(body: bytes) -> bytes:
    """Return the ETag of an answer: it changes only when a unit gets another decision."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()


def error_answer(name: str | None, problem: Problem) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of a refusal as the specification has them."""
    if problem.code not in _CODES:  # of the service, not of the flag
        return problem.status, {"errorDetails": problem.detail}
    status, code = _CODES[problem.code]
    flag = {} if name is None else {"key": name}
    return status, {**flag, "errorCode": code, "errorDetails": problem.detail}


def _unit(attributes: Mapping[str, Any]) -> str:
    unit = attributes.get("targetingKey")
    if unit is None:
        raise Problem(400, "no_targeting_key", "the context has no targetingKey: it is the unit that keeps its variant")
    if not isinstance(unit, str) or not 0 < len(unit) <= 256 or "\0" in unit:
        raise Problem(400, "invalid_context", "targetingKey must be a text of 1 to 256 characters")
    return unit


def _context(experiment: ServedExperiment, attributes: Mapping[str, Any]) -> Any:
    """Return the program's context from the attributes: its entries by name, or the attribute `context`."""
    example = experiment.bandit.model.context
    if example is None:
        return None
    if not isinstance(example, Mapping):
        return attributes.get("context")
    return {name: attributes[name] for name in example if name in attributes}
