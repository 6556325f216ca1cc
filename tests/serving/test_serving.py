"""The service as its callers meet it: one real server in a process, with keys, a SQLite file and two experiments."""

import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import sys

sys.path.insert(0, str(Path(__file__).parent))
from service_process import CHROMIUM, CONFIG, MARKUP, PROGRAM, running  # noqa: E402

from ppl_bandit.journal.journal import Journal  # noqa: E402
from ppl_bandit.serving import Client  # noqa: E402
from ppl_bandit.serving.client import ServiceError  # noqa: E402

KEYS = {
    "decide": ("decide", ()),
    "read": ("read", ()),
    "admin": ("admin", ()),
    "decide banner": ("decide", ("banner",)),
    "read banner": ("read", ("banner",)),
    "admin banner": ("admin", ("banner",)),
}
DECIDE = "/v1/experiments/banner/decisions"
REWARD = "/v1/experiments/banner/rewards"
FLAG = "/ofrep/v1/evaluate/flags/banner"


@pytest.fixture(scope="module")
def service(tmp_path_factory, warm_starts):
    folder = tmp_path_factory.mktemp("service")
    (folder / "programs.py").write_text(PROGRAM)
    (folder / "experiments.toml").write_text(CONFIG.replace("JOURNAL", "journal.db"))
    with running(folder, ["experiments.toml"], KEYS) as service:
        yield service


def decide(service, **body):
    status, _, answer = service.call("POST", DECIDE, body, "decide")
    assert status == 200, answer
    return answer


def test_a_decision_and_its_reward_are_recorded(service):
    made = decide(service)
    assert set(made) == {"id", "arm", "propensity", "best_arm_probs", "num_candidates", "version"}
    assert 0 < made["propensity"] <= 1 and abs(sum(made["best_arm_probs"]) - 1) < 1e-9
    body = {"decision": made["id"], "reward": 1}
    assert [service.call("POST", REWARD, body, "decide")[2] for _ in range(2)] == [
        {"recorded": True},
        {"recorded": False},
    ]
    status, _, problem = service.call("POST", REWARD, {**body, "reward": 0}, "decide")
    assert (status, problem["code"]) == (409, "already_rewarded") and "PUT" in problem["detail"]
    path = f"{DECIDE}/{made['id']}"
    assert service.call("PUT", f"{path}/reward", {"reward": 0}, "decide")[0] == 200
    assert service.call("DELETE", f"{DECIDE}/{decide(service)['id']}", None, "decide")[0] == 204
    assert service.call("POST", REWARD, {"decision": "nothing", "reward": 1}, "decide")[0] == 404
    with Journal(service.folder / "journal.db", read_only=True) as journal:
        journal.verify("banner")
        assert made["id"] in {event.decision for event in journal.events("banner")}


def test_a_repeated_request_and_a_unit_get_the_same_decision(service):
    assert decide(service, request_id="r 1") == decide(service, request_id="r 1")
    assert decide(service, unit="visitor 1") == decide(service, unit="visitor 1")
    status, _, problem = service.call("POST", DECIDE, {"request_id": "r 1", "unit": "other"}, "decide")
    assert (status, problem["code"]) == (409, "request_id_reused")


