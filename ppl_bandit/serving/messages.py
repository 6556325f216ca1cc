"""Bodies of requests and answers of the hot endpoints; the OpenAPI document shows the same classes.

Unknown fields are refused: a misspelt `conext` must not become a decision without context.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from ppl_bandit.serving.problems import Problem

MAX_ROWS = 1000

Text = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]  # PostgreSQL stores no NUL
Arm = Annotated[int, Field(ge=0, lt=2**31)] | Text
Probability = Annotated[float, Field(gt=0, le=1)]
# Optional, but not null: a field that is there says something.
Number = Annotated[float, Field(ge=-1e300, le=1e300)]


def _leave_out_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


class Message(BaseModel):
    """A body: strict types, no unknown field, no nan."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class BatchDecision(Message):
    """One decision of a batch.

    Attributes:
        context: as the program's example context, in JSON.
        unit: of the decision, such as a visitor; it keeps its decision while that stands.
        request_id: repeated, it gives the same decision.
    """

    context: Any = None
    unit: Text | None = None
    request_id: Text | None = None


class DecisionRequest(BatchDecision):
    """One decision.

    Attributes:
        allowed: the arms that may be played; all without it.
        size: number of places of a slate.
    """

    allowed: Annotated[list[Arm], Field(min_length=1, max_length=MAX_ROWS)] | None = None
    size: Annotated[int, Field(ge=1, le=MAX_ROWS)] | None = None


class DecisionBatch(Message):
    """Many decisions, all or none; `allowed` holds for each."""

    requests: Annotated[list[BatchDecision], Field(min_length=1, max_length=MAX_ROWS)]
    allowed: Annotated[list[Arm], Field(min_length=1, max_length=MAX_ROWS)] | None = None


class RewardValue(Message):
    """A reward: a number, or a value for each outcome; `context` has the entries that are known only now."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["reward"]}, {"required": ["outcomes"]}]})

    reward: Number = Field(default=None, json_schema_extra=_leave_out_default)  # type: ignore[assignment]
    outcomes: Annotated[dict[Text, Number], Field(min_length=1, max_length=100)] = Field(
        default=None,  # type: ignore[arg-type]
        json_schema_extra=_leave_out_default,
    )
    context: dict[str, Any] | None = None

    @property
    def value(self) -> float | dict[str, float]:
        """The reward as `Bandit.update` takes it."""
        return self.outcomes if self.reward is None else self.reward


class RewardRequest(RewardValue):
    """The reward of a decision.

    Attributes:
        decision: its id.
        shown: the arm that was really shown, if it is another one.
        propensity: the probability with which that arm was shown.
    """

    decision: Text
    shown: Arm | None = None
    propensity: Probability | None = None
    request_id: Text | None = None


class Correction(RewardRequest):
    """A reward that replaces the one that is recorded; the service builds it of the address and a `RewardValue`."""

    correct: bool = True


class RewardBatch(Message):
    """Many rewards, answered row by row."""

    rewards: Annotated[list[RewardRequest], Field(min_length=1, max_length=MAX_ROWS)]


_FLAG_CONTEXT = {
    "type": "object",
    "required": ["targetingKey"],
    "properties": {"targetingKey": {"type": "string", "minLength": 1, "maxLength": 256, "description": "The unit."}},
}


class FlagRequest(BaseModel):
    """The body of OpenFeature's remote evaluation; a context there has more than the program needs."""

    model_config = ConfigDict(
        extra="ignore", strict=True, allow_inf_nan=False, json_schema_extra={"required": ["context"]}
    )

    context: Annotated[dict[str, Any], WithJsonSchema(_FLAG_CONTEXT)] = Field(default_factory=dict)


def parse(kind: type[BaseModel], body: bytes) -> Any:
    """Read a body.

    Raises:
        Problem: 400 if it is not JSON, 413 for too many rows, 422 with the place of what is wrong.
    """
    try:
        message = kind.__pydantic_validator__.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise Problem(400, "invalid_json", f"the body is not JSON: {first['msg']}") from None
        where = ".".join(map(str, first["loc"])) or "the body"
        if first["type"] == "too_long" and len(first["loc"]) == 1 and where in ("requests", "rewards"):
            raise Problem(
                413, "too_many_rows", f"{where} has too many rows: send at most {MAX_ROWS} in a request"
            ) from None
        raise Problem(422, "invalid_body", f"{where}: {first['msg']}") from None
    for row in message.rewards if kind is RewardBatch else [message] if isinstance(message, RewardValue) else ():
        if (row.reward is None) == (row.outcomes is None):
            raise Problem(422, "invalid_body", "give either reward, a number, or outcomes, {name: number}")
    return message
