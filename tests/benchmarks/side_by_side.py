"""Run the parts of a table in processes side by side, one core each."""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

__all__ = ["run_parts"]

_ONE_CORE = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def run_parts(function, parts, num_jobs):
    """Return {part: function(*part)}, each in a process of one core, the first parts first; a part that fails is left out."""
    os.environ.update(_ONE_CORE)
    found = {}
    # One part a process, and then a new one: compiled programs of other parts would only fill its memory.
    pool = ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with pool:
        pending = {pool.submit(_timed, function, part): part for part in parts}
        for done in as_completed(pending):
            part = pending[done]
            try:
                found[part], seconds = done.result()
                print(f"{' '.join(map(str, part))}: {seconds:.0f} s", file=sys.stderr, flush=True)
            except Exception as error:  # a table with a hole says more than none
                print(f"{' '.join(map(str, part))}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return found


def _timed(function, part):
    start = time.perf_counter()
    return function(*part), time.perf_counter() - start
