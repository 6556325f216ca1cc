import subprocess
import sys

HEAVY = ("arviz", "matplotlib", "pandas", "xarray")


def test_importing_the_package_loads_none_of_the_heavy_libraries():
    script = f"import sys, ppl_bandit; print(*sorted({set(HEAVY)!r} & sys.modules.keys()))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == []
