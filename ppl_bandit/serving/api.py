"""The endpoints that read, correct and administer experiments: FastAPI routes, each a thin form of a method of `Bandit`."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from ppl_bandit.display.terminal import to_plain
from ppl_bandit.journal.stores.store import call_within
from ppl_bandit.serving.access import Gate
from ppl_bandit.serving.experiments import ServedExperiment, rows_of
from ppl_bandit.serving.messages import Correction, Message, RewardValue, Text
from ppl_bandit.serving.metrics import Metrics
from ppl_bandit.serving.problems import Problem, or_raise

_MAX_ROWS = 10_000
_ROWS_PER_PART = 200  # of a streamed history


class NewArm(Message):
    """An arm to add; without a name if the arms are numbered."""

    name: Text | None = None


_WITHOUT_ANSWER: dict[str, Any] = {"status_code": 204, "response_class": Response}


def make_router(gate: Gate, metrics: Metrics, *, decides_only: bool = False) -> APIRouter:
    """Return the routes below /v1, and those of a monitoring system, which are all of a process that decides only."""
    router = APIRouter()
    if not decides_only:
        _add_reading(router, gate)
        _add_correcting(router, gate)
        _add_administration(router, gate)
    _add_monitoring(router, gate, metrics)
    return router


def _opener(gate: Gate, role: str) -> Any:
    """Return a dependency of a route: the experiment in the address, for callers with a role."""

    async def opened(request: Request, name: Annotated[str, Path(min_length=1, max_length=100)]) -> ServedExperiment:
        return gate.open(request.scope, dict(request.scope["headers"]), role, name)[1]

    return Depends(opened)


def _add_reading(router: APIRouter, gate: Gate) -> None:
    """Add what a role may read."""
    Read = Annotated[ServedExperiment, _opener(gate, "read")]

    @router.get("/v1/experiments", tags=["read"])
    async def list_experiments(request: Request) -> dict[str, Any]:
        """List the experiments that the key opens."""
        access = gate.enter(request.scope, dict(request.scope["headers"]))
        gate.check_role(access, "read")
        return {"experiments": await asyncio.gather(*map(_state, gate.opened(access)))}

    @router.get("/v1/experiments/{name}", tags=["read"])
    async def show_experiment(experiment: Read) -> dict[str, Any]:
        """Show one experiment."""
        return await _state(experiment)

    def add(part: str, summary: str, read: Callable[[ServedExperiment], dict[str, Any]]) -> None:
        @router.get(f"/v1/experiments/{{name}}/{part}", name=part, summary=summary, tags=["read"])
        async def reading(experiment: Read) -> dict[str, Any]:
            return await experiment.read(part, lambda: to_plain(read(experiment)))

    for part, (summary, read) in _READINGS.items():
        add(part, summary, read)

    @router.get("/v1/experiments/{name}/pending", tags=["read"])
    async def pending(experiment: Read, limit: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = 1000) -> dict[str, Any]:
        """List the decisions that wait for a reward, oldest first."""
        rows = await experiment.read("pending", lambda: to_plain(rows_of(experiment.bandit.pending())))
        return {"rows": rows[:limit]}

    streamed: Any = {200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}}

    @router.get("/v1/experiments/{name}/history", tags=["read"], responses=streamed, response_class=StreamingResponse)
    async def history(experiment: Read, after: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> StreamingResponse:
        """Stream the decisions beyond a position with their rewards, oldest first: one JSON object a line."""
        rows = await experiment.read(None, lambda: experiment.bandit.records(after))
        return StreamingResponse(_history_lines(experiment, rows), media_type="application/x-ndjson")


def _history_lines(experiment: ServedExperiment, rows: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    part: list[dict[str, Any]] | None = None
    while part != []:
        with call_within(experiment.limits.deadline):
            part = list(itertools.islice(rows, _ROWS_PER_PART))
        yield b"".join(orjson.dumps(to_plain(row), option=orjson.OPT_APPEND_NEWLINE) for row in part)


def _add_correcting(router: APIRouter, gate: Gate) -> None:
    """Add what the product corrects about single decisions."""
    Decide = Annotated[ServedExperiment, _opener(gate, "decide")]
    Decision = Annotated[str, Path(max_length=256)]
    address = "/v1/experiments/{name}/decisions/{decision}"

    @router.put(f"{address}/reward", tags=["decide"])
    async def correct(experiment: Decide, decision: Decision, body: RewardValue) -> dict[str, bool]:
        """Replace the reward of a decision; the posterior then is as if only the new one had been reported."""
        if (body.reward is None) == (body.outcomes is None):
            raise Problem(422, "invalid_body", "give either reward, a number, or outcomes, {name: number}")
        return {"recorded": await _queued(experiment, Correction.model_construct(decision=decision, **dict(body)))}

    @router.delete(address, tags=["decide"], **_WITHOUT_ANSWER)
    async def discard(experiment: Decide, decision: Decision) -> None:
        """Say that a decision was not shown, so that no reward will come."""
        await _queued(experiment, decision)


def _add_administration(router: APIRouter, gate: Gate) -> None:
    """Add what changes an experiment."""
    Admin = Annotated[ServedExperiment, _opener(gate, "admin")]
    Name = Annotated[str, Path(min_length=1, max_length=256)]
    changes: dict[str, Any] = {"tags": ["admin"], **_WITHOUT_ANSWER}

    @router.post("/v1/experiments/{name}/arms", tags=["admin"])
    def add_arm(experiment: Admin, body: NewArm) -> dict[str, Any]:
        """Add an arm, which starts at its prior, or bring back a retired one."""
        return {"arm": experiment.change(lambda: experiment.bandit.add_arm(body.name))}

    @router.post("/v1/experiments/{name}/arms/{arm:path}/retire", **changes)
    def retire_arm(experiment: Admin, arm: Name) -> None:
        """Stop playing an arm; its posterior is kept."""
        experiment.change(lambda: experiment.bandit.retire_arm(arm_of(experiment, arm)))

    @router.post("/v1/experiments/{name}/pause", **changes)
    def pause(experiment: Admin) -> None:
        """Refuse further decisions; rewards are still learnt."""
        experiment.change(experiment.bandit.pause)

    @router.post("/v1/experiments/{name}/resume", **changes)
    def resume(experiment: Admin) -> None:
        """Take decisions again."""
        experiment.change(experiment.bandit.resume)

    @router.delete("/v1/experiments/{name}/units/{unit:path}", **changes)
    def erase(experiment: Admin, unit: Name) -> None:
        """Erase the personal data of a unit; its rewards stay learnt, and the journal still verifies."""
        experiment.change(lambda: experiment.bandit.erase(unit))


def _add_monitoring(router: APIRouter, gate: Gate, metrics: Metrics) -> None:
    """Add what a monitoring system asks."""

    # In the event loop: it answers while every thread reads.
    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz", tags=["monitoring"])
    async def healthz() -> dict[str, str]:
        """Say that the process is alive."""
        return {"status": "alive"}

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", tags=["monitoring"])
    async def readyz() -> dict[str, str]:
        """Say whether every experiment is compiled, its journal works, and its queues have room."""
        why = {reason for own in gate.experiments.values() if (reason := own.not_ready())}
        if why:  # without the names of experiments: no key is asked for
            raise Problem(503, "not_ready", "; ".join(sorted(why)), retry_after=2)
        return {"status": "ready"}

    @router.get("/metrics", tags=["monitoring"], response_class=Response)
    async def show_metrics(request: Request) -> Response:
        """Return the metrics in the text format of Prometheus."""
        gate.check(gate.enter(request.scope, dict(request.scope["headers"])), "read", None)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def arm_of(experiment: ServedExperiment, text: str) -> Any:
    """Return the arm that a text in an address names: numbered arms are numbers.

    Raises:
        Problem: 404.
    """
    arms = experiment.bandit._catch_up().task.arms.names
    for arm in arms:
        if str(arm) == text:
            return arm
    raise Problem(404, "unknown_arm", f"there is no arm {text!r}, the arms are {', '.join(map(str, arms))}")


async def _queued(experiment: ServedExperiment, request: Any) -> bool:
    return or_raise(await experiment.submit(experiment.rewards, request))


async def _state(experiment: ServedExperiment) -> dict[str, Any]:
    bandit, num_pending = experiment.bandit, None
    if not experiment.not_ready():
        with contextlib.suppress(Problem):  # a moment later, the state says what is wrong
            num_pending = await experiment.read("num_pending", experiment.num_pending)
    return {
        "name": experiment.name,
        "state": experiment.not_ready() or "ready",
        "is_paused": bandit.is_paused,
        "arms": bandit.arms,
        "retired": bandit.retired,
        "num_rewards": bandit.num_rewards,
        "num_pending": num_pending,
        "engine": bandit.explanation.engine,
        "selector": str(bandit._selector),
    }


def _arms(experiment: ServedExperiment) -> dict[str, Any]:
    rows = experiment.bandit.summary().to_dict("records")
    arms, retired, shares = experiment.bandit.arms, experiment.bandit.retired, experiment.arm_shares()
    own = ({"arm": arm, "share": shares.get(arm, 0.0), "is_retired": arm in retired} for arm in arms)
    return {"rows": [row | more for row, more in zip(rows, own, strict=False)]}  # an arm may be added in between


_READINGS: dict[str, tuple[str, Callable[[ServedExperiment], dict[str, Any]]]] = {
    "report": (
        "Say which arm leads, by how much, how certain that is, and what more data would change.",
        lambda own: own.bandit.report().to_dict(),
    ),
    "arms": (
        "List the arms: rewards, expected reward, interval, P(best), expected loss, share of the decisions.",
        _arms,
    ),
    "looks": ("List the looks of a designed experiment, oldest first.", lambda own: {"rows": own.looks()}),
    "alarms": ("List what is wrong.", lambda own: {"rows": rows_of(own.bandit.alarms())}),
    "explain": ("Say which engine learns, and why.", lambda own: {"text": own.bandit.explain()}),
}