def test_a_batch_of_decisions_is_answered_whole_and_one_of_rewards_row_by_row(service):
    rows = [{"unit": f"row {index}"} for index in range(20)]
    status, _, answer = service.call("POST", f"{DECIDE}/batch", {"requests": rows}, "decide")
    assert status == 200 and len({made["id"] for made in answer["decisions"]}) == 20
    rewards = [{"decision": made["id"], "reward": 1} for made in answer["decisions"]]
    rewards[3]["decision"] = "nothing"
    status, _, answer = service.call("POST", f"{REWARD}/batch", {"rewards": rewards}, "decide")
    problems = {index: row["problem"]["status"] for index, row in enumerate(answer["results"]) if "problem" in row}
    assert status == 200 and problems == {3: 404}
    assert all(row.get("recorded") for index, row in enumerate(answer["results"]) if index != 3)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        (DECIDE, b"{", {}, 400),
        (DECIDE, b'{"conext": 1}', {}, 422),
        (DECIDE, b'{"unit": ""}', {}, 422),
        (DECIDE, b'{"unit": 3}', {}, 422),
        (DECIDE, json.dumps({"unit": "x" * 300}).encode(), {}, 422),
        (DECIDE, json.dumps({"unit": "\u00e9" * 200}).encode(), {}, 422),  # 400 bytes
        (DECIDE, b'{"unit": "a\\u0000b"}', {}, 422),
        (DECIDE, b'{"context": {"age": 1}}', {}, 422),
        (DECIDE, b'{"allowed": ["nothing"]}', {}, 422),
        (DECIDE, b'{"allowed": []}', {}, 422),
        (DECIDE, b'{"size": 9}', {}, 422),
        (DECIDE, b"{}", {"Content-Type": "text/plain"}, 415),
        (DECIDE, b"{}", {"Content-Encoding": "gzip"}, 415),
        (DECIDE, b'{"unit": "\\ud800"}', {}, 400),  # half a character
        (DECIDE, b"{}" + b" " * (1 << 20), {}, 413),
        (DECIDE, b"{}", {"X-Long": "x" * 20_000}, 431),
        (f"{DECIDE}/batch", json.dumps({"requests": [{}] * 1001}).encode(), {}, 413),
        (f"{DECIDE}/batch", b'{"requests": []}', {}, 422),
        (REWARD, b'{"decision": "d"}', {}, 422),
        (REWARD, b'{"decision": "d", "reward": true}', {}, 422),
        (REWARD, b'{"decision": "d", "reward": NaN}', {}, 422),
        (REWARD, b'{"decision": "d", "reward": 1, "outcomes": {"reward": 1}}', {}, 422),
        (REWARD, b'{"decision": "d", "reward": 1, "propensity": 0}', {}, 422),
        ("/v1/experiments/nothing/decisions", b"{}", {}, 404),
    ],
)
def test_a_wrong_request_is_a_problem_document(service, path, body, headers, status):
    found, given, problem = service.call("POST", path, None, "decide", headers, raw=body)
    assert (found, problem["status"], given["Content-Type"]) == (status, status, "application/problem+json")
    assert problem["detail"] and problem["code"]


def routes(service):
    """Yield (method, path, role, body) of every route in the OpenAPI document."""
    document = service.call("GET", "/openapi.json")[2]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if "security" in operation:
                tag = operation["tags"][0]
                role = {"OpenFeature": "decide", "monitoring": "read"}.get(tag, tag)
                yield method.upper(), path, role, {} if "requestBody" in operation else None


def test_a_key_opens_its_role_and_its_experiments_and_nothing_else(service):
    checked = 0
    for method, path, role, body in routes(service):
        # No wrong key reaches an experiment, so a name that does not exist answers 403 to it, and 404 to the right ones.
        for name in ("nothing", "other"):
            real = path.replace("{name}", name).replace("{decision}", "d").replace("{unit}", "u").replace("{arm}", "a")
            assert service.call(method, real, body)[0] == 401
            assert service.call(method, real, body, "ppl_wrong")[0] == 401
            for key, (own, experiments) in KEYS.items():
                has_role = own == role or (own, role) == ("admin", "read")
                if has_role and not experiments:
                    continue
                if has_role and path in ("/v1/experiments", "/ofrep/v1/evaluate/flags"):
                    assert "other" not in str(
                        service.call(method, real, {"context": {"targetingKey": "k"}} if body else None, key)[2]
                    )
                else:
                    assert service.call(method, real, body, key)[0] == 403, (method, real, key)
                checked += 1
    assert checked > 150
    assert (
        service.call("GET", "/", headers={"Authorization": f"Bearer {service.keys['read']}"})[0] == 401
    )  # a cookie is


PAGES = [("GET", "", "read"), ("GET", "?arms=all", "read")]
PAGES += [(method, f"/{change}", "admin") for change in ("pause", "resume", "retire") for method in ("GET", "POST")]


