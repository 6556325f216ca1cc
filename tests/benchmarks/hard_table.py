"""Hard posteriors, as the table of the docs: error of a mean, of a standard deviation, and how often the draws were flagged.

Run by hand: python tests/benchmarks/hard_table.py [--cases NAME ...] [--engines NAME ...] [--seeds 4] [--jobs N] [--limit
SECONDS]. The programs, rows and references are those of tests/engines/hard_posteriors.py; * marks a case that was off by more
than 0.2 or 20% without a flag.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from side_by_side import run_parts  # noqa: E402

REFERENCE = "reference"


def work(name, what, num_seeds):
    """Draws and diagnostics of an engine on each seed; or the reference's means and standard deviations."""
    import test_engines_hard as hard

    return hard.CASES[name].reference() if what == REFERENCE else hard.draws_of(name, what, range(num_seeds))


def cell(found, reference):
    """The largest errors over the seeds of trusted draws, and the number of seeds whose draws were flagged."""
    import test_engines_hard as hard

    errors = [hard.errors_of(one, *reference) for one in found]
    trusted = [one for one in errors if one[2]]
    flagged = f"{len(errors) - len(trusted)} of {len(errors)} flagged"
    if not trusted:
        return f"flagged ({max(one[0] for one in errors):.2f}, {max(one[1] for one in errors):.2f})"
    numbers = f"{max(one[0] for one in trusted):.2f}, {max(one[1] for one in trusted):.2f}"
    return numbers + (f"; {flagged}" if len(trusted) < len(errors) else "") + (" *" if hard.failures(errors) else "")


def main():
    import test_engines_hard as hard

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(hard.CASES))
    parser.add_argument("--engines", nargs="+", default=["reweight", "nuts"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds after which parts that are not done are left out")
    arguments = parser.parse_args()
    # The last cases have many dimensions and take the longest.
    parts = [
        (name, what, arguments.seeds) for name in arguments.cases[::-1] for what in (REFERENCE, *arguments.engines)
    ]
    found = run_parts(work, parts, arguments.jobs, arguments.limit)
    print(f"| case | {' | '.join(arguments.engines)} |\n| --- |{' --- |' * len(arguments.engines)}")
    for name in arguments.cases:
        reference = found.get((name, REFERENCE, arguments.seeds))
        runs = [found.get((name, engine, arguments.seeds)) for engine in arguments.engines]
        cells = ["-" if reference is None or run is None else cell(run, reference) for run in runs]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
