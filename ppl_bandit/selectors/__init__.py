"""Selectors: functions of a table of sampled expected rewards.

Each factory returns `select(key, table, step, *, allowed=None, marginals=None) -> Selection`, where `table` has one row
per posterior draw and one column per arm. Selectors do not depend on the model: any engine can be combined with any selector.
"""

from ppl_bandit.selectors.constraints import fixed, softened, with_control, with_floor, with_limits
from ppl_bandit.selectors.information_directed import information_directed
from ppl_bandit.selectors.optimistic_gittins import bayes_ucb, optimistic_gittins
from ppl_bandit.selectors.probability_matching import double_sampling, greedy, thompson, top_two

__all__ = [
    "bayes_ucb",
    "double_sampling",
    "fixed",
    "greedy",
    "information_directed",
    "optimistic_gittins",
    "softened",
    "thompson",
    "top_two",
    "with_control",
    "with_floor",
    "with_limits",
]
