"""Exact and approximate posteriors side by side, on one program and the same rows; and programs side by side."""

from ppl_bandit.comparison.models import Ranking, rank_models
from ppl_bandit.comparison.posteriors import Comparison, compare

__all__ = ["Comparison", "Ranking", "compare", "rank_models"]
