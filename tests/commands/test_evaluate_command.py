"""`ppl-bandit evaluate`: verdict, table, diagnostics, files; refusals name the option."""

import json

import numpy as np
import pytest

from ppl_bandit import Bandit, selectors
from ppl_bandit.commands.cli import main
from ppl_bandit.journal.model_files import load_model

MODEL = """
import numpyro
import numpyro.distributions as dist

num_arms = 2


def model(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, warm_starts):
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "rates.py").write_text(MODEL)
    (folder / "sceptic.py").write_text(MODEL.replace("1.0, 1.0", "500.0, 500.0"))
    (folder / "three.py").write_text(MODEL.replace("num_arms = 2", "num_arms = 3"))
    file = load_model(folder / "rates.py")
    bandit = Bandit(
        file.program,
        num_arms=2,
        selector=selectors.with_floor(selectors.thompson(), 0.2),
        num_samples=50,
        journal=folder / "j.db",
        name="x",
    )
    rng = np.random.default_rng(0)
    for _ in range(150):
        decision = bandit.select()
        bandit.update(decision, float(rng.random() < {0: 0.1, 1: 0.9}[decision.arm]))
    return folder


def run(capsys, folder, *words):
    status = main(["evaluate", str(folder / "j.db"), "--out", str(folder / "out"), *map(str, words)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_verdict_comes_first_and_files_are_written(recorded, capsys):
    status, out, _ = run(capsys, recorded, "--contrast", 1, 0, "--model", recorded / "rates.py")
    assert status == 0 and out.startswith("1 beats 0 by")
    assert out.index("dr_stabilised") < out.index("effective sample size:") < out.index("wrote table.csv")
    assert {path.name for path in (recorded / "out").iterdir()} >= {"table.csv", "sequence.csv", "evaluation.png"}


def test_json_has_the_same_numbers_without_a_model(recorded, capsys):
    status, out, _ = run(capsys, recorded, "--arm", 1, "--json", "--level", 0.9, "--bounds", 0, 1)
    found = json.loads(out)
    assert status == 0 and abs(found["estimate"] - 0.9) < 4 * found["standard_error"] and found["level"] == 0.9
    assert found["posterior"] is None and not found["is_refused"]
    assert found["table"]["dr_stabilised"]["estimate"] == found["estimate"]


@pytest.mark.slow
def test_another_selector_and_another_program(recorded, capsys):
    status, out, err = run(capsys, recorded, "--selector", "greedy")
    assert status == 0 and "greedy() on the logged path" in out and "rates.py:model, as the journal says" in err
    words = ("--model", recorded / "rates.py", "--against", recorded / "sceptic.py")
    status, out, _ = run(capsys, recorded, *words)
    assert status == 0 and out.startswith("rates predicted the log better than sceptic")
    status, out, _ = run(capsys, recorded, *words, "--json")
    found = json.loads(out)
    assert found["difference"]["value"] > 0 and set(found["widths"]) == {"rates", "sceptic"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arm", "7"], "--arm names the arm '7', expected one of 0, 1"),
        (["--selector", "best", "--model", "FOLDER/rates.py"], "--selector has 'best'"),
        (["--arm", "1", "--model", "FOLDER/three.py"], "has 3 arms, but the experiment has 2"),
        (["--arm", "1", "--name", "y"], "no experiment 'y'"),
        (["--arm", "1", "--bounds", "0", "0.5"], "bounds are"),
        (["--arm", "1", "--outcome", "clicks"], "outcome is 'clicks'"),
    ],
)
def test_wrong_options_are_refused_with_their_name(recorded, capsys, words, message):
    status, _, err = run(capsys, recorded, *(word.replace("FOLDER", str(recorded)) for word in words))
    assert status == 2 and message in err
