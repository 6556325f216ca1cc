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


def run_parts(function, parts, num_jobs, limit=None):
    """Return {part: function(*part)}, each in a process of one core, the first parts first.

    A part that fails, or is not done after `limit` seconds, is left out of the table.
    """
    os.environ.update(_ONE_CORE)
    found = {}
    # A new process for each part, so that compiled programs of other parts do not fill its memory.
    pool = ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    pending = {pool.submit(_timed, function, part): part for part in parts}
    try:
        for done in as_completed(pending, timeout=limit):
            part = pending[done]
            if done.exception() is not None:
                print(f"{' '.join(map(str, part))}: {done.exception()!r}", file=sys.stderr, flush=True)
                continue
            found[part], seconds = done.result()
            print(f"{' '.join(map(str, part))}: {seconds:.0f} s", file=sys.stderr, flush=True)
    except TimeoutError:
        print(f"{len(parts) - len(found)} parts were not done after {limit} s", file=sys.stderr, flush=True)
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    return found


def _timed(function, part):
    start = time.perf_counter()
    return function(*part), time.perf_counter() - start
