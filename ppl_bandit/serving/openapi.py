"""The OpenAPI document: FastAPI writes its own routes, and the hot endpoints are added here from the same message classes."""

from typing import Any

from pydantic import BaseModel, create_model
from pydantic.json_schema import models_json_schema

from ppl_bandit.serving.messages import DecisionBatch, DecisionRequest, FlagRequest, RewardBatch, RewardRequest
from ppl_bandit.serving.problems import REFUSALS, ProblemDocument


class DecisionAnswer(BaseModel):
    """A decision: send `id` with the reward; `propensity` is the probability with which this arm was played."""

    id: str
    arm: int | str
    propensity: float
    best_arm_probs: list[float]
    num_candidates: int
    version: int


class SlateAnswer(BaseModel):
    """With `size`: distinct arms, and one decision for each place."""

    arms: list[int | str]
    propensity: float
    decisions: list[DecisionAnswer]


class RewardAnswer(BaseModel):
    """Whether the reward was new, or why it was refused."""

    recorded: bool | None = None
    problem: ProblemDocument | None = None


class FlagAnswer(BaseModel):
    """An evaluation of OpenFeature's protocol, or its error."""

    key: str | None = None
    value: Any = None
    variant: str | None = None
    reason: str | None = None
    metadata: dict[str, Any] | None = None
    errorCode: str | None = None
    errorDetails: str | None = None


DecisionsAnswer = create_model("DecisionsAnswer", decisions=(list[DecisionAnswer], ...))
RewardsAnswer = create_model("RewardsAnswer", results=(list[RewardAnswer], ...))
FlagsAnswer = create_model("FlagsAnswer", flags=(list[FlagAnswer], ...))

# (path, message, summary, answers)
_HOT: tuple[tuple[str, type[BaseModel], str, tuple[type[BaseModel], ...]], ...] = (
    (
        "/v1/experiments/{name}/decisions",
        DecisionRequest,
        "Decide which arm to play, and record the decision.",
        (DecisionAnswer, SlateAnswer),
    ),
    ("/v1/experiments/{name}/decisions/batch", DecisionBatch, "Decide often, all or none.", (DecisionsAnswer,)),
    ("/v1/experiments/{name}/rewards", RewardRequest, "Record the reward of a decision.", (RewardAnswer,)),
    ("/v1/experiments/{name}/rewards/batch", RewardBatch, "Record rewards, each for itself.", (RewardsAnswer,)),
    ("/ofrep/v1/evaluate/flags", FlagRequest, "Evaluate all flags (OpenFeature).", (FlagsAnswer,)),
    ("/ofrep/v1/evaluate/flags/{name}", FlagRequest, "Evaluate one flag (OpenFeature).", (FlagAnswer,)),
)


def complete_document(document: dict[str, Any]) -> dict[str, Any]:
    """Add the hot endpoints, the keys and the problem document to what FastAPI describes."""
    kinds: Any = [(kind, "validation") for _, kind, _, answers in _HOT for kind in (kind, *answers)]
    kinds.append((ProblemDocument, "validation"))
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(models_json_schema(kinds, ref_template="#/components/schemas/{model}")[1]["$defs"])
    for path, kind, summary, answers in _HOT:
        is_flag = path.startswith("/ofrep")
        answer = {"anyOf": [_ref(one.__name__) for one in answers]}
        operation: dict[str, Any] = {
            "tags": ["OpenFeature" if is_flag else "decide"],
            "summary": summary,
            "operationId": f"{kind.__name__}_{path.strip('/').replace('/', '_').replace('{name}', 'name')}",
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(kind.__name__)}}},
            "responses": {"200": {"description": "done", "content": {"application/json": {"schema": answer}}}},
        }
        if path == "/ofrep/v1/evaluate/flags":
            operation["responses"]["304"] = {"description": "as the ETag in If-None-Match"}
        if "{name}" in path:
            text = {"type": "string", "minLength": 1, "maxLength": 100}
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": text}]
        document["paths"][path] = {"post": operation}
    for schema in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form of a refusal is not used
        schemas.pop(schema, None)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        has_key = path.startswith(("/v1", "/ofrep", "/metrics"))
        for operation in operations.values():
            if has_key:
                operation["security"] = [{"key": []}]
            refusal = _refusal(path.startswith("/ofrep"))
            operation["responses"] |= {str(status): refusal for status in (REFUSALS if has_key else (500, 503))}
    return document


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _refusal(is_flag: bool) -> dict[str, Any]:
    kind, schema = ("application/json", "FlagAnswer") if is_flag else ("application/problem+json", "ProblemDocument")
    return {"description": "refused", "content": {kind: {"schema": _ref(schema)}}}
