"""What users run is tested: the checks in `user_options` run in a process without the compiler flags of the test suite."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "user_options"


def test_checks_pass_under_the_compiler_options_of_users():
    files = [str(path) for path in sorted(FOLDER.glob("check_*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files],
        env={**os.environ, "XLA_FLAGS": ""},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
