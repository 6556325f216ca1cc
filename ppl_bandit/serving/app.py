"""The application: the hot endpoints in front, the FastAPI routes behind them, and the life of the experiments."""

import asyncio
import contextlib
import gc
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from ppl_bandit.deciders.decider import Decider
from ppl_bandit.deciders.sealer import Sealer
from ppl_bandit.files.experiments_file import open_experiments, read_config
from ppl_bandit.files.keys import KeyFile
from ppl_bandit.journal.stores.store import JournalError, call_within
from ppl_bandit.live.bandit import Bandit
from ppl_bandit.serving.access import Gate
from ppl_bandit.serving.api import make_router
from ppl_bandit.serving.batches import Limits
from ppl_bandit.serving.dashboard import Pages
from ppl_bandit.serving.experiments import ServedExperiment
from ppl_bandit.serving.hot import HotRoutes, LimitedRoutes
from ppl_bandit.serving.metrics import Metrics
from ppl_bandit.serving.openapi import complete_document, document_hot
from ppl_bandit.serving.problems import Problem, as_problem
from ppl_bandit.serving.served_decider import ServedDecider, ServedLearner
from ppl_bandit.types import BanditError

logger = logging.getLogger("ppl_bandit.serving")

_SECONDS_BETWEEN_ROUNDS = 2.0  # of counting, and of refusals in the log
_SECONDS_TO_DRAIN = 3.0  # of the 10 s in which the service stops; uvicorn waits for open requests before
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class _Application(FastAPI):
    """A FastAPI application with hot endpoints, which do not pass through its middleware."""

    hot: HotRoutes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = self.hot.find(scope)
        if found is None:
            await super().__call__(scope, receive, send)
        else:
            await self.hot.answer(found, scope, receive, send)


def create_app(
    experiments: Mapping[str, Bandit | Sealer | Decider] | str | PathLike,
    *,
    keys: str | PathLike | KeyFile | None = None,
    flag_values: Mapping[str, Mapping[Any, Any]] | None = None,
    limits: Limits | None = None,
    closes: bool = False,
) -> FastAPI:
    """Return the ASGI application of some experiments, for any ASGI server.

    Args:
        experiments: {name in the address: bandit}, or the sealer of a bandit that learns for deciders; or deciders, which
            answer decisions, rewards and monitoring alone; or the path of a file of experiments, which are opened, and closed
            when the application stops.
        keys: the file of keys; None answers callers on this machine alone.
        flag_values: {experiment: {arm: value}} of OpenFeature flags; without it the value is the arm.
        limits: of each queue.
        closes: whether the bandits are closed when the application stops.

    Once its experiments are compiled, the application calls `gc.freeze`, so that no collection interrupts an answer.

    Raises:
        ValueError: for a name that an address cannot hold, or a file of keys that cannot be used.
    """
    if keys is not None:
        keys = keys if isinstance(keys, KeyFile) else KeyFile(keys)
        keys.check()
    if isinstance(experiments, str | PathLike):
        experiments, configured = open_experiments(read_config(Path(experiments)))
        flag_values, closes = {**configured, **(flag_values or {})}, True
    if not experiments:
        raise ValueError("experiments is empty: give {name: Bandit}")
    served: dict[str, ServedExperiment] = {}
    for name, bandit in experiments.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"the experiment {name!r} must have a name of letters, digits, '_', '.' and '-', at most 100"
            )
        if not isinstance(bandit, Bandit | Sealer | Decider):
            raise ValueError(f"experiments[{name!r}] must be a Bandit, Sealer or Decider, got {type(bandit).__name__}")
        values = (flag_values or {}).get(name)
        arms = (bandit.bandit if isinstance(bandit, Sealer) else bandit).arms
        if values is not None and set(values) != set(arms):
            raise ValueError(f"flag_values[{name!r}] must have a value for each of the arms {arms}")
        given: Any = {"values": values, "limits": limits or Limits()}
        kinds: dict[Any, Any] = {Sealer: ServedLearner, Decider: ServedDecider}
        served[name] = kinds.get(type(bandit), ServedExperiment)(name, bandit, **given)
    decides_only = {isinstance(own, ServedDecider) for own in served.values()}
    if len(decides_only) > 1:
        raise ValueError("experiments has bandits and deciders: one application serves bandits, another the deciders")
    metrics, gate = Metrics(served), Gate(served, keys)
    for experiment in served.values():
        experiment.metrics = metrics
    app = _Application(
        title="ppl_bandit",
        description="Decisions, rewards and reports of live bandits.",
        version="1",
        docs_url=None,
        redoc_url=None,
        lifespan=lambda app: _lifespan(served, metrics, closes),
        redirect_slashes=False,
    )
    pages = Pages(gate)
    is_decider = True in decides_only
    routers = make_router(gate, metrics, decides_only=is_decider), APIRouter() if is_decider else pages.router()
    document_hot(routers[0])
    app.include_router(routers[0])
    app.include_router(routers[1], include_in_schema=False)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
    app.add_middleware(LimitedRoutes, metrics=metrics)
    app.hot = HotRoutes(gate, metrics)

    async def refuse(request: Request, error: Exception) -> Response:
        problem = _as_problem(error)
        if request.url.path != "/readyz":  # its answer is no refusal
            metrics.count_refusal(request.path_params.get("name", ""), problem.code)
        if pages.has(request.scope.get("endpoint")) and problem.status != 405:
            return pages.refusal(request, problem)
        routes = [route for router in routers for route in router.routes]
        allowed = {"allow": _methods(routes, request)} if problem.status == 405 else {}
        headers = {name.decode(): value.decode() for name, value in problem.headers()}
        return Response(problem.body(), problem.status, {**allowed, **headers})

    for kind in (Problem, RequestValidationError, HTTPException, BanditError, JournalError):
        app.add_exception_handler(kind, refuse)
    described = app.openapi
    app.openapi = lambda: app.openapi_schema or complete_document(described())  # type: ignore[method-assign]
    return app


