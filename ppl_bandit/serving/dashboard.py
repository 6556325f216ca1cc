"""The dashboard: pages for people, made on the server; they need no JavaScript, and with it they refresh themselves.

A page shows names, units and programs that others wrote: everything is escaped, and the content security policy allows no
script but the service's own file. Changes come from the dashboard's own pages alone (`Origin`), by a key in a same-site cookie.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, quote

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader
from starlette.concurrency import run_in_threadpool

from ppl_bandit.display.terminal import printable
from ppl_bandit.files.keys import Access
from ppl_bandit.journal.events import DECIDED
from ppl_bandit.serving.access import COOKIE, Gate, is_own_origin
from ppl_bandit.serving.api import arm_of
from ppl_bandit.serving.experiments import ServedExperiment, rows_of
from ppl_bandit.serving.problems import Problem

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
_NUM_ROWS = 20  # of the table of arms; a link shows them all
_WIDTH, _HEIGHT = 600, 160  # of the curves


async def _read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form of the dashboard's own.

    Raises:
        Problem: 403 for a form of another site, which may not use the cookie.
    """
    if not is_own_origin(dict(request.scope["headers"]), default=False):
        raise Problem(403, "foreign_form", "a change must come from a page of this dashboard")
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
    return {name: values[0] for name, values in fields.items()}


_Form = Annotated[dict[str, str], Depends(_read_form)]


def _finalize(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


class Pages:
    """Each page as a function of a request, called in a thread."""

    def __init__(self, gate: Gate):
        self._gate = gate
        self._templates = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, finalize=_finalize
        )
        self._templates.filters |= {
            "number": _number,
            "percent": lambda share: "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%",
            "segment": lambda s: quote(str(s), ""),
        }

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(default_response_class=HTMLResponse)
        for method, path, page in (
            ("GET", "/", self._index),
            ("GET", "/experiments/{name}", self._experiment),
            ("GET", "/experiments/{name}/{change}", self._confirm),
            ("POST", "/experiments/{name}/{change}", self._apply),
            ("GET", "/login", self._ask),
            ("POST", "/login", self._login),
            ("POST", "/logout", self._logout),
            ("GET", "/docs", self._docs),
        ):
            router.add_api_route(path, page, methods=[method])
        return router

    def has(self, endpoint: Any) -> bool:
        """Return whether a route's function is one of the pages, whose refusals are pages too."""
        return getattr(endpoint, "__self__", None) is self

    def _page(self, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        text = self._templates.get_template(template).render(has_keys=self._gate.keys is not None, **values)
        return HTMLResponse(text, status, _HEADERS)

    def _caller(self, request: Request) -> tuple[Mapping[str, Any], Mapping[bytes, bytes], str | None]:
        cookie = request.cookies.get(COOKIE, "") if self._gate.keys else None
        return request.scope, dict(request.scope["headers"]), cookie

    def _open(self, request: Request, role: str, name: str) -> tuple[Access, ServedExperiment]:
        scope, headers, cookie = self._caller(request)
        return self._gate.open(scope, headers, role, name, cookie)

    def refusal(self, request: Request, problem: Problem) -> HTMLResponse:
        """Return the page of a refusal: where a key is missing, the form for it."""
        if problem.status == 401:
            message = problem.detail if request.method == "POST" else ""  # a wrong key, not a missing one
            return self._page("login.html", 401, title="Log in", message=message)
        return self._page("message.html", problem.status, title="This did not work", message=problem.detail)

    async def _index(self, request: Request) -> Response:
        access = self._gate.enter(*self._caller(request))
        self._gate.check_role(access, "read")
        opened = self._gate.opened(access)
        lines = await asyncio.gather(*map(_conclusion, opened))
        rows = [(own, own.not_ready(), line) for own, line in zip(opened, lines, strict=True)]
        return self._page("index.html", title="Experiments", rows=rows)

    async def _experiment(self, request: Request, name: str, arms: str = "") -> Response:
        access, own = self._open(request, "read", name)
        found = await own.read("page", lambda: _page_values(own)) if own.state == "ready" else {}
        values = {"own": own, "why": own.not_ready(), "is_admin": access.has_role("admin"), **found}
        values |= {"title": name, "shows_all": arms == "all", "num_rows": _NUM_ROWS}
        return await run_in_threadpool(self._page, "experiment.html", **values)

    def _confirm(self, request: Request, name: str, change: str, arm: str = "") -> Response:
        self._open(request, "admin", name)
        return self._page("confirm.html", title=f"{change.capitalize()}?", name=name, change=_known(change), arm=arm)

    def _apply(self, request: Request, name: str, change: str, fields: _Form) -> Response:
        own = self._open(request, "admin", name)[1]
        if _known(change) == "retire":
            own.change(lambda: own.bandit.retire_arm(arm_of(own, fields.get("arm", ""))))
        else:
            own.change(getattr(own.bandit, change))
        return RedirectResponse(f"/experiments/{name}", 303, _HEADERS)

    def _ask(self) -> Response:
        return self._page("login.html", title="Log in")

    def _login(self, request: Request, fields: _Form) -> Response:
        key = fields.get("key", "").strip()
        self._gate.check_role(self._gate.enter(request.scope, dict(request.scope["headers"]), key), "read")
        answer = RedirectResponse("/", 303, _HEADERS)
        is_secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, key, httponly=True, samesite="strict", secure=is_secure, max_age=30 * 86400)
        return answer

    def _logout(self, fields: _Form) -> Response:
        answer = RedirectResponse("/login", 303, _HEADERS)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer

    def _docs(self, request: Request) -> Response:
        return self._page("docs.html", title="Endpoints", document=request.app.openapi())


