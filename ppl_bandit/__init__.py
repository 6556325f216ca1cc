"""Write the reward model; get the bandit.

A reward model is a NumPyro program. The library draws from the posterior of its parameters - exactly where the program is
proved conjugate - and plays arms by double sampling or by another selector.
"""

from ppl_bandit import engines, selectors
from ppl_bandit.bandit import Bandit, Decision, NotCertified
from ppl_bandit.comparison import compare
from ppl_bandit.environment import Environment
from ppl_bandit.program import RewardModel
from ppl_bandit.simulation import simulate
from ppl_bandit.types import Engine, Explanation, Interaction, InvalidProgram, NotConjugate, Selection

__all__ = [
    "Bandit",
    "Decision",
    "Engine",
    "Environment",
    "Explanation",
    "Interaction",
    "InvalidProgram",
    "NotCertified",
    "NotConjugate",
    "RewardModel",
    "Selection",
    "compare",
    "engines",
    "selectors",
    "simulate",
]