@pytest.mark.parametrize(("method", "path", "role"), PAGES)
def test_a_cookie_opens_the_pages_of_its_role_and_its_experiments_and_no_endpoint(method, path, role, service):
    own_page = {"Origin": service.url, "Content-Type": "application/x-www-form-urlencoded"} if method == "POST" else {}
    form = b"arm=9" if method == "POST" else None
    for name, at in (("nothing", 404), ("other", 200)):
        address = f"/experiments/{name}{path}"
        for cookie in ({}, {"Cookie": "ppl_bandit_key=ppl_wrong"}):
            assert service.call(method, address, None, None, own_page | cookie, raw=form)[0] == 401
        for key, (own, experiments) in KEYS.items():
            has_role = own == "admin" or own == role
            if method == "POST" and has_role and not experiments and name == "other":
                continue  # another test changes it
            cookie = {"Cookie": f"ppl_bandit_key={service.keys[key]}"}
            status = at if has_role and not experiments else 403
            assert service.call(method, address, None, None, own_page | cookie, raw=form)[0] == status, (key, address)
            assert service.call("GET", f"/v1/experiments/{name}", headers=cookie)[0] == 401


@pytest.mark.parametrize("key", KEYS)
def test_a_key_logs_in_to_the_experiments_that_it_may_read(key, service):
    cookie = {"Cookie": f"ppl_bandit_key={service.keys[key]}"}
    (own, experiments), form = KEYS[key], {"Content-Type": "application/x-www-form-urlencoded", "Origin": service.url}
    status, headers, _ = service.call("POST", "/login", None, None, form, raw=f"key={service.keys[key]}".encode())
    index, _, page = service.call("GET", "/", headers=cookie)
    assert (status, index) == ((403, 403) if own == "decide" else (303, 200))
    assert ("HttpOnly" in headers.get("Set-Cookie", "")) == ("/experiments/banner" in page) == (own != "decide")
    assert ("/experiments/other" in page) == (own != "decide" and not experiments)


def test_what_is_read_agrees_with_the_library(service):
    listed = service.call("GET", "/v1/experiments", None, "read")[2]["experiments"]
    assert [own["name"] for own in listed] == ["banner", "other"]
    report = service.call("GET", "/v1/experiments/banner/report", None, "read")[2]
    assert len(report["text"].splitlines()) == 5
    arms = service.call("GET", "/v1/experiments/banner/arms", None, "read")[2]["rows"]
    assert abs(sum(row["best_arm_prob"] for row in arms) - 1) < 1e-6
    for part in ("looks", "alarms", "pending?limit=5", "explain"):
        assert service.call("GET", f"/v1/experiments/banner/{part}", None, "read")[0] == 200
    lines = service.call("GET", "/v1/experiments/banner/history", None, "read")[2].splitlines()
    rows = [json.loads(line) for line in lines]
    fields = {"decision", "time", "arm", "propensity", "unit", "context", "reward", "status", "position"}
    assert fields <= set(rows[0])
    after = service.call("GET", f"/v1/experiments/banner/history?after={rows[0]['position']}", None, "read")[2]
    assert after.splitlines() == lines[1:]
    text = service.call("GET", "/metrics", None, "read")[2]
    assert 'ppl_bandit_decisions_total{arm="control",experiment="banner"}' in text
    assert "ppl_bandit_request_seconds_bucket" in text and 'ppl_bandit_ready{experiment="banner"} 1.0' in text


def test_a_load_balancer_may_ask_without_a_body(service):
    for path in ("/healthz", "/readyz"):
        assert service.call("HEAD", path)[0] == service.call("GET", path)[0] == 200


def test_metrics_are_named_by_the_conventions_of_prometheus(service):
    """Base units, `_total` for counters alone, a help text, and no name that callers make up."""
    parser = pytest.importorskip("prometheus_client.parser")
    for name in ("banner", "made up"):
        body = {"context": {"targetingKey": "of metrics"}}
        service.call("POST", f"/ofrep/v1/evaluate/flags/{name.replace(' ', '%20')}", body, "decide")
    families = list(parser.text_string_to_metric_families(service.call("GET", "/metrics", None, "read")[2]))
    own = {family.name: family for family in families if family.name.startswith("ppl_bandit_")}
    kinds = {name: family.type for name, family in own.items() if not name.endswith("_created")}
    assert all(family.documentation for family in own.values())
    assert {name for name, kind in kinds.items() if kind == "counter"} == {
        "ppl_bandit_decisions",
        "ppl_bandit_rewards",
        "ppl_bandit_refusals",
    }
    assert {sample.name for sample in own["ppl_bandit_decisions"].samples} == {"ppl_bandit_decisions_total"}
    assert not any("_ms" in name or "milli" in name or "percent" in name for name in kinds)
    assert kinds["ppl_bandit_request_seconds"] == "histogram" and kinds["ppl_bandit_arm_share_ratio"] == "gauge"
    assert "process_cpu_seconds" in {family.name for family in families}
    labels = [sample.labels for family in own.values() for sample in family.samples]
    assert {label.get("experiment") for label in labels} <= {"banner", "other", ""}
    assert any(label.get("kind") == "flags" for label in labels)


