"""`ppl-bandit serve --role learner` and `--role decider`, as processes of their own."""

import re
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: pip install ppl_bandit[postgres]")
pytest.importorskip("uvicorn", reason="serving is not installed: pip install ppl_bandit[serve]")
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("journal", "serving")]
import postgres_server  # noqa: E402
from service_process import PROGRAM, Service  # noqa: E402

from ppl_bandit import Journal  # noqa: E402
from ppl_bandit.commands.cli import main  # noqa: E402
from ppl_bandit.commands.parser import make_parser  # noqa: E402

pytestmark = pytest.mark.skipif(
    postgres_server.find_binaries() is None, reason="no PostgreSQL server here: install Debian's postgresql"
)
CONFIG = """
[experiments.banner]
model = "programs.py"
journal = "{url}"
num_samples = 200
publish_every = 0.02
when_stale = "decide"
"""
DECISIONS, REWARDS = "/v1/experiments/banner/decisions", "/v1/experiments/banner/rewards"


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_learner_and_a_decider_serve_one_experiment_and_the_learner_may_be_replaced(tmp_path):
    server, services = postgres_server.Server(), []
    try:
        (tmp_path / "programs.py").write_text(PROGRAM)
        (tmp_path / "experiments.toml").write_text(CONFIG.format(url=server.url))

        def start(role):
            folder = tmp_path / f"{role}-{len(services)}"
            folder.mkdir()
            services.append(Service(folder, [str(tmp_path / "experiments.toml"), "--role", role]))
            return services[-1].start(seconds=600)

        learner, decider = start("learner"), start("decider")
        status, _, one = decider.call("POST", DECISIONS, {"unit": "u"})
        assert status == 200 and decider.call("POST", DECISIONS, {"unit": "u"})[2]["id"] == one["id"]
        many = decider.call("POST", f"{DECISIONS}/batch", {"requests": [{}, {"unit": "u"}]})[2]["decisions"]
        assert many[1]["id"] == one["id"]
        assert learner.call("POST", DECISIONS, {"unit": "u"})[2]["id"] == one["id"]  # a learner decides too
        reward = {"decision": one["id"], "reward": 1}
        assert decider.call("POST", REWARDS, reward)[:3:2] == (200, {"recorded": True})  # the learner's answer
        assert learner.call("POST", REWARDS, reward)[:3:2] == (200, {"recorded": False})
        assert decider.call("POST", REWARDS, reward | {"reward": 0})[0] == 409
        rewards = {"rewards": [{"decision": "unknown", "reward": 1}, {"decision": many[0]["id"], "reward": 1}]}
        results = decider.call("POST", f"{REWARDS}/batch", rewards)[2]["results"]
        assert results[0]["problem"]["status"] == 404 and results[1] == {"recorded": True}
        wait_for(lambda: decider.call("POST", DECISIONS, {})[2]["version"] > one["version"])
        assert decider.call("GET", "/v1/experiments/banner/report")[0] == 404 == decider.call("GET", "/")[0]
        assert learner.call("GET", "/v1/experiments/banner/report")[0] == 200
        learner.process.kill()
        learner.process.wait()
        wait_for(lambda: decider.call("GET", "/readyz")[0] == 503)
        status, _, last = decider.call("POST", DECISIONS, {})
        assert status == 200  # decisions go on, with an alarm
        assert (
            decider.call("POST", REWARDS, {"decision": many[0]["id"], "reward": 0})[0] == 504
        )  # recorded, not learnt yet
        assert 'ppl_bandit_alarms{experiment="banner"} 1.0' in decider.call("GET", "/metrics")[2]
        other = start("learner")
        wait_for(lambda: decider.call("GET", "/readyz")[0] == 200)
        assert other.call("POST", REWARDS, {"decision": last["id"], "reward": 0})[0] == 200
        assert decider.stop() < 15 and other.stop() < 15
        assert "Traceback" not in decider.log.read_text() + other.log.read_text()
        with Journal(server.url) as journal:
            journal.verify("banner")
            assert not journal.num_unsealed("banner")
        model = str(tmp_path / "programs.py")
        for action in ("verify", "replay"):
            assert main(["journal", server.url, action, "--name", "banner", "--model", model]) == 0
    finally:
        for service in services:
            if service.process is not None:
                service.process.kill()
                service.process.wait()
        server.remove()


def test_roles_need_postgresql(tmp_path, capsys):
    (tmp_path / "programs.py").write_text(PROGRAM)
    for role in ("learner", "decider"):
        journal = str(tmp_path / "j.db")
        assert main(["serve", str(tmp_path / "programs.py"), "--journal", journal, "--role", role]) == 2
        assert re.search("needs? a journal in PostgreSQL", capsys.readouterr().err)


def test_the_files_of_deployment_start_one_learner_and_two_deciders():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    folder = Path(__file__).parents[2] / "docs" / "deployment"
    services = yaml.safe_load((folder / "compose-deciders.yaml").read_text())["services"]
    roles = {
        name: make_parser().parse_args(["serve", *own["command"]]).role
        for name, own in services.items()
        if "command" in own
    }
    assert roles == {"learner": "learner", "decider": "decider"} and services["decider"]["deploy"]["replicas"] == 2
    assert services["decider"]["depends_on"] == {"learner": {"condition": "service_healthy"}}
    caddy = (folder / "Caddyfile.deciders").read_text()
    decisions = re.compile(re.search(r"path_regexp (\S+)", caddy)[1])
    for path in (DECISIONS, f"{DECISIONS}/batch", "/ofrep/v1/evaluate/flags", "/ofrep/v1/evaluate/flags/banner"):
        assert decisions.match(path)
    for path in (REWARDS, f"{DECISIONS}/ID/reward", f"{DECISIONS}/ID", "/v1/experiments/banner/report", "/"):
        assert not decisions.match(path)
