"""Parts of the service without a server: keys, the file of experiments, and addresses."""

import asyncio
import json
import os
import re
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import uvicorn
from shared_models import bernoulli_bandit

from ppl_bandit import Decision, Design, stopping
from ppl_bandit.commands.cli import main
from ppl_bandit.files.experiments_file import open_bandit, read_config
from ppl_bandit.files.keys import KeyFile
from ppl_bandit.journal.stores.store import JournalError, JournalTimeout
from ppl_bandit.serving import create_app, dashboard, server
from ppl_bandit.serving.access import Gate
from ppl_bandit.serving.batches import BatchQueue, Limits
from ppl_bandit.serving.experiments import ServedExperiment
from ppl_bandit.serving.messages import DecisionRequest
from ppl_bandit.serving.problems import Problem
from ppl_bandit.serving.server import check_address


def test_a_key_is_shown_once_and_kept_as_its_digest(tmp_path, capsys):
    file = tmp_path / "keys.toml"
    create = ["keys", "create", "--role", "decide", "--experiment", "a", "--file", str(file)]
    assert main(create) == 0
    key = capsys.readouterr().out.split()[-1]
    access = KeyFile(file).find(key)
    assert access.role == "decide" and access.opens("a") and not access.opens("b")
    assert key not in file.read_text() and os.stat(file).st_mode & 0o077 == 0
    assert KeyFile(file).find(key + "x") is None and KeyFile(file).find("") is None
    assert main(["keys", "list", "--file", str(file)]) == 0
    id = capsys.readouterr().out.split()[0]
    assert main(["keys", "revoke", id, "--file", str(file)]) == 0
    assert KeyFile(file).find(key) is None
    assert main(["keys", "revoke", id, "--file", str(file)]) == 2


def test_a_change_keeps_the_owner_and_the_mode_of_the_file(tmp_path):
    """A service that runs as another user reads the file."""
    file = KeyFile(tmp_path / "keys.toml")
    id = file.create("read")[0].id
    os.chmod(file.path, 0o640)
    owner = (10001, 10001) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(file.path, *owner)
    file.revoke(id)
    found = file.path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (*owner, 0o640)


def test_keys_made_at_once_are_all_kept(tmp_path):
    files = [KeyFile(tmp_path / "keys.toml") for _ in range(8)]
    threads = [threading.Thread(target=file.create, args=("read",)) for file in files]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(files[0].records()) == 8


def test_a_revoked_key_opens_nothing_and_a_damaged_file_neither(tmp_path):
    file = KeyFile(tmp_path / "keys.toml")
    record, key = file.create("admin", ('quote " and \\',))
    assert file.find(key).opens('quote " and \\')
    KeyFile(file.path).revoke(record.id)
    file._looked = -10.0  # as if a second had passed
    assert file.find(key) is None
    _, key = file.create("admin")
    file._looked = -10.0
    assert file.find(key) is not None
    file.path.write_text("[[keys")
    file._looked = -10.0
    assert file.find(key) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", "127.example.org"])
def test_an_address_that_others_reach_needs_keys(host, tmp_path):
    with pytest.raises(ValueError, match="keys create"):
        check_address(host, None)
    check_address(host, KeyFile(tmp_path / "keys.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "experiments"),
        ("[experiments.a]\nmodel = 'bernoulli'", "needs model and journal"),
        ("[experiments.a]\nmodel = 'bernoulli'\njournal = 'j'\nselektor = 'x'", "selektor"),
        ("[experiments.a]\nmodel = 'bernoulli'\njournal = 'j'\nreward_window = 'soon'", "7 days"),
        ("[experiments.a]\nmodel = 'bernoulli'\njournal = 'env:NOT_SET_HERE'", "NOT_SET_HERE"),
        ("[experiments.a]\nmodel = 3\njournal = 'j'", "must be a text"),
    ],
)
def test_a_wrong_file_of_experiments_is_refused(text, message, tmp_path):
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path / "e.toml")


