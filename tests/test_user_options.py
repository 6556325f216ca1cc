"""What users run is tested: the checks in `user_options` run in a process without the compiler flags of the test suite.

Their slow cases run with `-m slow`, each in a process of its own, so that a slice of the slow tests can hold some of them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "user_options"
FILES = [str(path) for path in sorted(FOLDER.glob("check_*.py"))]
SLOW = (
    "test_an_engine_reaches_the_closed_form_posterior[conjugate]",
    "test_an_engine_reaches_the_closed_form_posterior[reweight]",
    "test_an_engine_reaches_the_closed_form_posterior[nuts]",
    "test_an_engine_reaches_the_closed_form_posterior[svi]",
    "test_a_linear_bandit_learns_the_normal_equations",
    "test_a_simulation_plays_the_better_arm_more_often_than_chance",
)


def run_pytest(*arguments):
    """Run pytest without compiler flags in another process, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments],
        env={**os.environ, "XLA_FLAGS": ""},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_checks_pass_under_the_compiler_options_of_users():
    run_pytest(*FILES)


@pytest.mark.slow
@pytest.mark.parametrize("check", SLOW)
def test_a_slow_check_passes_under_the_compiler_options_of_users(check):
    (file,) = (path for path in FILES if f"def {check.partition('[')[0]}(" in Path(path).read_text())
    run_pytest("-m", "slow", f"{file}::{check}")


@pytest.mark.slow
def test_no_slow_check_is_left_out():
    listed = [line for line in run_pytest("-m", "slow", "--collect-only", *FILES).splitlines() if "::" in line]
    assert sorted(line.rpartition("::")[2] for line in listed) == sorted(SLOW)
