"""Measure designs of trials: type I error by number of looks, calibration, adaptr's README design, prior worlds, and speed.

Run it with `python tests/benchmarks/trial_designs.py [part ...] [--trials N] [--out FILE]`; parts: looks, calibrate, adaptr,
stopping, speed, collapsed. Every figure is printed with its standard error and its reference.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

from ppl_bandit import Design, calibrate, operating_characteristics, selectors, stopping
from ppl_bandit.trials.simulator import TrialSimulator, as_environment

sys.path.insert(0, str(Path(__file__).parents[1] / "trials"))
from trial_settings import (  # noqa: E402
    adaptr_design,
    normal_arms,
    rates,
    similar_arms,
)

# Armitage, McPherson and Rowe (1969), and thresholds of Pocock type, by numerical integration over equally spaced looks.
TYPE_I_ERRORS = {1: 0.0500, 2: 0.0831, 5: 0.1417, 20: 0.2479}
THRESHOLDS = {5: 0.99209, 20: 0.99623}


def five_arms():
    rules = stopping.superiority(0.99), stopping.inferiority(0.01), stopping.equivalence(0.9, delta=0.05)
    return Design(range(100, 2001, 100), selector=selectors.thompson(), allocation="looks", stopping=rules)


def show(name, value, error, reference=None):
    against = "" if reference is None else f"   to compare with {reference}"
    print(f"{name:58s} {value:9.5f} +- {error:.5f}{against}", flush=True)
    return {"value": value, "se": error, "reference": reference}


def part_looks(num_trials):
    model, found = normal_arms(2), {}
    for num_looks, expected in TYPE_I_ERRORS.items():
        design = Design(np.arange(1, num_looks + 1) * 400, stopping=stopping.superiority(0.975))
        row = operating_characteristics(model, design, {"null": 0.0}, num_trials=num_trials).table().loc["null"]
        found[num_looks] = show(f"type I error, {num_looks} looks", row.superiority, row.superiority_se, expected)
    return found


def part_calibrate(num_trials):
    model, found = normal_arms(2), {}
    for num_looks, expected in THRESHOLDS.items():
        design = Design(np.arange(1, num_looks + 1) * 400, stopping=stopping.superiority(0.975))
        begun = time.perf_counter()
        own = calibrate(model, design, 0.0, num_trials=num_trials).calibration
        seconds = time.perf_counter() - begun
        found[num_looks] = show(
            f"calibrated threshold, {num_looks} looks ({seconds:.1f} s)", own["threshold"], math.nan, expected
        )
        show("    type I error on fresh seeds", own["type_i_error"], own["type_i_error_se"], 0.05)
    begun = time.perf_counter()
    design = calibrate(rates(3), adaptr_design(), 0.75, num_trials=num_trials // 4)
    own, seconds = design.calibration, time.perf_counter() - begun
    found["adaptr"] = show(f"adaptr's design, threshold ({seconds:.1f} s)", own["threshold"], math.nan)
    found["adaptr error"] = show("    type I error on fresh seeds", own["type_i_error"], own["type_i_error_se"], 0.05)
    return found


def part_adaptr(num_trials):
    scenarios = {"null": 0.75, "difference": [0.75, 0.8, 0.7]}
    table = operating_characteristics(rates(3), adaptr_design(), scenarios, num_trials=num_trials).table()
    row, found = table.loc["null"], {}
    for name, reference in (
        ("superiority", "0.048, 0.0568"),
        ("equivalence", "0.381, 0.377"),
        ("mean_rows", "1749.6, 1747"),
    ):
        found[name] = show(f"adaptr's README design, null: {name}", row[name], row[f"{name}_se"], reference)
    for name in ("power", "mean_rows", "bias", "coverage", "sequence_coverage", "ideal_design_percentage"):
        found[f"difference {name}"] = show(
            f"    rates .75, .80, .70: {name}", table.loc["difference", name], table.loc["difference", f"{name}_se"]
        )
    return found


def part_stopping(num_trials):
    row = operating_characteristics(rates(5), five_arms(), {"null": 0.3}, num_trials=num_trials).table().loc["null"]
    names = ("bias", "rmse", "coverage", "sequence_coverage", "sequence_coverage_all")
    return {name: show(f"five arms, null .3: {name}", row[name], row[f"{name}_se"]) for name in names}


def part_speed(num_trials):
    model, design = rates(5), five_arms()
    simulator, world = TrialSimulator(model, design), as_environment(model, [0.3, 0.3, 0.3, 0.3, 0.35], "speed")
    found = {}
    for what, seed in (("with compilation", 0), ("after compilation", 1)):
        begun, cpu = time.perf_counter(), time.process_time()
        simulator.run(world, num_trials, seed)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        print(
            f"{num_trials} trials x 5 arms x 20 looks x 2,000 rows {what}: {seconds:.2f} s, {cpu:.2f} s of CPU",
            flush=True,
        )
        found[what] = {"seconds": seconds, "cpu": cpu, "num_trials": num_trials}
    return found


def part_collapsed(num_trials):
    num_trials = max(20, num_trials // 500)
    design = Design(
        [50, 100, 150, 200], selector=selectors.thompson(), allocation="looks", stopping=stopping.superiority(0.95)
    )
    model = similar_arms(4)
    truth = {"spread": 0.5, "mean": np.array([0.0, 0.2, 0.4, 0.8])}
    begun = time.perf_counter()
    result = operating_characteristics(model, design, {"truth": truth}, num_trials=num_trials)
    seconds, row = time.perf_counter() - begun, result.table().loc["truth"]
    print(
        f"{result.method}: {num_trials} trials x 4 arms x 4 looks x 200 rows in {seconds:.1f} s with compilation",
        flush=True,
    )
    return {"seconds": seconds, "num_trials": num_trials, "power": show("    power", row.power, row.power_se)}


PARTS = {name.removeprefix("part_"): function for name, function in list(globals().items()) if name.startswith("part_")}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--out", help="a JSON file for the figures")
    given = parser.parse_args()
    found = {}
    for name in given.parts or PARTS:
        found[name] = PARTS[name](given.trials)
        if given.out:
            with open(given.out, "w") as file:
                json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