def test_a_file_of_experiments_names_secrets_spans_and_files_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JOURNAL_URL", "postgresql://secret")
    fields = "model = 'm.py:f'\njournal = 'env:JOURNAL_URL'\nreward_window = '1.5 hours'\nunit_window = 60"
    (tmp_path / "e.toml").write_text(
        f"[experiments.a]\n{fields}\n[experiments.b]\nmodel = 'bernoulli'\njournal = 'j.db'\n"
    )
    found = read_config(tmp_path / "e.toml")
    assert found["a"]["model"] == str(tmp_path / "m.py:f") and found["a"]["journal"] == "postgresql://secret"
    assert found["a"]["reward_window"].total_seconds() == 5400 and found["a"]["unit_window"].total_seconds() == 60
    assert found["b"] == {"model": "bernoulli", "journal": str(tmp_path / "j.db")}


def queue_results(work, limits, requests):
    """Put requests into a queue in an event loop; return their results, refusals included."""

    async def main():
        queue = BatchQueue("test", work, limits)
        queue.start()
        found = []
        for request in requests:
            try:
                found.append(queue.put(request))
            except Problem as problem:
                found.append(problem)
        results = [one if isinstance(one, Problem) else await one for one in found]
        return results, queue

    return asyncio.run(main())


def test_a_full_queue_refuses_and_the_refused_are_never_worked_on():
    release, worked = threading.Event(), []

    def work(requests):
        release.wait(5)
        worked.extend(requests)
        return list(requests)

    threading.Timer(0.3, release.set).start()
    results, queue = queue_results(work, Limits(waiting=4, batch=2, deadline=5), range(20))
    refused = {index for index, result in enumerate(results) if isinstance(result, Problem)}
    assert {result.code for result in results if isinstance(result, Problem)} == {"queue_full"}
    assert 4 <= 20 - len(refused) <= 6  # those that wait, and a batch that was taken
    assert queue.close(5) and sorted(worked) == [index for index in range(20) if index not in refused]


def test_a_request_whose_deadline_passes_is_answered_then_and_not_recorded_later():
    release, worked = threading.Event(), []

    def work(requests):
        worked.extend(requests)
        release.wait(5)
        return list(requests)

    begun = time.monotonic()
    results, queue = queue_results(work, Limits(waiting=10, batch=1, deadline=0.5), range(3))
    assert time.monotonic() - begun < 1 and {result.status for result in results} == {504}
    release.set()
    assert queue.close(5) and worked == [0]


def test_a_batch_that_fails_answers_each_of_its_requests():
    def work(requests):
        raise RuntimeError("broken")

    results, queue = queue_results(work, Limits(), range(3))
    assert [type(result) for result in results] == [RuntimeError] * 3 and queue.close(5)


@pytest.mark.parametrize(
    ("headers", "client", "is_open"),
    [
        ({b"host": b"127.0.0.1:8000"}, "127.0.0.1", True),
        ({b"host": b"[::1]:8000"}, "::1", True),
        ({b"host": b"localhost"}, "127.0.0.1", True),
        ({b"host": b"localhost:8000", b"origin": b"http://localhost:8000"}, "127.0.0.1", True),
        ({b"host": b"localhost:8000"}, "192.0.2.1", False),
        ({b"host": b"evil.example:8000"}, "127.0.0.1", False),  # a domain that resolves to this machine
        ({b"host": b"localhost:8000", b"origin": b"https://evil.example"}, "127.0.0.1", False),
        ({b"host": b"localhost:8000", b"origin": b"null"}, "127.0.0.1", False),
        ({}, "127.0.0.1", False),
    ],
)
def test_without_keys_only_callers_on_this_machine_enter(headers, client, is_open):
    scope = {"client": (client, 1)}
    if is_open:
        assert Gate({}, None).enter(scope, headers).has_role("admin")
    else:
        with pytest.raises(Problem) as refused:
            Gate({}, None).enter(scope, headers)
        assert refused.value.status == 403


