"""Find the number of rows with which a design reaches a wanted power."""

import math
from dataclasses import replace
from typing import Any

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.operating_characteristics import operating_characteristics

_MOST_DOUBLINGS = 10


def rows_for_power(
    model: RewardModel,
    design: Design,
    scenario: Any,
    *,
    power: float = 0.8,
    num_trials: int = 2000,
    tolerance: float = 0.05,
    **settings: Any,
) -> tuple[Design, dict[int, tuple[float, float]]]:
    """Return the design with the fewest rows that has a wanted power, and (power, its standard error) by number of rows.

    The looks, the burn-in and `max_rows` are multiplied by one factor, which is doubled, or halved, and then bisected. The
    thresholds stay as they are: calibrate the result. Every number of rows is a compilation and `num_trials` trials. An error
    of the power of .01 changes the number of rows by about 2 to 3 percent near a power of .8.

    Args:
        design: has a superiority rule; its looks are the shape of those to be found.
        scenario: one truth with a difference, as in `operating_characteristics`.
        power: of the table of `operating_characteristics`: the probability to declare a better arm superior and to select it.
        tolerance: the number of rows found is at most this share above one with less power.
        settings: of `operating_characteristics`, such as `seed`, `arms` and `executor`.

    Raises:
        ValueError: if a thousand times as many rows, or a thousandth of them, do not bracket the power.
    """
    if not 0.0 < power < 1.0 or not tolerance > 0.0:
        raise ValueError(
            f"power must lie strictly inside (0, 1) and tolerance above 0, got {power!r} and {tolerance!r}"
        )
    if design.rule("superiority") is None:
        raise ValueError("rows_for_power needs a design with a superiority rule: add stopping.superiority(0.99)")
    tried: dict[int, tuple[float, float]] = {}

    def reaches(factor: float) -> bool:
        scaled = _scaled(design, factor)
        if scaled.last_rows not in tried:
            found = operating_characteristics(model, scaled, {"truth": scenario}, num_trials=num_trials, **settings)
            row = found.table().loc["truth"]
            tried[scaled.last_rows] = float(row.power), float(row.power_se)
        return tried[scaled.last_rows][0] >= power

    step = 0.5 if reaches(1.0) else 2.0
    ends = [1.0]
    while reaches(ends[-1] * step) == (step < 1.0):
        ends.append(ends[-1] * step)
        if len(ends) > _MOST_DOUBLINGS:
            last = max(tried) if step > 1.0 else min(tried)
            raise ValueError(
                f"the power is {tried[last][0]:.3g} with {last} rows: give looks nearer to a power of {power:g}"
            )
    low, high = sorted((ends[-1], ends[-1] * step))
    while high > low * (1.0 + tolerance) and _scaled(design, math.sqrt(low * high)).last_rows not in tried:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return _scaled(design, high), dict(sorted(tried.items()))


def _scaled(design: Design, factor: float) -> Design:
    def rows(number: int) -> int:
        return math.ceil(number * factor)

    looks = sorted({rows(look) for look in design.looks})
    if len(looks) < len(design.looks) or looks[0] < 2:
        raise ValueError(
            f"the looks {list(design.looks)} cannot be multiplied by {factor:g}: give fewer, or a lower power"
        )
    most = None if design.max_rows is None else rows(design.max_rows)
    return replace(design, looks=looks, burn_in=int(design.burn_in * factor), max_rows=most, calibration=None)
