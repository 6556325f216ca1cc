"""Write the reward model; get the bandit.

A reward model is a NumPyro program. The library draws from the posterior of its parameters - exactly where the program is
proved conjugate - and plays arms by double sampling or by another selector.
"""

from ppl_bandit import engines, selectors
from ppl_bandit.comparison import compare
from ppl_bandit.live.bandit import Bandit
from ppl_bandit.live.decisions import Decision
from ppl_bandit.live.ladder import NotCertified
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.races import Tuned
from ppl_bandit.simulation.simulate import simulate
from ppl_bandit.simulation.tune import tune
from ppl_bandit.types import Engine, Explanation, Interaction, InvalidProgram, NotConjugate, Selection, Selector

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
    "Selector",
    "Tuned",
    "compare",
    "engines",
    "selectors",
    "simulate",
    "tune",
]