async def answer_of(app, path, method="GET", body=b""):
    """Call an ASGI application as a server does; return the status and the body."""
    head, _, query = path.partition("?")
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": head, "raw_path": head.encode(), "query_string": query.encode()}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "scheme": "http"}
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


def quick_bandit(**options):
    """Return a bandit that is ready at once: a service of its own process compiles batches in other tests."""
    bandit = bernoulli_bandit(3, **options)
    bandit.warm_up = lambda batches: None
    return bandit


def in_application(app, ask):
    """Run a coroutine while an application is ready."""

    async def main():
        async with app.router.lifespan_context(app):
            while (await answer_of(app, "/readyz"))[0] != 200:
                await asyncio.sleep(0.02)
            return await ask()

    return asyncio.run(main())


STATE = "/v1/experiments/a"


def test_readers_of_a_journal_that_does_not_answer_wait_no_longer_than_one_of_them(monkeypatch):
    """They wait for one attempt together, and hold none of the threads that a pause or the metrics need."""
    bandit, calls, release = quick_bandit(), [], threading.Event()

    def report():
        calls.append(release.wait(20))
        raise JournalTimeout("no answer")

    monkeypatch.setattr(bandit, "report", report)
    app = create_app({"a": bandit})

    async def ask():
        readers = [asyncio.create_task(answer_of(app, f"{STATE}/report")) for _ in range(60)]
        await asyncio.sleep(0.05)
        others = [await answer_of(app, "/metrics"), await answer_of(app, f"{STATE}/pause", "POST")]
        release.set()
        return others, {status for status, _ in await asyncio.gather(*readers)}

    others, statuses = in_application(app, ask)
    assert [status for status, _ in others] == [200, 204] and statuses == {504}
    assert calls in ([True], [True, True])  # the pause lets them try again


def test_what_is_shown_of_an_experiment_is_that_of_now_whoever_changed_it(tmp_path):
    journal, day = tmp_path / "e.db", 86_400.0
    with bernoulli_bandit(3, journal=journal) as first, pytest.MonkeyPatch.context() as clock:
        now = time.time()
        clock.setattr(time, "time", lambda: now - 3 * day)
        first.update(first.select(), 1.0)
    other, bandit = (quick_bandit(journal=journal) for _ in range(2))
    app = create_app({"a": bandit})

    async def ask():
        age = (await answer_of(app, "/metrics"))[1]
        for _ in range(5):
            body = b'{"request_id": "r", "unit": "u"}'
            made = await answer_of(app, f"{STATE}/decisions", "POST", body)
        other.pause()
        state = json.loads((await answer_of(app, STATE))[1])
        return age, json.loads(made[1]), state, (await answer_of(app, "/metrics"))[1]

    age, made, state, text = in_application(app, ask)
    [seconds] = re.findall(r"\nppl_bandit_posterior_age_seconds.* (\S+)\n", age)
    assert abs(float(seconds) - 3 * day) < 60  # since the newest reward, not since this process began
    assert state["is_paused"] and state["num_pending"] == 1
    counts = re.findall(r'decisions_total\{arm="(.)".* (\S+)\n', text)
    assert [(int(arm), float(count)) for arm, count in counts] == [(made["arm"], 1.0)]  # four were repeated


