"""Posterior inference for a program: engine factories over a RewardModel."""

from ppl_bandit.engines.approximate.laplace import laplace
from ppl_bandit.engines.approximate.nuts import nuts
from ppl_bandit.engines.approximate.reweight import reweight
from ppl_bandit.engines.approximate.svi import svi
from ppl_bandit.engines.choose import choose
from ppl_bandit.engines.collapsed.collapsed import collapsed
from ppl_bandit.engines.exact.conjugate import conjugate
from ppl_bandit.engines.moving.collapsed_kalman import collapsed_kalman
from ppl_bandit.engines.moving.kalman import kalman
from ppl_bandit.engines.moving.particle_filter import particle_filter

__all__ = [
    "choose",
    "collapsed",
    "collapsed_kalman",
    "conjugate",
    "kalman",
    "laplace",
    "nuts",
    "particle_filter",
    "reweight",
    "svi",
]
