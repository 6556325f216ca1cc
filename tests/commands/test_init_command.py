"""`ppl-bandit init` writes a project whose own test runs."""

import subprocess
import sys

import pytest

from ppl_bandit.commands.cli import main
from ppl_bandit.files.experiments_file import read_config
from ppl_bandit.journal.model_files import load_model


def test_a_project_has_a_program_settings_and_a_test(tmp_path, capsys):
    folder = tmp_path / "price-test"
    assert main(["init", str(folder)]) == 0
    assert "python -m pytest" in capsys.readouterr().out
    settings = read_config(folder / "experiments.toml")["price-test"]
    file = load_model(settings["model"])
    assert file.num_arms == len(settings["arms"]) and file.truth is not None
    assert "The reward model of price-test" in (folder / "model.py").read_text()
    assert main(["init", str(folder)]) == 2 and "exists already" in capsys.readouterr().err


def test_a_name_that_cannot_be_an_address_is_refused(tmp_path, capsys):
    assert main(["init", str(tmp_path / "Price test")]) == 2
    assert "'Price test' cannot be a name" in capsys.readouterr().err
    assert not (tmp_path / "Price test").exists()


@pytest.mark.slow
def test_the_test_of_a_project_passes(tmp_path):
    main(["init", str(tmp_path / "mine")])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "mine",
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "2 passed" in run.stdout, run.stdout + run.stderr
