"""A client of the service with the standard library alone; copy this file where the package is not installed.

A request is repeated with the same `request_id` after a lost connection, a refusal for want of room, or a timeout: it is
recorded once, and the answer is the same.
"""

import http.client
import json
import random
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

_AGAIN = (408, 429, 500, 502, 503, 504)


class ServiceError(Exception):
    """The service refused a request, or could not be reached.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        code: the reason in one word, such as "unknown_decision".
    """

    def __init__(self, status: int, code: str, detail: str):
        super().__init__(detail)
        self.status, self.code = status, code


class Client:
    """Makes decisions and reports rewards. Threads may share one; each has a connection of its own.

    Args:
        url: of the service, such as https://bandits.example.org.
        experiment: its name.
        key: with the role `decide`; None for a service on this machine without keys.
        timeout: seconds that one call may take, repetitions included.
    """

    def __init__(self, url: str, experiment: str = "default", key: str | None = None, timeout: float = 10.0):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be such as https://bandits.example.org, got {url!r}")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._timeout = parts.hostname, parts.port, timeout
        self._base = f"{parts.path.rstrip('/')}/v1/experiments/{quote(experiment, safe='')}"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._local = threading.local()

    def decide(
        self,
        context: Any = None,
        *,
        unit: str | None = None,
        allowed: Sequence[Any] | None = None,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Return a decision: id, arm, propensity, best_arm_probs, num_candidates, version.

        Args:
            context: as the program's example context, in JSON values.
            unit: of the decision, such as a visitor, who keeps it.
            allowed: the arms that may be played.
            request_id: of this decision; None makes one.
        """
        body = {"context": context, "unit": unit, "allowed": allowed, "request_id": request_id or uuid.uuid4().hex}
        return self._send("POST", "/decisions", body)

    def decide_many(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a decision for each request {context?, unit?, request_id?}, all or none."""
        rows = [{"request_id": uuid.uuid4().hex, **request} for request in requests]
        return self._send("POST", "/decisions/batch", {"requests": rows})["decisions"]

    def reward(self, decision: str, reward: float | dict[str, float], **more: Any) -> bool:
        """Report a reward, and return whether it was new.

        Args:
            decision: id of the decision.
            reward: a number, or {outcome: number}.
            more: shown, propensity and context.
        """
        value = {"outcomes": reward} if isinstance(reward, dict) else {"reward": reward}
        return self._send("POST", "/rewards", {"decision": decision, **value, **more})["recorded"]

    def reward_many(self, rewards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Report rewards {decision, reward, ...}; return {"recorded": ...} or {"problem": ...} for each."""
        return self._send("POST", "/rewards/batch", {"rewards": list(rewards)})["results"]

    def correct(self, decision: str, reward: float | dict[str, float]) -> None:
        """Replace the reward of a decision."""
        value = {"outcomes": reward} if isinstance(reward, dict) else {"reward": reward}
        self._send("PUT", f"/decisions/{quote(decision, safe='')}/reward", value)

    def discard(self, decision: str) -> None:
        """Say that a decision was not shown, so that no reward will come."""
        self._send("DELETE", f"/decisions/{quote(decision, safe='')}", None)

    def report(self) -> dict[str, Any]:
        """Return the report; it needs a key with the role `read`."""
        return self._send("GET", "/report", None)

    def _send(self, method: str, path: str, body: Any) -> Any:
        given = {name: value for name, value in (body or {}).items() if value is not None}
        content = None if body is None else json.dumps(given, allow_nan=False).encode()
        ends, wait = time.monotonic() + self._timeout, 0.05
        while True:
            try:
                status, after, answer = self._exchange(method, self._base + path, content, ends - time.monotonic())
                if status < 300:
                    return json.loads(answer) if answer else None
                problem = _problem(status, answer)
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                problem, after = ServiceError(0, "no_answer", f"no answer from {self._host}: {error!r}"), None
            pause = max(float(after), wait) if after and after.isdigit() else wait
            pause *= random.uniform(0.75, 1.25)  # clients that were refused together do not come back together
            if problem.status not in (0, *_AGAIN) or time.monotonic() + pause >= ends:
                raise problem
            time.sleep(pause)
            wait = min(2 * wait, 1.0)

    def _exchange(self, method: str, path: str, content: bytes | None, seconds: float) -> tuple[int, str | None, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._kind(self._host, self._port)
        connection.timeout = max(seconds, 0.001)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        connection.request(method, path, content, self._headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Retry-After"), answer.read()


def _problem(status: int, answer: bytes) -> ServiceError:
    try:
        document = json.loads(answer)
        return ServiceError(status, str(document["code"]), str(document["detail"]))
    except (ValueError, KeyError, TypeError):
        return ServiceError(status, "unknown", f"the service answered {status}")
