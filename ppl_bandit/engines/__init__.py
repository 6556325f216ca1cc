"""Posterior inference for a program: engine factories over a RewardModel."""

from ppl_bandit.engines.conjugate import conjugate

__all__ = ["conjugate"]
