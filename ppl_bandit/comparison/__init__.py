"""Exact and approximate posteriors side by side, on one program and the same rows; and programs side by side."""

from ppl_bandit.comparison.measuring.models import rank_models
from ppl_bandit.comparison.measuring.posteriors import compare
from ppl_bandit.comparison.measuring.results import Comparison, Ranking

__all__ = ["Comparison", "Ranking", "compare", "rank_models"]
