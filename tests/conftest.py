"""Settings of the test process, made before jax is imported; subprocesses inherit them."""

import atexit
import contextlib
import ctypes
import gc
import os
import random
import shutil
import sys
import tempfile
import time
from importlib.metadata import version

import pytest

# One cache for all processes of a run, which compile the same programs again and again; empty at first, so nothing is stale.
if "PYTEST_XDIST_WORKER" not in os.environ and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="ppl_bandit-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Proofs are made again in every test: some change what they are made of. Tests of what is handed on switch it on.
os.environ.setdefault("PPL_BANDIT_CACHE", "off")
os.environ.setdefault("MPLBACKEND", "agg")
# Tests compile far more than they compute: compile without the expensive passes. A flag that XLA does not know ends the
# process, and the last of these is on its way out.
flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# The options that the library gives its own programs (runtime/xla_options.py) save a seventh of the other compilations too.
flags += " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_experimental_ynn_fusion_type="
flags += " --xla_disable_hlo_passes=tree_reduction_rewriter,cpu-parallel-task-assigner"
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", flags)
# A process holds millions of objects of compiled programs: looking through all of them for garbage takes a tenth of the time.
gc.set_threshold(100_000, 20, 100)
# These files run first: a process takes one file after the other, and at the end the other process would wait for it.
LONGEST = (
    "test_engines_contract.py",
    "test_proved_programs.py",
    "test_operating_characteristics.py",
    "test_docs.py",
    "test_simulation.py",
)
_SLICE_STARTED = time.monotonic()


def pytest_addoption(parser):
    group = parser.getgroup("slice", "run a part of the tests, for a limited time")
    group.addoption("--slice-seed", help="run the files, and the tests of each, in a random order with this seed")
    group.addoption("--slice-seconds", type=float, help="start no test after so many seconds")


def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--slice-seed")
    if seed is not None:
        order = random.Random(seed)
        files = sorted({item.nodeid.partition("::")[0] for item in items})
        places = dict(zip(files, order.sample(range(len(files)), len(files)), strict=True))
        items.sort(key=lambda item: item.nodeid)
        order.shuffle(items)
        items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])
    else:
        items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_runtest_setup(item):
    limit = item.config.getoption("--slice-seconds")
    if limit is not None and time.monotonic() > _SLICE_STARTED + limit:
        pytest.skip("the time of this slice is over")


@pytest.fixture
def count_compilations():
    """Return a context manager that collects the names of what jax compiles inside its block."""

    @contextlib.contextmanager
    def counting():
        import jax

        names: list[str] = []

        def listen(event, duration, **details):
            if event == "/jax/core/compile/backend_compile_duration":
                names.append(details.get("fun_name", event))

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield names
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return counting


CACHING_MODULES = (
    "ppl_bandit.posterior",
    "ppl_bandit.live",
    "ppl_bandit.evaluation",
    "shared_models",
)  # their caches hold compiled programs


MAX_RESIDENT_BYTES = 1500 << 20  # two processes must stay under 4 GB, with what one more file adds to each


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_freed(request):
    """Drop the compiled programs after a test file once they take much memory: kept to the end, they take gigabytes.

    First those of test files that have ended; if that is not enough, also what the next files would use: models and engines of
    `shared_models`, and what JAX traced and compiled of its own.
    """
    yield
    clear_caches(request.module)
    if "jax" not in sys.modules or resident_bytes() < MAX_RESIDENT_BYTES:
        return
    free_garbage()
    if resident_bytes() < 0.8 * MAX_RESIDENT_BYTES:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(CACHING_MODULES):
            clear_caches(module)
    sys.modules["jax"].clear_caches()
    free_garbage()


def clear_caches(module):
    """Clear the caches of a module's own functions."""
    for value in vars(module).values():
        if hasattr(value, "cache_clear") and getattr(value, "__module__", None) == module.__name__:
            value.cache_clear()


def free_garbage():
    gc.collect()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # otherwise the C library keeps most of the freed memory


@pytest.fixture(scope="module")
def warm_starts():
    """Turn the disk cache of proofs on, as users have it, for files that start several bandits or commands on one program."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("PPL_BANDIT_CACHE")
        yield


def resident_bytes():
    """Return the memory of this process that is in use; infinite where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return float("inf")