def test_an_administrator_pauses_retires_and_erases(service):
    path = "/v1/experiments/other"
    decision = {"unit": "to erase/by its path"}
    assert service.call("POST", f"{path}/decisions", decision, "decide")[0] == 200
    assert "to erase" in service.call("GET", f"{path}/history", None, "read")[2]
    assert service.call("DELETE", f"{path}/units/to%20erase%2Fby%20its%20path", None, "admin")[0] == 204
    assert "to erase" not in service.call("GET", f"{path}/history", None, "read")[2]
    assert service.call("POST", f"{path}/pause", None, "admin")[0] == 204
    status, _, problem = service.call("POST", f"{path}/decisions", decision, "decide")
    assert (status, problem["code"]) == (409, "experiment_stopped")
    assert service.call("POST", f"{path}/resume", None, "admin")[0] == 204
    assert service.call("POST", f"{path}/arms/2/retire", None, "admin")[0] == 204
    assert service.call("POST", f"{path}/arms/9/retire", None, "admin")[0] == 404
    assert service.call("POST", f"{path}/arms", {}, "admin")[0] == 422  # its program has a fixed number of arms
    answers = [service.call("POST", f"{path}/decisions", {}, "decide") for _ in range(10)]
    assert {answer[2]["arm"] for answer in answers} <= {0, 1}


def test_the_client_of_the_library_decides_rewards_and_reads_refusals(service):
    client = Client(service.url, "banner", service.keys["decide"])
    made = client.decide(unit="client 1")
    assert client.decide(unit="client 1")["id"] == made["id"]
    assert client.reward(made["id"], 1) and not client.reward(made["id"], 1)
    many = client.decide_many([{"unit": "client 2"}, {}])
    assert client.reward_many([{"decision": one["id"], "reward": 0} for one in many]) == [{"recorded": True}] * 2
    client.discard(client.decide()["id"])
    with pytest.raises(ServiceError) as refused:
        client.reward("nothing", 1)
    assert (refused.value.status, refused.value.code) == (404, "unknown_decision")


def test_an_openfeature_client_evaluates_flags(service):
    """The official provider evaluates flags, and reads errors as its SDK defines them."""
    openfeature = pytest.importorskip("openfeature.api", reason="the OpenFeature SDK is not installed")
    provider = pytest.importorskip("openfeature.contrib.provider.ofrep", reason="the OFREP provider is not installed")
    from openfeature.evaluation_context import EvaluationContext
    from openfeature.exception import ErrorCode

    headers = {"Authorization": f"Bearer {service.keys['decide']}"}
    openfeature.set_provider(provider.OFREPProvider(service.url, headers_factory=lambda: headers))
    client = openfeature.get_client()
    context = EvaluationContext("flag user", {"plan": "free"})
    first = client.get_boolean_details("banner", False, context)
    again = client.get_boolean_details("banner", False, context)
    assert first.error_code is None and first.reason == "SPLIT"
    assert (again.variant, again.flag_metadata) == (first.variant, first.flag_metadata)
    assert 0 < first.flag_metadata["propensity"] <= 1
    assert client.get_boolean_details("nothing", False, context).error_code == ErrorCode.FLAG_NOT_FOUND
    assert (
        client.get_boolean_details("banner", False, EvaluationContext()).error_code == ErrorCode.TARGETING_KEY_MISSING
    )
    assert client.get_integer_details("other", -1, context).value in (0, 1, 2)
    assert (
        client.get_boolean_details("banner", False, EvaluationContext("x" * 300)).error_code
        == ErrorCode.INVALID_CONTEXT
    )
    assert client.get_string_details("banner", "", context).error_code == ErrorCode.TYPE_MISMATCH


