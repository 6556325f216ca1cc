"""The files of docs/deployment: programs that read them check them where they are installed."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from ppl_bandit.commands.parser import make_parser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "deployment"


def run(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


def instructions(text):
    """Return the instructions of a Dockerfile as (name, rest)."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line]


def test_the_image_has_the_package_without_build_tools_and_runs_as_its_own_user():
    found = instructions((FOLDER / "Dockerfile").read_text())
    second = [name for name, _ in found].index("FROM", 1)
    build, final = found[:second], found[second:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"])
    assert {source for name, rest in build if name == "COPY" for source in rest.split()[:-1]} == needed
    extras = re.search(r"\.\[(.*)\]", dict(build)["RUN"])[1].split(",")
    assert set(extras) == {"serve", "postgres"} <= set(project["project"]["optional-dependencies"])
    assert [rest for name, rest in final if name == "COPY"] == ["--from=build /opt/ppl-bandit /opt/ppl-bandit"]
    assert final.index(("USER", "ppl-bandit")) < [name for name, _ in final].index("ENTRYPOINT")
    command = json.loads(dict(final)["ENTRYPOINT"]) + json.loads(dict(final)["CMD"])
    assert command[0] == "ppl-bandit" and make_parser().parse_args(command[1:]).host == "0.0.0.0"
    assert json.loads(dict(final)["HEALTHCHECK"].partition("CMD ")[2])[0] == "python"


def test_the_services_of_compose_wait_for_their_database_and_name_files_that_are_there():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    document = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    bandits, database = document["services"]["bandits"], document["services"]["database"]
    assert (FOLDER / bandits["build"]["context"] / bandits["build"]["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    assert bandits["depends_on"] == {"database": {"condition": "service_healthy"}} and database["healthcheck"]["test"]
    named = {volume.partition(":")[0] for service in (bandits, database) for volume in service["volumes"]} - {"./"}
    assert named == set(document["volumes"])
    assert all(port.startswith("127.0.0.1:") for port in bandits["ports"])  # TLS is the proxy's
    assert bandits["environment"]["JOURNAL_URL"].endswith("@database/bandits") and "ports" not in database


def test_the_unit_is_one_that_systemd_reads(tmp_path):
    text = (FOLDER / "ppl-bandit.service").read_text()
    command = re.search(r"ExecStart=(\S+) (.*)", text)
    assert make_parser().parse_args(command[2].split()).keys == Path("/etc/ppl-bandit/keys.toml")
    (tmp_path / "ppl-bandit.service").write_text(text.replace(command[1], shutil.which("true")))
    assert "ppl-bandit.service:" not in run("systemd-analyze", "verify", tmp_path / "ppl-bandit.service")


def test_nginx_and_caddy_accept_their_files(tmp_path):
    text = (FOLDER / "nginx.conf").read_text()
    files = "-keyout", tmp_path / "own.key", "-out", tmp_path / "own.crt"
    run(*"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split(), *files)
    (tmp_path / "site.conf").write_text(text.replace("/etc/ssl/bandits.example.org", str(tmp_path / "own")))
    main = f"events {{}}\npid {tmp_path}/pid;\nerror_log stderr;\nhttp {{ include {tmp_path}/site.conf; }}\n"
    (tmp_path / "main.conf").write_text(main)
    run("nginx", "-t", "-c", tmp_path / "main.conf")
    run("caddy", "validate", "--config", FOLDER / "Caddyfile", "--adapter", "caddyfile")
