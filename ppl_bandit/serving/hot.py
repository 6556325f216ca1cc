"""The endpoints that a product calls all the time: decisions, rewards, their batches, and OpenFeature's remote evaluation.

They are plain ASGI in front of the FastAPI application, on the same port and in the same OpenAPI document: a route of FastAPI
costs about as much again as the decision itself, and its middleware alone a tenth of it.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping
from typing import Any

import orjson

from ppl_bandit.live.decisions import Decision, Slate
from ppl_bandit.serving import openfeature
from ppl_bandit.serving.access import Gate
from ppl_bandit.serving.experiments import ServedExperiment
from ppl_bandit.serving.messages import DecisionBatch, DecisionRequest, FlagRequest, RewardBatch, RewardRequest, parse
from ppl_bandit.serving.metrics import Metrics
from ppl_bandit.serving.problems import Problem, as_problem, or_raise

MAX_BODY = 1 << 20
MAX_HEADERS = 16 << 10
_TOO_LARGE = f"the body may have at most {MAX_BODY} bytes: send smaller batches"
_JSON = (b"content-type", b"application/json")
_ROUTE = re.compile(r"/v1/experiments/([^/]+)/(decisions|rewards)(/batch)?|/ofrep/v1/evaluate/flags(?:/([^/]+))?")


class HotRoutes:
    """The hot endpoints, as plain ASGI."""

    def __init__(self, gate: Gate, metrics: Metrics):
        self._gate, self._metrics = gate, metrics

    def find(self, scope: Any) -> re.Match | None:
        """Return the hot endpoint that a request asks for; None for any other."""
        if scope["type"] != "http":
            return None
        return _ROUTE.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))

    async def answer(self, found: re.Match, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request for a hot endpoint."""
        kind, name = found[2], found[1]
        status, headers, body = 200, [_JSON], b""
        answered = 0.0
        try:
            if scope["method"] != "POST":
                raise Problem(405, "method_not_allowed", f"{scope['method']} is not offered here: use POST")
            given = dict(scope["headers"])
            _check_size(scope, given)
            if kind is None:
                status, headers, body = await self._flags(found[4], scope, given, receive)
            else:
                experiment = self._gate.open(scope, given, "decide", name)[1]
                content = await _read_json(given, receive)
                answered = time.perf_counter()
                decide = self._decisions if kind == "decisions" else self._rewards
                body = await decide(experiment, content, found[3] is not None)
        except Exception as error:
            problem = as_problem(error)
            self._metrics.count_refusal(name or found[4] or "", problem.code)
            status, headers, body = problem.status, problem.headers(), problem.body()
            if status == 405:
                headers.append((b"allow", b"POST"))
        if answered:
            self._metrics.observe(name, kind, time.perf_counter() - answered)
        await _send(receive, send, status, headers, body)

    async def _decisions(self, experiment: ServedExperiment, content: bytes, is_batch: bool) -> bytes:
        if is_batch:
            batch = parse(DecisionBatch, content)
            found = await experiment.submit(experiment.decisions, batch, len(batch.requests))
            return orjson.dumps({"decisions": list(map(decision_answer, or_raise(found)))}, option=_NUMPY)
        found = await experiment.submit(experiment.decisions, parse(DecisionRequest, content))
        return orjson.dumps(decision_answer(or_raise(found)), option=_NUMPY)

    async def _rewards(self, experiment: ServedExperiment, content: bytes, is_batch: bool) -> bytes:
        if not is_batch:
            found = await experiment.submit(experiment.rewards, parse(RewardRequest, content))
            return b'{"recorded":true}' if or_raise(found) else b'{"recorded":false}'
        rows = parse(RewardBatch, content).rewards
        found = await experiment.submit(experiment.rewards, rows, len(rows))
        results = []
        for result in or_raise(found):
            if isinstance(result, Problem):
                self._metrics.count_refusal(experiment.name, result.code)
                results.append({"problem": result.to_dict()})
            else:
                results.append({"recorded": result})
        return orjson.dumps({"results": results})

    async def _flags(self, name: str | None, scope: Any, given: Mapping[bytes, bytes], receive: Any) -> Any:
        """Answer OpenFeature's remote evaluation, whose errors have a form of their own."""
        begun = 0.0
        try:
            if name is None:
                access = self._gate.enter(scope, given)
                self._gate.check_role(access, "decide")
                opened = self._gate.opened(access)
            else:
                opened = [self._gate.open(scope, given, "decide", name)[1]]
            request: FlagRequest = parse(FlagRequest, await _read_json(given, receive))
            begun = time.perf_counter()
            if name is None:
                body = await openfeature.evaluate_all(opened, request.context)
                tag = openfeature.entity_tag(body)
                headers = [_JSON, (b"etag", tag)]
                wanted = [one.strip().removeprefix(b"W/") for one in given.get(b"if-none-match", b"").split(b",")]
                if tag in wanted or b"*" in wanted:
                    return 304, headers[1:], b""
                return 200, headers, body
            return 200, [_JSON], orjson.dumps(await openfeature.evaluate(opened[0], request.context))
        except Problem as problem:
            self._metrics.count_refusal(name or "", problem.code)
            status, document = openfeature.error_answer(name, problem)
            headers = [_JSON, *[header for header in problem.headers() if header[0] != b"content-type"]]
            return status, headers, orjson.dumps(document)
        finally:
            if begun:
                self._metrics.observe(name or "", "flags", time.perf_counter() - begun)


