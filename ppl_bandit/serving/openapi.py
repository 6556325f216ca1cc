"""The OpenAPI document: FastAPI writes it of its routes; those of the hot endpoints are here, for their description alone."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel, create_model

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

# (path, message, answer, summary)
_HOT: tuple[tuple[str, type[BaseModel], Any, str], ...] = (
    (
        "/v1/experiments/{name}/decisions",
        DecisionRequest,
        DecisionAnswer | SlateAnswer,
        "Decide which arm to play, and record the decision.",
    ),
    ("/v1/experiments/{name}/decisions/batch", DecisionBatch, DecisionsAnswer, "Decide often, all or none."),
    ("/v1/experiments/{name}/rewards", RewardRequest, RewardAnswer, "Record the reward of a decision."),
    ("/v1/experiments/{name}/rewards/batch", RewardBatch, RewardsAnswer, "Record rewards, each for itself."),
    ("/ofrep/v1/evaluate/flags", FlagRequest, FlagsAnswer, "Evaluate all flags (OpenFeature)."),
    ("/ofrep/v1/evaluate/flags/{name}", FlagRequest, FlagAnswer, "Evaluate one flag (OpenFeature)."),
)
_WITHOUT_KEY = (405, 413, 431, 500, 503)
_NOT_MODIFIED: Any = {304: {"description": "as the ETag in If-None-Match"}}


def document_hot(router: APIRouter) -> None:
    """Add routes that describe the hot endpoints, which answer before the router is asked."""

    def named(name: Annotated[str, Path(min_length=1, max_length=100)]) -> None:
        pass

    for path, kind, answer, summary in _HOT:

        def describe(body: kind) -> None:  # type: ignore[valid-type]
            pass

        router.add_api_route(
            path,
            describe,
            methods=["POST"],
            response_model=answer,
            summary=summary,
            operation_id=f"{kind.__name__}_{path.strip('/').replace('/', '_').replace('{name}', 'name')}",
            tags=["OpenFeature" if path.startswith("/ofrep") else "decide"],
            dependencies=[Depends(named)] if "{name}" in path else [],
            responses=_NOT_MODIFIED if path.endswith("flags") else {},
        )


def complete_document(document: dict[str, Any]) -> dict[str, Any]:
    """Add the keys and the refusals, which are problem documents, to what FastAPI describes."""
    components = document["components"]
    components["schemas"]["ProblemDocument"] = ProblemDocument.model_json_schema()
    components["schemas"].pop("HTTPValidationError", None)  # FastAPI's own form of a refusal is not used
    components["schemas"].pop("ValidationError", None)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        has_key = path.startswith(("/v1", "/ofrep", "/metrics"))
        kind = "application/json" if path.startswith("/ofrep") else "application/problem+json"
        schema = {"$ref": f"#/components/schemas/{'FlagAnswer' if path.startswith('/ofrep') else 'ProblemDocument'}"}
        refusal = {"description": "refused", "content": {kind: {"schema": schema}}}
        for operation in operations.values():
            if has_key:
                operation["security"] = [{"key": []}]
            operation["responses"] |= {str(status): refusal for status in (REFUSALS if has_key else _WITHOUT_KEY)}
    return document
