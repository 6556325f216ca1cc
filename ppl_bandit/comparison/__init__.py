"""Exact and approximate posteriors side by side, on one program and the same rows; and programs side by side."""

from ppl_bandit.comparison.engine_comparison import compare
from ppl_bandit.comparison.model_ranking import rank_models
from ppl_bandit.comparison.results import Comparison, Ranking

__all__ = ["Comparison", "Ranking", "compare", "rank_models"]
