"""Accuracy of the approximate engines, as the table of the docs: errors of means, standard deviations and p-hat.

Run by hand: python tests/benchmarks/accuracy_table.py [--models NAME ...] [--engines NAME ...] [--jobs N] [--limit SECONDS].
The references are those of tests/engines/test_engines_accuracy.py: the exact posterior where there is one, and 100,000 draws of
NumPyro's NUTS elsewhere.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from side_by_side import run_parts  # noqa: E402

REFERENCE = "reference"
MODELS = (
    "student_t logistic hierarchical_bernoulli linear_gaussian hierarchical_gaussian hurdle dirichlet_categorical gaussian "
    "exponential poisson binomial bernoulli"
).split()  # the slowest first
ENGINES = ["nuts", "reweight", "svi", "laplace"]
NUMS_ROWS = (5, 50, 500)


def work(name, what):
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


def cell(name, num_rows, draws, evidence, exact):
    """Errors of a mean, a standard deviation and p-hat; k-hat where an engine reports it for its form; * if not trusted."""
    import test_engines_accuracy as accuracy

    errors = accuracy.compare_with(exact, name, num_rows, draws)
    is_trusted, k_hat = evidence
    numbers = f"{errors.mean:.2f}, {errors.sd:.2f}, {errors.variation:.3f}"
    return numbers + ("" if k_hat is None else f", {k_hat:.2f}") + ("" if is_trusted else " *")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--engines", nargs="+", default=ENGINES)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds after which parts that are not done are left out")
    arguments = parser.parse_args()
    parts = [(name, what) for name in arguments.models for what in (REFERENCE, *arguments.engines)]
    found = run_parts(work, parts, arguments.jobs, arguments.limit)
    print(f"| model | rows | {' | '.join(arguments.engines)} |")
    print(f"| --- | --- |{' --- |' * len(arguments.engines)}")
    for name in sorted(arguments.models, key=MODELS.index, reverse=True):
        for i, num_rows in enumerate(NUMS_ROWS):
            exact = found.get((name, REFERENCE))
            cells = [
                cell(name, num_rows, *found[name, engine][i], exact[i][0])
                if exact is not None and (name, engine) in found
                else "-"
                for engine in arguments.engines
            ]
            print(f"| {f'`{name}`' if i == 0 else ''} | {num_rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
