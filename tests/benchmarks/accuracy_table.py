"""Accuracy of the approximate engines, as the two tables of the docs: bundled models, and hard posteriors.

    python tests/benchmarks/accuracy_table.py bundled --jobs 14 [--cases NAME ...] [--engines NAME ...] [--limit SECONDS]
    python tests/benchmarks/accuracy_table.py hard --jobs 14 [--seeds 4]

`bundled` shows errors of means, standard deviations and p-hat. The references are those of
tests/engines/test_engines_accuracy.py: the exact posterior where there is one, and 100,000 draws of NumPyro's NUTS elsewhere.
`hard` shows the error of a mean and of a standard deviation, and how often the draws were flagged; the programs, rows and
references are those of tests/engines/hard_posteriors.py, and * marks a case that was off by more than 0.2 or 20% without a
flag. Parts run in processes side by side, one core each.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "engines")]

REFERENCE = "reference"
BUNDLED = (
    "student_t logistic hierarchical_bernoulli linear_gaussian hierarchical_gaussian hurdle dirichlet_categorical gaussian "
    "exponential poisson binomial bernoulli"
).split()  # the slowest first
NUMS_ROWS = (5, 50, 500)


_ONE_CORE = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def bundled_draws(name, what):
    """Draws of a model's posteriors, after 5, 50 and 500 rows, with evidence; or the reference's."""
    import test_engines_accuracy as accuracy

    found = []
    for num_rows in NUMS_ROWS:
        if what == REFERENCE:
            draws, evidence = accuracy.reference(name, num_rows), None
        else:
            draws, info = accuracy.approximate(name, what, num_rows)
            evidence = bool(info.is_trusted), float(info.checks["k_hat"]) if what in ("svi", "laplace") else None
        found.append(({site: np.asarray(leaf) for site, leaf in draws.items()}, evidence))
    return found


def bundled_cell(name, num_rows, draws, evidence, exact):
    """Errors of a mean, a standard deviation and p-hat; k-hat where an engine reports it for its form; * if not trusted."""
    import test_engines_accuracy as accuracy

    errors = accuracy.compare_with(exact, name, num_rows, draws)
    is_trusted, k_hat = evidence
    numbers = f"{errors.mean:.2f}, {errors.sd:.2f}, {errors.variation:.3f}"
    return numbers + ("" if k_hat is None else f", {k_hat:.2f}") + ("" if is_trusted else " *")


def hard_draws(name, what, num_seeds):
    """Draws and diagnostics of an engine on each seed; or the reference's means and standard deviations."""
    import test_engines_hard as hard

    return hard.CASES[name].reference() if what == REFERENCE else hard.draws_of(name, what, range(num_seeds))


def hard_cell(found, reference):
    """The largest errors over the seeds of trusted draws, and the number of seeds whose draws were flagged."""
    import test_engines_hard as hard

    errors = [hard.errors_of(one, *reference) for one in found]
    trusted = [one for one in errors if one[2]]
    flagged = f"{len(errors) - len(trusted)} of {len(errors)} flagged"
    if not trusted:
        return f"flagged ({max(one[0] for one in errors):.2f}, {max(one[1] for one in errors):.2f})"
    numbers = f"{max(one[0] for one in trusted):.2f}, {max(one[1] for one in trusted):.2f}"
    return numbers + (f"; {flagged}" if len(trusted) < len(errors) else "") + (" *" if hard.failures(errors) else "")


def bundled_rows(found, names, engines):
    """Yield the cells of each row of the table of bundled models."""
    for name in sorted(names, key=BUNDLED.index, reverse=True):
        for i, num_rows in enumerate(NUMS_ROWS):
            exact = found.get((name, REFERENCE))
            cells = [
                bundled_cell(name, num_rows, *found[name, engine][i], exact[i][0])
                if exact is not None and (name, engine) in found
                else "-"
                for engine in engines
            ]
            yield [f"`{name}`" if i == 0 else "", num_rows, *cells]


def hard_rows(found, names, engines, num_seeds):
    """Yield the cells of each row of the table of hard posteriors."""
    for name in names:
        reference = found.get((name, REFERENCE, num_seeds))
        runs = [found.get((name, engine, num_seeds)) for engine in engines]
        yield [name, *("-" if reference is None or run is None else hard_cell(run, reference) for run in runs)]


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


def main():
    import test_engines_hard as hard

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["bundled", "hard"])
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--engines", nargs="+")
    parser.add_argument("--seeds", type=int, default=4, help="of a hard case (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds after which parts that are not done are left out")
    arguments = parser.parse_args()
    is_hard = arguments.table == "hard"
    names = arguments.cases or (list(hard.CASES) if is_hard else BUNDLED)
    engines = arguments.engines or (["reweight", "nuts"] if is_hard else ["nuts", "reweight", "svi", "laplace"])
    seeds = [arguments.seeds] if is_hard else []
    # The last hard cases have many dimensions and take the longest.
    parts = [(name, what, *seeds) for name in (names[::-1] if is_hard else names) for what in (REFERENCE, *engines)]
    found = run_parts(hard_draws if is_hard else bundled_draws, parts, arguments.jobs, arguments.limit)
    heads = ["case"] if is_hard else ["model", "rows"]
    print(f"| {' | '.join([*heads, *engines])} |\n|{' --- |' * (len(heads) + len(engines))}")
    for row in (hard_rows if is_hard else bundled_rows)(found, names, engines, *seeds):
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
