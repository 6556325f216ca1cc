"""The endpoints that read, correct and administer experiments: FastAPI routes, each a thin form of a method of `Bandit`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from ppl_bandit.display.terminal import to_plain
from ppl_bandit.serving.access import Gate
from ppl_bandit.serving.experiments import Correction, Discard, ServedExperiment, rows_of
from ppl_bandit.serving.hot import unknown_experiment
from ppl_bandit.serving.keys import Access
from ppl_bandit.serving.messages import Message, RewardValue, Text
from ppl_bandit.serving.metrics import Metrics
from ppl_bandit.serving.problems import Problem, or_raise

_MAX_ROWS = 10_000
_ROWS_PER_PART = 200  # of a streamed history


class NewArm(Message):
    """An arm to add; without a name if the arms are numbered."""

    name: Text | None = None


_WITHOUT_ANSWER: dict[str, Any] = {"status_code": 204, "response_class": Response}


class _Doors:
    """Lets a request in to an experiment, or to what concerns all of them, if its key opens it."""

    def __init__(self, experiments: Mapping[str, ServedExperiment], gate: Gate):
        self.experiments, self.gate = experiments, gate

    def enter(self, request: Request) -> Access:
        """Return what the caller may do."""
        return self.gate.enter(request.scope, dict(request.scope["headers"]))

    def opener(self, role: str) -> Callable[..., ServedExperiment]:
        """Return a dependency of a route: the experiment in the address, for callers with a role."""

        def opened(request: Request, name: Annotated[str, Path(min_length=1, max_length=100)]) -> ServedExperiment:
            self.gate.check(self.enter(request), role, name)
            if name not in self.experiments:
                raise unknown_experiment(name)
            return self.experiments[name]

        return opened


def make_router(
    experiments: Mapping[str, ServedExperiment], gate: Gate, metrics: Metrics, *, decides_only: bool = False
) -> APIRouter:
    """Return the routes below /v1, and those of a monitoring system, which are all of a process that decides only."""
    router, doors = APIRouter(), _Doors(experiments, gate)
    if not decides_only:
        _add_reading(router, doors)
        _add_correcting(router, doors)
        _add_administration(router, doors)
    _add_monitoring(router, doors, metrics)
    return router


def _add_reading(router: APIRouter, doors: _Doors) -> None:
    """Add what a role may read."""
    Read = Annotated[ServedExperiment, Depends(doors.opener("read"))]

    @router.get("/v1/experiments", tags=["read"])
    def list_experiments(request: Request) -> dict[str, Any]:
        """List the experiments that the key opens."""
        access = doors.enter(request)
        doors.gate.check_role(access, "read")
        opened = [experiment for name, experiment in doors.experiments.items() if access.opens(name)]
        return {"experiments": [_state(experiment) for experiment in opened]}

    @router.get("/v1/experiments/{name}", tags=["read"])
    def show_experiment(experiment: Read) -> dict[str, Any]:
        """Show one experiment."""
        return _state(experiment)

    def add(part: str, summary: str, read: Callable[[ServedExperiment], dict[str, Any]]) -> None:
        @router.get(f"/v1/experiments/{{name}}/{part}", name=part, summary=summary, tags=["read"])
        def reading(experiment: Read) -> dict[str, Any]:
            return experiment.reading(part, lambda: to_plain(read(experiment)))

    for part, (summary, read) in _READINGS.items():
        add(part, summary, read)

    @router.get("/v1/experiments/{name}/pending", tags=["read"])
    def pending(experiment: Read, limit: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = 1000) -> dict[str, Any]:
        """List the decisions that wait for a reward, oldest first."""
        rows = experiment.reading("pending", lambda: to_plain(rows_of(experiment.bandit.pending())))
        return {"rows": rows[:limit]}

    streamed: Any = {200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}}

    @router.get("/v1/experiments/{name}/history", tags=["read"], responses=streamed, response_class=StreamingResponse)
    def history(experiment: Read, after: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> StreamingResponse:
        """Stream the decisions beyond a position with their rewards, oldest first: one JSON object a line."""
        return StreamingResponse(_history_lines(experiment, after), media_type="application/x-ndjson")


def _history_lines(experiment: ServedExperiment, after: int) -> Iterator[bytes]:
    part = []
    for row in experiment.bandit.records(after):
        part.append(orjson.dumps(to_plain(row), option=orjson.OPT_APPEND_NEWLINE))
        if len(part) == _ROWS_PER_PART:
            yield b"".join(part)
            part = []
    yield b"".join(part)


def _add_correcting(router: APIRouter, doors: _Doors) -> None:
    """Add what the product corrects about single decisions."""
    Decide = Annotated[ServedExperiment, Depends(doors.opener("decide"))]
    Decision = Annotated[str, Path(max_length=256)]
    address = "/v1/experiments/{name}/decisions/{decision}"

    @router.put(f"{address}/reward", tags=["decide"])
    async def correct(experiment: Decide, decision: Decision, body: RewardValue) -> dict[str, bool]:
        """Replace the reward of a decision; the posterior then is as if only the new one had been reported."""
        if (body.reward is None) == (body.outcomes is None):
            raise Problem(422, "invalid_body", "give either reward, a number, or outcomes, {name: number}")
        return {"recorded": await _queued(experiment, Correction(decision, body))}

    @router.delete(address, tags=["decide"], **_WITHOUT_ANSWER)
    async def discard(experiment: Decide, decision: Decision) -> None:
        """Say that a decision was not shown, so that no reward will come."""
        await _queued(experiment, Discard(decision))


def _add_administration(router: APIRouter, doors: _Doors) -> None:
    """Add what changes an experiment."""
    Admin = Annotated[ServedExperiment, Depends(doors.opener("admin"))]
    Name = Annotated[str, Path(min_length=1, max_length=256)]
    changes: dict[str, Any] = {"tags": ["admin"], **_WITHOUT_ANSWER}

    @router.post("/v1/experiments/{name}/arms", tags=["admin"], status_code=201)
    def add_arm(experiment: Admin, body: NewArm) -> dict[str, Any]:
        """Add an arm, which starts at its prior, or bring back a retired one."""
        return {"arm": _changed(experiment, lambda: experiment.bandit.add_arm(body.name))}

    @router.post("/v1/experiments/{name}/arms/{arm:path}/retire", **changes)
    def retire_arm(experiment: Admin, arm: Name) -> None:
        """Stop playing an arm; its posterior is kept."""
        _changed(experiment, lambda: experiment.bandit.retire_arm(arm_of(experiment, arm)))

    @router.post("/v1/experiments/{name}/pause", **changes)
    def pause(experiment: Admin) -> None:
        """Refuse further decisions; rewards are still learnt."""
        _changed(experiment, experiment.bandit.pause)

    @router.post("/v1/experiments/{name}/resume", **changes)
    def resume(experiment: Admin) -> None:
        """Take decisions again."""
        _changed(experiment, experiment.bandit.resume)

    @router.delete("/v1/experiments/{name}/units/{unit:path}", **changes)
    def erase(experiment: Admin, unit: Name) -> None:
        """Erase the personal data of a unit; its rewards stay learnt, and the journal still verifies."""
        _changed(experiment, lambda: experiment.bandit.erase(unit))


def _add_monitoring(router: APIRouter, doors: _Doors, metrics: Metrics) -> None:
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
        why = {reason for own in doors.experiments.values() if (reason := own.not_ready())}
        if why:  # without the names of experiments: no key is asked for
            raise Problem(503, "not_ready", "; ".join(sorted(why)), retry_after=2)
        return {"status": "ready"}

    @router.get("/metrics", tags=["monitoring"], response_class=Response)
    def show_metrics(request: Request) -> Response:
        """Return the metrics in the text format of Prometheus."""
        doors.gate.check(doors.enter(request), "read", None)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def arm_of(experiment: ServedExperiment, text: str) -> Any:
    """Return the arm that a text in an address names: numbered arms are numbers."""
    arms = experiment.bandit.arms
    return next((arm for arm in arms if str(arm) == text), text)


def _changed(experiment: ServedExperiment, change: Callable[[], Any]) -> Any:
    found = change()
    experiment.forget_readings()
    return found


async def _queued(experiment: ServedExperiment, request: Any) -> bool:
    return or_raise(await experiment.submit(experiment.rewards, request))


def _state(experiment: ServedExperiment) -> dict[str, Any]:
    bandit = experiment.bandit
    return {
        "name": experiment.name,
        "state": experiment.not_ready() or "ready",
        "is_paused": bandit.is_paused,
        "arms": bandit.arms,
        "retired": bandit.retired,
        "num_rewards": bandit.num_rewards,
        "num_pending": int(experiment.gauges()["pending"]),
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
    "alarms": ("List what is wrong, as of the last half minute.", lambda own: {"rows": own.alarms}),
    "explain": ("Say which engine learns, and why.", lambda own: {"text": own.bandit.explain()}),
}
