"""Hard posteriors, as the table of the docs: error of a mean, of a standard deviation, and how often the draws were flagged.

Run by hand: python tests/benchmarks/hard_table.py [--cases NAME ...] [--engines NAME ...] [--seeds 4]. The programs, rows and
references are those of tests/engines/hard_posteriors.py; * marks a case that was off by more than 0.2 or 20% without a flag.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import test_engines_hard as hard  # noqa: E402


def cell(name, engine_name, num_seeds):
    """The largest errors over the seeds of trusted draws, and the number of seeds whose draws were flagged."""
    found = hard.outcomes(name, engine_name, range(num_seeds))
    trusted = [one for one in found if one[2]]
    flagged = f"{len(found) - len(trusted)} of {len(found)} flagged"
    if not trusted:
        return f"flagged ({max(one[0] for one in found):.2f}, {max(one[1] for one in found):.2f})"
    numbers = f"{max(one[0] for one in trusted):.2f}, {max(one[1] for one in trusted):.2f}"
    return numbers + (f"; {flagged}" if len(trusted) < len(found) else "") + (" *" if hard.failures(found) else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=list(hard.CASES))
    parser.add_argument("--engines", nargs="+", default=["reweight", "nuts"])
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    print(f"| case | {' | '.join(arguments.engines)} |\n| --- |{' --- |' * len(arguments.engines)}")
    for name in arguments.cases:
        cells = [cell(name, engine_name, arguments.seeds) for engine_name in arguments.engines]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
