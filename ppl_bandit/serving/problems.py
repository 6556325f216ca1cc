"""Problem documents (RFC 9457): every refusal of the service, and the table of the library's errors."""

import logging
import traceback
from http import HTTPStatus
from typing import Any

import orjson
from pydantic import BaseModel

from ppl_bandit.journal.stores.store import JournalError, JournalTimeout
from ppl_bandit.types import (
    AlreadyRewarded,
    BanditError,
    ExperimentStopped,
    InvalidContext,
    RequestIdReused,
    UnknownArm,
    UnknownDecision,
)

logger = logging.getLogger("ppl_bandit.serving")

MEDIA_TYPE = "application/problem+json"
REFUSALS = (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 431, 500, 503, 504)


class ProblemDocument(BaseModel):
    """What every error answers."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str


class Problem(Exception):
    """A refusal.

    Args:
        status: of HTTP.
        code: reason in one word, for programs and for the metric of refusals.
        detail: reason and remedy, for people.
        retry_after: seconds after which to try again.
    """

    def __init__(self, status: int, code: str, detail: str, retry_after: int | None = None):
        super().__init__(detail)
        self.status, self.code, self.detail, self.retry_after = status, code, detail, retry_after

    def to_dict(self) -> dict[str, Any]:
        """Return the document."""
        title = HTTPStatus(self.status).phrase
        return {"type": "about:blank", "title": title, "status": self.status, "detail": self.detail, "code": self.code}

    def body(self) -> bytes:
        """Return the document as JSON."""
        return orjson.dumps(self.to_dict())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer."""
        found = [(b"content-type", MEDIA_TYPE.encode())]
        if self.retry_after is not None:
            found.append((b"retry-after", str(self.retry_after).encode()))
        if self.status in (408, 413, 431):  # the rest of the request is not read
            found.append((b"connection", b"close"))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found


# Errors of the library, the first class that fits; their messages give the argument, what was expected and the remedy.
_REFUSALS: tuple[tuple[type[Exception], int, str], ...] = (
    (UnknownDecision, 404, "unknown_decision"),
    (AlreadyRewarded, 409, "already_rewarded"),
    (RequestIdReused, 409, "request_id_reused"),
    (ExperimentStopped, 409, "experiment_stopped"),
    (InvalidContext, 422, "invalid_context"),
    (UnknownArm, 422, "unknown_arm"),
    (BanditError, 422, "refused"),
    (ValueError, 422, "refused"),
)
_HERE = {  # what a remedy of the library, which speaks of its own methods, is over HTTP
    "already_rewarded": "; over HTTP, PUT .../decisions/{id}/reward replaces it",
    "experiment_stopped": "; over HTTP, POST .../resume after a pause; `ppl-bandit journal URL look` takes a look",
}


def or_raise(result: Any) -> Any:
    """Return the result of a queue, or raise the refusal that it is."""
    if isinstance(result, BaseException):
        raise as_problem(result)
    return result


def as_problem(error: BaseException) -> Problem:
    """Return the refusal that an error of the library stands for; an unforeseen one is logged, without its message."""
    if isinstance(error, Problem):
        return error
    for kind, status, code in _REFUSALS:
        if isinstance(error, kind):
            return Problem(status, code, str(error) + _HERE.get(code, ""))
    if isinstance(error, JournalTimeout):
        logger.error("the journal did not answer in time: %s", error)
        return Problem(504, "journal_timeout", "it may be recorded: repeat the request with the same request_id", 1)
    if isinstance(error, JournalError):
        logger.error("the journal failed: %s", error)
        detail = "the journal cannot record now, and nothing was recorded: repeat the request with the same request_id"
        return Problem(503, "journal_failed", detail, retry_after=1)
    # A message may hold what a caller sent, and contexts and units stay out of the log: its class and place are enough.
    place = list(traceback.extract_tb(error.__traceback__))[-1:]
    logger.error("unforeseen %s at %s", type(error).__name__, place)
    return Problem(500, "internal_error", "the service failed on this request; its log says where")