@contextlib.asynccontextmanager
async def _lifespan(experiments: Mapping[str, ServedExperiment], metrics: Metrics, closes: bool) -> AsyncIterator[None]:
    """Start the queues, and compile behind an open port; at the end record what waits, and close.

    It is the lifespan's part: uvicorn raises the signal that stopped it again as soon as it has served.
    """
    for experiment in experiments.values():
        for queue in experiment.queues:
            queue.start()
    stopping = threading.Event()
    _start(_keep_house, experiments, metrics, stopping)
    try:
        yield
    finally:
        stopping.set()
        await asyncio.to_thread(_stop, experiments, closes)


def _start(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, name=work.__name__, daemon=True).start()


def _keep_house(experiments: Mapping[str, ServedExperiment], metrics: Metrics, stopping: threading.Event) -> None:
    """Compile the experiments one after another, then count what their journals hold, and log what was refused."""
    for experiment in experiments.values():
        if not stopping.is_set():
            experiment.compile()
            _start(experiment.watch, stopping)
    gc.collect()
    gc.freeze()  # what exists by now stays: a collection that looks at it would interrupt single answers
    while not stopping.wait(_SECONDS_BETWEEN_ROUNDS):
        for line in metrics.new_refusals():
            logger.warning("%s", line)
        for experiment in experiments.values():
            try:
                experiment.count()
                experiment.take_look()
            except Exception as error:
                logger.error("%s: reading the journal failed: %s", experiment.name, as_problem(error).code)


def _stop(experiments: Mapping[str, ServedExperiment], closes: bool) -> None:
    logger.info("stopping: recording what waits")
    ends = time.monotonic() + _SECONDS_TO_DRAIN
    for queue in [queue for experiment in experiments.values() for queue in experiment.queues]:
        queue.close(0.0)
    for experiment in experiments.values():
        if not all([queue.close(max(ends - time.monotonic(), 0.0)) for queue in experiment.queues[:2]]):
            logger.error(
                "%s: the journal did not take what was waiting; unanswered requests may be lost", experiment.name
            )
        elif closes:
            try:
                with call_within(max(ends - time.monotonic(), 0.1)):
                    experiment.close()
            except Exception as error:
                logger.error("%s: closing failed: %s", experiment.name, as_problem(error).code)
    logger.info("stopped")


def _methods(routes: Sequence[BaseRoute], request: Request) -> str:
    """Return the methods that the routes of an address have; Starlette names those of the first one alone."""
    found = [route for route in routes if isinstance(route, Route) and route.path_regex.match(request.url.path)]
    return ", ".join(sorted({method for route in found for method in route.methods or ()}))


def _as_problem(error: Exception) -> Problem:
    """Return the refusal of a route, which FastAPI and Starlette raise in forms of their own."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return Problem(400, "invalid_json", f"the body is not JSON: {first['msg']}")
        return Problem(422, "invalid_body", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
        return Problem(error.status_code, code, str(error.detail))
    return as_problem(error)
