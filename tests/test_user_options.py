"""What users run is tested: default tests pass in a process without the compiler flags of the test suite.

`.ci/run` runs the slow tests without those flags, and a slice of them may hold these.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CHECKS = {
    "every approximate engine": "engines/test_engines_contract.py::test_a_batch_leads_to_the_exact_posterior",
    "a live bandit": "live/test_bandit.py",
    "a simulation": "simulation/test_simulation.py",
}


@pytest.mark.slow
@pytest.mark.parametrize("tests", CHECKS.values(), ids=CHECKS)
def test_default_tests_pass_under_the_compiler_options_of_users(tests):
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", str(FOLDER / tests)]
    done = subprocess.run(
        command, env={**os.environ, "XLA_FLAGS": ""}, cwd=FOLDER.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