def _known(change: str) -> str:
    if change not in ("pause", "resume", "retire"):
        raise Problem(404, "not_found", f"there is no change {change!r}: pause, resume or retire")
    return change


async def _conclusion(own: ServedExperiment) -> str:
    """Return the first line of an experiment's report, or why there is none."""
    try:
        return (await own.read("page", lambda: _page_values(own)))["lines"][0] if own.state == "ready" else ""
    except Problem as problem:
        return problem.detail


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
    curves, top = _curves(own, order[:_NUM_CURVES])
    return {
        "time": time.strftime("%H:%M:%S", time.gmtime()),
        "lines": report.text.splitlines(),
        "arms": arms,
        "curves": list(zip(("P(best) at each decision", "Probability of being played"), curves, strict=False)),
        "top": top,
        "legend": [found.arms[index] for index in order[:_NUM_CURVES]],
        "alarms": rows_of(bandit.alarms()),
        "looks": own.looks(),
        "design": "" if bandit._design is None else str(bandit._design),
        "explanation": bandit.explain(),
        "program": _source(bandit.model.program),
        "has_contexts": bandit.model.context is not None,
        "report": report,
    }


def _curves(own: ServedExperiment, arms: Sequence[int]) -> tuple[list[list[str]], float]:
    """Return P(best) and the propensity of some arms at decisions spread over the journal, as points of SVG, and the scale."""
    experiment = own.bandit._experiment
    last, store = experiment.projection.position, experiment.store
    step = max(last // _NUM_POINTS, 1)
    found = []
    for position in range(0, last, step):
        events = store.read(experiment.name, position, limit=min(step, 50), whole=True)
        found += [event.body for event in events if event.kind == DECIDED][:1]
    if len(found) < 2:
        return [], 1.0
    curves = [
        [[float(body[field][arm]) if arm < len(body[field]) else math.nan for body in found] for arm in arms]
        for field in ("best_arm_probs", "propensities")
    ]
    largest = max(value for lines in curves for line in lines for value in line if not math.isnan(value))
    top = next(scale for scale in (0.1, 0.2, 0.5, 1.0) if largest <= scale or scale == 1.0)

    def points(line: list[float]) -> str:
        places = ((index, value) for index, value in enumerate(line) if not math.isnan(value))  # an arm added later
        across = _WIDTH / (len(found) - 1)
        return " ".join(f"{across * index:.1f},{_HEIGHT * (1 - value / top):.1f}" for index, value in places)

    return [[points(line) for line in lines] for lines in curves], top


def _source(program: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(inspect.unwrap(getattr(program, "func", program)))
    except (OSError, TypeError):
        return "The program's source is not available."


def _number(value: Any) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"
