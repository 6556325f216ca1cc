"""Posterior inference for a program: engine factories over a RewardModel."""

from ppl_bandit.engines.choose import choose
from ppl_bandit.engines.conjugate import conjugate
from ppl_bandit.engines.laplace import laplace
from ppl_bandit.engines.nuts import nuts
from ppl_bandit.engines.reweight import reweight
from ppl_bandit.engines.svi import svi

__all__ = ["choose", "conjugate", "laplace", "nuts", "reweight", "svi"]