def test_a_request_that_does_not_arrive_whole_is_ended_whatever_it_asks_for(monkeypatch):
    monkeypatch.setattr(server, "_SECONDS_FOR_REQUEST", 0.4)
    app = create_app({"a": quick_bandit()})
    config = uvicorn.Config(app, http=server.LimitedProtocol, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()

    async def seconds_until_closed(port, path, part):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        writer.write(head.encode())
        begun = time.monotonic()
        while time.monotonic() < begun + 3:
            writer.write(part)
            try:
                if not await asyncio.wait_for(reader.read(1000), 0.1):
                    break
            except TimeoutError:
                continue
        writer.close()
        return time.monotonic() - begun

    async def main():
        make = lambda: server.LimitedProtocol(config, state, {})  # noqa: E731
        listening = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        paths = ("/login", f"{STATE}/decisions/d/reward", f"{STATE}/decisions", f"{STATE}/arms")
        return await asyncio.gather(*(seconds_until_closed(port, path, part) for path in paths for part in (b"x", b"")))

    assert max(asyncio.run(main())) < 1.5


def test_any_server_runs_the_application_and_a_page_shows_all_of_many_arms(monkeypatch):
    monkeypatch.setattr(dashboard, "_NUM_ROWS", 2)  # many are more than these
    bandit = quick_bandit()
    app = create_app({"many": bandit})

    async def ask():
        return [await answer_of(app, f"/experiments/many{more}") for more in ("", "?arms=all", "?arms=all")]

    (status, some), (_, every), (_, again) = in_application(app, ask)
    assert status == 200 and every == again  # within a second the page is not computed anew
    assert (some.count("<tr"), every.count("<tr")) == (3, 4)  # with the head of the table
    assert "Show all 3 arms" in some and "Show all" not in every
    assert 'hx-get="/experiments/many?arms=all"' in every and 'hx-get="/experiments/many"' in some
    assert bandit.select().arm in range(3)  # it belongs to the caller, who closes it


def test_an_experiment_continues_with_another_setting_where_that_is_allowed(tmp_path, warm_starts):
    file = tmp_path / "experiments.toml"

    def opened(selector, *further):
        lines = ['model = "bernoulli"', 'journal = "e.db"', f'selector = "{selector}"', *further]
        file.write_text("\n".join(["[experiments.banner]", *lines]))
        return open_bandit("banner", read_config(file)["banner"], {})

    opened("thompson").close()
    app = create_app(file)  # the file of experiments is enough for a program, too
    status, state = asyncio.run(answer_of(app, "/v1/experiments/banner"))
    assert (status, json.loads(state)["state"]) == (200, "compiling")
    with pytest.raises(JournalError, match=r"selector: it was thompson.*ppl-bandit serve --allow-changed"):
        opened("greedy")
    opened("greedy", "allow_changed = true").close()
    opened("greedy").close()  # the change is recorded


def test_the_service_takes_a_planned_look_as_soon_as_it_is_due():
    design = Design([4, 8], stopping=[stopping.superiority(0.999999)])
    bandit = bernoulli_bandit(num_samples=200, design=design)
    served = ServedExperiment("banner", bandit)
    made = served._decide([DecisionRequest() for _ in range(6)])  # more than are left before the first look
    assert [type(one) for one in made] == [Decision] * 6
    assert [look["num_decisions"] for look in served.looks()] == [4]
    *made, refused = served._decide([DecisionRequest() for _ in range(3)])
    assert [type(one) for one in made] == [Decision] * 2 and refused.status == 409
    assert [look["ending"] for look in served.looks()] == ["continue", "undecided"]


def test_an_experiment_is_ready_before_its_alarms_have_read_the_journal(monkeypatch):
    served = ServedExperiment("a", bernoulli_bandit())
    monkeypatch.setattr(served.bandit, "warm_up", lambda batches: None)
    monkeypatch.setattr(served.bandit, "alarms", lambda: [served.state])
    served.compile()
    assert served.state == "ready" and served.gauges()["alarms"] == 0
    served.count()
    assert served.gauges()["alarms"] == 1


def test_a_look_that_another_process_made_due_is_taken_by_the_next_request(tmp_path):
    design = Design([4, 8], stopping=[stopping.superiority(0.999999)])
    first, second = (
        ServedExperiment("banner", bernoulli_bandit(num_samples=200, design=design, journal=str(tmp_path / "e.db")))
        for _ in range(2)
    )
    assert [type(one) for one in first._decide([DecisionRequest() for _ in range(4)])] == [Decision] * 4
    assert [type(one) for one in second._decide([DecisionRequest()])] == [Decision]
    assert [look["num_decisions"] for look in second.looks()] == [4]
