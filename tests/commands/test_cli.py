"""The command line: one line per model, JSON, exit status 2 for invalid input."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from ppl_bandit.commands import demo
from ppl_bandit.commands.check import check_model
from ppl_bandit.commands.cli import main
from ppl_bandit.journal.model_files import load_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use a temporary compilation cache, and restore JAX's settings for it."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for name, value in before.items():
        jax.config.update(name, value)


INVALID = """
import numpyro
import numpyro.distributions as dist

num_arms = 2


def model(arm):
    numpyro.sample("click", dist.Bernoulli(numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))[arm]))
"""


def test_check_says_which_models_are_exact_and_why_the_others_are_not(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(INVALID)
    assert main(["check", "bernoulli", "logistic", str(tmp_path / "mine.py"), "nosuchmodel"]) == 2
    exact, approximate, invalid, missing = capsys.readouterr().out.splitlines()
    assert exact.split() == ["bernoulli", "exact", "rate:", "Beta"]
    assert "logistic" in approximate and "not exact" in approximate and "cannot be proved conjugate" in approximate
    assert " nats" not in approximate  # measures are details
    assert "invalid" in invalid and "no sample site 'reward'" in invalid
    assert "invalid" in missing and "bernoulli" in missing  # the bundled names are listed


def test_check_prints_json(capsys):
    assert main(["check", "bernoulli", "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["verdict"] == "exact"
    assert finding["families"] == "rate: Beta"
    assert "EXACT" in finding["report"]


@pytest.mark.slow
def test_the_demo_explains_the_regret_of_hurdle_by_its_truth():
    truth = load_model("hurdle").truth
    rate, order_value = np.asarray(truth["rate"]), np.asarray(truth["order_value"])
    sd = np.sqrt(2 * rate * order_value**2 - (rate * order_value) ** 2)  # E spend^2 = 2 order_value^2 after a sale
    earned = ", ".join(f"{value:.0f}" for value in (rate * order_value)[:2]) + f" and {(rate * order_value)[2]:.0f}"
    assert f"earn {earned} per visitor" in demo.HURDLE_NOTE
    assert f"deviation of {sd.min():.0f} to\n  {sd.max():.0f}" in demo.HURDLE_NOTE


@pytest.mark.slow  # its parts are those of `check` and `run` below; .ci/run runs the demo of the wheel
def test_the_demo_proves_plays_and_draws(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "CONJUGATE_MODELS", ("bernoulli",))
    assert main(["demo", "--out", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["models"][0]["name"] == "bernoulli"
    mean, error = result["models"][0]["regret"]["double sampling"]
    at_random, _ = result["models"][0]["regret"]["random play"]
    assert at_random == pytest.approx(demo.NUM_STEPS * (0.8 - (0.4 + 0.7 + 0.8) / 3))  # the rates of its truth
    assert 0 < mean < mean + 5 * error < at_random
    assert result["models"][0]["families"] == "rate Beta"
    assert (tmp_path / "demo.png").stat().st_size > 10_000


def test_a_reader_that_closes_the_output_causes_no_traceback():
    command = [sys.executable, "-m", "ppl_bandit.commands.cli", "check", "nosuchmodel"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # before the first line is written
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 141 and "Traceback" not in errors and "BrokenPipe" not in errors


def test_bad_arguments_end_with_status_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check"])
    assert stopped.value.code == 2
    assert "MODEL" in capsys.readouterr().err


def test_run_writes_table_figures_and_data(tmp_path, capsys):
    command = ["run", "bernoulli", "--selectors", "ds,ts", "--steps", "15", "--realizations", "8", "--samples", "20"]
    assert main([*command, "--out", str(tmp_path / "runs"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "conjugate"
    assert [score["selector"] for score in found["scores"]] == ["double sampling", "Thompson"]
    assert found["scores"][1]["relative"] == 0.0
    written = {path.name for path in (tmp_path / "runs").iterdir()}
    assert written == {"table.md", "runs.nc", "regret.png", "arms.png", "one_run.png"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--selectors", "ds,ucb"], "--selectors has 'ucb', expected some of ds, "),
        (["--engine", "mcmc"], "--engine has 'mcmc', expected some of auto, exact"),
        (["--steps", "0"], "num_steps must be a positive integer, got 0"),
    ],
)
def test_run_refuses_unknown_names_and_invalid_numbers(arguments, message, tmp_path, capsys):
    assert main(["run", "bernoulli", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow  # test_collapsed_split.py checks the rule
def test_check_reports_not_exact_if_most_dimensions_would_be_particles(tmp_path):
    path = tmp_path / "rates.py"
    path.write_text(
        "import jax.numpy as jnp\nimport numpyro\nimport numpyro.distributions as dist\n\nnum_arms = 4\n\n\n"
        "def model(arm):\n"
        "    mean = numpyro.sample('mean', dist.Normal(0.0, 1.0))\n"
        "    spread = numpyro.sample('spread', dist.HalfNormal(1.0))\n"
        "    log_rate = numpyro.sample('log_rate', dist.Normal(mean, spread).expand([4]).to_event(1))\n"
        "    numpyro.sample('reward', dist.Poisson(jnp.exp(log_rate[arm])))\n"
    )
    found = check_model(str(path))
    assert found.verdict == "not exact" and "5 of 6 dimensions would be outer" in found.report
