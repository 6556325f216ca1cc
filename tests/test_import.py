"""What is asked for little loads little."""

import subprocess
import sys

import pytest

import ppl_bandit

HEAVY = ("arviz", "jax", "matplotlib", "numpyro", "pandas", "scipy", "xarray")


def loaded(script):
    """Return the heavy libraries that a script loads."""
    script += f"\nimport sys; print('LOADED', *sorted({set(HEAVY)!r} & sys.modules.keys()))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()[-1].split()[1:]


def test_importing_the_package_loads_none_of_the_heavy_libraries():
    assert loaded("import ppl_bandit") == []
    assert loaded("from ppl_bandit import Bandit") == ["jax", "numpyro", "scipy"]  # none that only draws or tabulates


def test_every_public_name_is_there():
    for name in ppl_bandit.__all__:
        assert getattr(ppl_bandit, name) is not None


@pytest.mark.parametrize("words", [["--help"], ["journal", "--help"], ["serve", "--help"], ["keys", "list"], ["run"]])
def test_help_and_refused_arguments_wait_for_no_library(words):
    script = f"""
import contextlib
from ppl_bandit.commands.cli import main
with contextlib.suppress(SystemExit):
    main({words!r})
"""
    assert loaded(script) == []


def test_the_demo_shows_its_first_line_before_any_library_is_loaded():
    assert loaded("import ppl_bandit.commands.demo") == []
