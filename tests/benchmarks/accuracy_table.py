"""Accuracy of the approximate engines, as the table of the docs: errors of means, standard deviations and p-hat.

Run by hand: python tests/benchmarks/accuracy_table.py [--models NAME ...] [--engines NAME ...]. The references are those of
tests/test_engines_accuracy.py: the exact posterior where there is one, and 100,000 draws of NumPyro's NUTS elsewhere.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import test_engines_accuracy as accuracy  # noqa: E402


def cell(name, engine_name, num_rows):
    """Errors of a mean, a standard deviation and p-hat; k-hat where an engine reports it for its form; * if not trusted."""
    draws, info = accuracy.approximate(name, engine_name, num_rows)
    errors = accuracy.compare(name, num_rows, draws)
    numbers = f"{errors.mean:.2f}, {errors.sd:.2f}, {errors.variation:.3f}"
    if engine_name in ("svi", "laplace"):
        numbers += f", {float(info.k_hat):.2f}"
    return numbers + ("" if bool(info.is_trusted) else " *")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*accuracy.CONJUGATE, *accuracy.OTHERS])
    parser.add_argument("--engines", nargs="+", default=list(accuracy.MAKERS))
    arguments = parser.parse_args()
    print(f"| model | rows | {' | '.join(arguments.engines)} |")
    print(f"| --- | --- |{' --- |' * len(arguments.engines)}")
    for name in arguments.models:
        start = time.perf_counter()
        for num_rows in accuracy.NUMS_ROWS:
            cells = [cell(name, engine_name, num_rows) for engine_name in arguments.engines]
            shown = f"`{name}`" if num_rows == accuracy.NUMS_ROWS[0] else ""
            print(f"| {shown} | {num_rows} | {' | '.join(cells)} |", flush=True)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