class LimitedRoutes:
    """ASGI middleware that limits what the other routes read; an unforeseen error is answered, so that no server logs it."""

    def __init__(self, app: Any, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_started = False

        async def send_on(message: Any) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            _check_size(scope, dict(scope["headers"]))
            await self._app(scope, _limited(receive), send_on)
        except Exception as error:
            problem = as_problem(error)
            if is_started:
                raise RuntimeError("the answer ended early") from None
            self._metrics.count_refusal("", problem.code)
            await _send(receive, send, problem.status, problem.headers(), problem.body())


_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def decision_answer(decision: Decision | Slate) -> dict[str, Any]:
    """Return what a decision answers."""
    if isinstance(decision, Slate):
        own = [decision_answer(one) for one in decision.decisions]
        return {"arms": decision.arms, "propensity": decision.propensity, "decisions": own}
    return {
        "id": decision.id,
        "arm": decision.arm,
        "propensity": decision.propensity,
        "best_arm_probs": decision.best_arm_probs,
        "num_candidates": int(decision.num_candidates),
        "version": decision.version,
    }


def _check_size(scope: Any, headers: Mapping[bytes, bytes]) -> None:
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if size + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
        raise Problem(431, "headers_too_large", f"the address and the headers have more than {MAX_HEADERS} bytes")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY:
        raise Problem(413, "body_too_large", _TOO_LARGE)


async def _read_json(headers: Mapping[bytes, bytes], receive: Any) -> bytes:
    """Return the body of a request, which must say that it is JSON: a form of another site cannot say that."""
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        raise Problem(415, "not_json", "send the body as JSON, with `Content-Type: application/json`")
    if b"content-encoding" in headers:
        raise Problem(415, "encoded_body", "send the body as it is, without Content-Encoding")
    receive, parts, more = _limited(receive), [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem(400, "disconnected", "the connection ended before the body")
        parts.append(message.get("body", b""))
        more = message.get("more_body")
    return b"".join(parts)


def _limited(receive: Any) -> Any:
    """Return a `receive` that refuses a body beyond the limit."""
    size = 0

    async def receive_within() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body") or b"")
        if size > MAX_BODY:
            raise Problem(413, "body_too_large", _TOO_LARGE)
        return message

    return receive_within


async def _send(receive: Any, send: Any, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    if status == 413:  # read on for a moment: a caller whose connection ends while it sends does not see the answer
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while size < 8 * MAX_BODY and (message := await receive()).get("more_body"):
                    size += len(message.get("body", b""))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
