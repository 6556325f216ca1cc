"""The dashboard: pages for people, made on the server; they need no JavaScript, and with it they refresh themselves.

A page shows names, units and programs that others wrote: everything is escaped, and the content security policy allows no
script but the service's own file. Changes come from the dashboard's own pages alone (`Origin`), by a key in a same-site cookie.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader
from starlette.concurrency import run_in_threadpool

from ppl_bandit.journal.events import DECIDED
from ppl_bandit.serving.access import COOKIE, Gate, is_own_origin
from ppl_bandit.serving.api import arm_of
from ppl_bandit.serving.experiments import ServedExperiment
from ppl_bandit.serving.hot import unknown_experiment
from ppl_bandit.serving.keys import Access
from ppl_bandit.serving.problems import Problem, as_problem

__all__ = ["make_dashboard"]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
_NUM_POINTS = 100  # of the curves over time
_NUM_CURVES = 6
_NUM_ROWS = 20  # of the table of arms; more unfold
_WIDTH, _HEIGHT = 600, 160  # of the curves


def make_dashboard(experiments: Mapping[str, ServedExperiment], gate: Gate) -> APIRouter:
    """Return the pages."""
    router = APIRouter(default_response_class=HTMLResponse)
    pages = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)
    pages.filters |= {
        "number": _number,
        "percent": lambda share: f"{100 * share:.0f}%",
        "segment": lambda s: quote(str(s), ""),
    }

    def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
        text = pages.get_template(template).render(has_keys=gate.keys is not None, **values)
        return HTMLResponse(text, status, _HEADERS)

    def enter(request: Request, role: str = "read", name: str | None = None) -> Access:
        headers = dict(request.scope["headers"])
        access = gate.enter(request.scope, headers, request.cookies.get(COOKIE, "") if gate.keys else None)
        gate.check_role(access, role)
        if name is not None:
            gate.check(access, role, name)
            if name not in experiments:
                raise unknown_experiment(name)
        return access

    async def answered(make: Callable[[], HTMLResponse | RedirectResponse]) -> Response:
        """Return a page made in a thread, or one that says why not."""
        try:
            return await run_in_threadpool(make)
        except Exception as error:
            problem = as_problem(error)
            if problem.status == 401:
                return page("login.html", 401, title="Log in")
            return page("message.html", problem.status, title="This did not work", message=problem.detail)

    async def form(request: Request) -> dict[str, str]:
        """Return the fields of a form of the dashboard's own.

        Raises:
            Problem: 403 for a form of another site, which may not use the cookie.
        """
        if not is_own_origin(dict(request.scope["headers"]), default=False):
            raise Problem(403, "foreign_form", "a change must come from a page of this dashboard")
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
        return {name: values[0] for name, values in fields.items()}

    @router.get("/")
    async def index(request: Request) -> Response:
        def make() -> HTMLResponse:
            access = enter(request)
            opened = [own for name, own in experiments.items() if access.opens(name)]
            rows = [(own, own.not_ready(), _report_lines(own)[:1]) for own in opened]
            return page("index.html", title="Experiments", rows=rows)

        return await answered(make)

    @router.get("/experiments/{name}")
    async def show(request: Request, name: str) -> Response:
        def make() -> HTMLResponse:
            access = enter(request, "read", name)
            own = experiments[name]
            found = own.reading("page", lambda: _page_values(own)) if own.state == "ready" else {}
            values = {"own": own, "why": own.not_ready(), "is_admin": access.has_role("admin"), **found}
            return page("experiment.html", title=name, **values)

        return await answered(make)

    @router.get("/experiments/{name}/{change}")
    async def confirm(request: Request, name: str, change: str, arm: str = "") -> Response:
        def make() -> HTMLResponse:
            enter(request, "admin", name)
            return page("confirm.html", title=f"{change.capitalize()}?", name=name, change=_known(change), arm=arm)

        return await answered(make)

    @router.post("/experiments/{name}/{change}")
    async def apply(request: Request, name: str, change: str) -> Response:
        try:
            fields = await form(request)
        except Problem as problem:
            return page("message.html", problem.status, title="This did not work", message=problem.detail)

        def make() -> RedirectResponse:
            enter(request, "admin", name)
            own = experiments[name]
            if _known(change) == "retire":
                own.bandit.retire_arm(arm_of(own, fields.get("arm", "")))
            else:
                getattr(own.bandit, change)()
            own.forget_readings()
            return RedirectResponse(f"/experiments/{name}", 303, _HEADERS)

        return await answered(make)

    @router.get("/login")
    async def ask() -> Response:
        return page("login.html", title="Log in")

    @router.post("/login")
    async def login(request: Request) -> Response:
        try:
            key = (await form(request)).get("key", "").strip()
            access = gate.enter(request.scope, dict(request.scope["headers"]), key)
            gate.check_role(access, "read")
        except Problem as problem:
            return page("login.html", problem.status, title="Log in", message=problem.detail)
        answer = RedirectResponse("/", 303, _HEADERS)
        is_secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, key, httponly=True, samesite="strict", secure=is_secure, max_age=30 * 86400)
        return answer

    @router.post("/logout")
    async def logout(request: Request) -> Response:
        answer = RedirectResponse("/login", 303, _HEADERS)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        document = request.app.openapi()
        return page("docs.html", title="Endpoints", document=document)

    return router


def _known(change: str) -> str:
    if change not in ("pause", "resume", "retire"):
        raise Problem(404, "not_found", f"there is no change {change!r}: pause, resume or retire")
    return change


def _report_lines(own: ServedExperiment) -> list[str]:
    if own.state != "ready":
        return []
    return own.reading("report", lambda: own.bandit.report().to_dict())["text"].splitlines()


def _page_values(own: ServedExperiment) -> dict[str, Any]:
    """Return what the page of an experiment shows."""
    bandit = own.bandit
    report = bandit.report()
    found, shares, retired = report.overview, own.arm_shares(), bandit.retired
    order = found.leaders.tolist()
    low, high = float(found.low.min()), float(found.high.max())
    scale = 100 / (high - low) if high > low else 0.0
    arms = [
        {
            "arm": found.arms[index],
            "rewards": int(found.num_rewards[index]),
            "mean": float(found.mean[index]),
            "low": float(found.low[index]),
            "high": float(found.high[index]),
            "best": float(found.best_prob[index]),
            "loss": float(found.loss[index]),
            "share": shares.get(found.arms[index], 0.0),
            "is_retired": found.arms[index] in retired,
            "x": (float(found.low[index]) - low) * scale,
            "width": max((float(found.high[index]) - float(found.low[index])) * scale, 0.5),
            "at": (float(found.mean[index]) - low) * scale,
        }
        for index in order
    ]
    best, allocation = _curves(own, order[:_NUM_CURVES])
    return {
        "lines": report.text.splitlines(),
        "arms": arms[:_NUM_ROWS],
        "more_arms": arms[_NUM_ROWS:],
        "curves": [("P(best) at each decision", best), ("Probability of being played", allocation)] if best else [],
        "legend": [found.arms[index] for index in order[:_NUM_CURVES]],
        "alarms": own.alarms,
        "looks": own.looks(),
        "design": "" if bandit._design is None else str(bandit._design),
        "explanation": bandit.explain(),
        "program": _source(bandit.model.program),
        "has_contexts": bandit.model.context is not None,
        "report": report,
    }


def _curves(own: ServedExperiment, arms: Sequence[int]) -> tuple[list[str], list[str]]:
    """Return P(best) and the propensity of some arms at decisions spread over the journal, as points of SVG."""
    experiment = own.bandit._experiment
    last, store = experiment.projection.position, experiment.store
    step = max(last // _NUM_POINTS, 1)
    found = []
    for position in range(0, last, step):
        events = store.read(experiment.name, position, limit=min(step, 50), whole=True)
        found += [event for event in events if event.kind == DECIDED][:1]
    if len(found) < 2:
        return [], []

    def points(field: str, arm: int) -> str:
        values = [body[arm] if arm < len(body := event.body[field]) else math.nan for event in found]
        places = [
            f"{_WIDTH * index / (len(found) - 1):.1f},{_HEIGHT * (1 - float(value)):.1f}"
            for index, value in enumerate(values)
            if not math.isnan(value)
        ]
        return " ".join(places)

    return [points("best_arm_probs", arm) for arm in arms], [points("propensities", arm) for arm in arms]


def _source(program: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(getattr(program, "func", program)))
    except (OSError, TypeError):
        return "The program's source is not available."


def _number(value: Any) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"