def test_all_flags_are_evaluated_at_once_and_unchanged_answers_are_not_sent_again(service):
    body = {"context": {"targetingKey": "bulk user"}}
    status, headers, answer = service.call("POST", "/ofrep/v1/evaluate/flags", body, "decide")
    by_key = {flag["key"]: flag for flag in answer["flags"]}
    assert status == 200 and by_key["banner"]["reason"] == "SPLIT"
    assert isinstance(by_key["other"]["value"], int) and by_key["other"]["variant"] == str(by_key["other"]["value"])
    again = service.call("POST", "/ofrep/v1/evaluate/flags", body, "decide", {"If-None-Match": headers["ETag"]})
    assert again[0] == 304 and again[2] == ""


def test_a_form_of_another_site_changes_nothing_and_stored_markup_is_text(service):
    """Without a browser: what its `Origin` says decides, also with the cookie of an administrator."""
    cookie = {"Cookie": f"ppl_bandit_key={service.keys['admin']}", "Content-Type": "application/x-www-form-urlencoded"}
    for origin in ({}, {"Origin": "https://evil.example"}, {"Origin": "null"}):
        changes = (("/experiments/banner/pause", b""), ("/experiments/banner/retire", b"arm=low"), ("/logout", b""))
        for path, form in changes:
            assert service.call("POST", path, headers=cookie | origin, raw=form)[0] == 403
    state = service.call("GET", "/v1/experiments/banner", None, "read")[2]
    assert state["is_paused"] is False and "low" not in state["retired"]
    status, headers, page = service.call("GET", "/experiments/banner", headers=cookie)
    assert status == 200 and "script-src 'self'" in headers["Content-Security-Policy"]
    assert "<img" not in page and page.count("<script") == 1 and "&lt;img" in page and "&lt;script&gt;" in page


def test_the_pages_load_nothing_from_another_host(service):
    cookie = {"Cookie": f"ppl_bandit_key={service.keys['admin']}"}
    for path in ("/", "/docs", "/login", "/experiments/banner", "/experiments/banner/pause"):
        status, headers, page = service.call("GET", path, headers=cookie)
        addresses = re.findall(r"""(?:src|href|action|hx-get)=["']([^"']*)""", page)
        assert status == 200 and len(addresses) >= 4
        assert all(address[:1] == "/" and address[:2] != "//" or address == "data:," for address in addresses), (
            addresses
        )
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"


def test_the_dashboard_in_a_browser(service):
    """Log in, see the report, retire an arm with a confirmation; stored markup is text, and another site's form is refused."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}")
    decide(service, unit=MARKUP)
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 320, "height": 700})
        page, messages = context.new_page(), []
        page.on(
            "console", lambda message: messages.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(service.url)
        assert page.title().startswith("Log in")
        page.fill("#key", service.keys["admin"])
        page.click("main button")
        page.click("text=banner")
        assert page.title() == "banner - ppl_bandit"
        assert page.locator(".report p").count() == 5
        assert MARKUP in page.inner_text("tbody") and "<script>" in page.inner_text("pre >> nth=0")
        assert page.evaluate("document.documentElement.scrollWidth") == 320  # nothing is wider than the screen
        cookie = context.cookies()[0]
        assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
        page.locator("tbody tr", has_text="low").get_by_text("retire").click()
        page.click("main button")
        assert "retired" in page.locator("tbody tr", has_text="low").inner_text()
        assert [text for text in messages if "401" not in text] == []  # of the first page, without a key
        stranger = context.new_page()
        stranger.set_content(
            f'<form method=post action="{service.url}/experiments/banner/pause"><button>x</button></form>'
        )
        stranger.click("button")
        assert "must come from a page of this dashboard" in stranger.inner_text("main")
        plain = browser.new_context(java_script_enabled=False)
        plain.add_cookies([cookie])
        reader = plain.new_page()
        reader.goto(f"{service.url}/experiments/banner")
        assert reader.locator(".report p").count() == 5
        browser.close()
    assert service.call("GET", "/v1/experiments/banner", None, "read")[2]["is_paused"] is False


def test_no_key_no_context_and_no_unit_is_in_the_log(service):
    before = len(service.log.read_text())
    decide(service, unit="a secret unit")
    service.call("POST", DECIDE, {"unit": "another secret unit", "context": {"secret entry": 1}}, "decide")
    service.call("POST", FLAG, {"context": {"targetingKey": "third secret unit"}}, "decide")
    ends = time.monotonic() + 10
    while "times: invalid_context" not in (text := service.log.read_text())[before:]:
        assert time.monotonic() < ends, text
        time.sleep(0.2)
    assert "secret" not in text and not any(key in text for key in service.keys.values())
