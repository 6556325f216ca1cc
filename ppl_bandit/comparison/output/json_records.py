"""Comparisons and rankings as dicts and lists for JSON."""

from typing import Any

import numpy as np

from ppl_bandit.comparison.measurement.errors import QUANTILES, Estimate, largest_error
from ppl_bandit.comparison.measurement.results import Comparison, Ranking, StreamPoint
from ppl_bandit.comparison.output.conclusions import answer

__all__ = ["comparison_records", "ranking_records"]


def comparison_records(result: Comparison) -> dict[str, Any]:
    """Return everything that a comparison measured; values that are not finite become None."""
    reference = result.reference
    floor = reference.floor
    return {
        "program": result.name,
        "num_rows": len(result.data.arm),
        "arms": [str(arm) for arm in result.arms],
        "num_samples": result.num_samples,
        "seed": result.seed,
        "answer": answer(result),
        "selector": result.selector,
        "has_compilation_cache": result.is_cached,
        "reference": {
            "name": reference.name,
            "is_exact": reference.is_exact,
            "is_trusted": reference.is_trusted,
            "description": reference.description,
            "best_arm_probs": _plain(reference.best_arm_probs),
            "num_candidates": _plain(reference.num_candidates),
            "propensities": _plain(reference.propensities),
            "floor": {
                "best_arm_probs_distance": _pair(floor.best_arm_probs),
                "other_arm_prob": _pair(floor.other_arm_prob),
            },
        },
        "refused": result.refused,
        "is_complete": result.is_complete,
        "engines": {label: _engine_record(result, label) for label in result.engines},
        "stream": [_stream_record(result, point) for point in result.stream],
    }


def ranking_records(ranking: Ranking) -> dict[str, Any]:
    """Return the scores of a ranking; values that are not finite become None."""
    scores = [
        {name: _plain(value) if isinstance(value, float) else value for name, value in score._asdict().items()}
        for score in ranking.scores
    ]
    return {"num_rows": ranking.num_rows, "seed": ranking.seed, "ranking": scores}


def _engine_record(result: Comparison, label: str) -> dict[str, Any]:
    engine, reference = result.engines[label], result.reference
    return {
        "seconds_cold": engine.seconds_cold,
        "seconds_warm": _pair(engine.seconds_warm),
        "info": {name: _plain(value) for name, value in engine.info.items()},
        "decisions": {name: _pair(value) for name, value in engine.decisions._asdict().items()},
        "latents": [
            {
                "latent": name,
                "mean_error": _pair(engine.latents.mean, k),
                "sd_error": _pair(engine.latents.sd, k),
                "quantile_errors": {
                    f"{q:g}": _plain(engine.latents.quantiles.value[i, k]) for i, q in enumerate(QUANTILES)
                },
                "wasserstein": _pair(engine.latents.wasserstein, k),
                "wasserstein_floor": _pair(reference.floor.wasserstein, k),
                "kolmogorov": _pair(engine.latents.kolmogorov, k),
                "kolmogorov_floor": _pair(reference.floor.kolmogorov, k),
                "ess": _plain(engine.ess[k]),
                "r_hat": _plain(engine.r_hat[k]),
            }
            for k, name in enumerate(result.labels)
        ],
    }


def _stream_record(result: Comparison, point: StreamPoint) -> dict[str, Any]:
    floor = point.reference.floor
    return {
        "num_rows": point.num_rows,
        "floor": {
            "wasserstein": _plain(largest_error(floor.wasserstein.value)),
            "best_arm_probs_distance": _plain(floor.best_arm_probs.value),
            "other_arm_prob": _plain(floor.other_arm_prob.value),
        },
        "engines": {
            label: {
                "mean_error": _plain(largest_error(latents.mean.value)),
                "sd_error": _plain(largest_error(latents.sd.value)),
                "wasserstein": _plain(largest_error(latents.wasserstein.value)),
                "best_arm_probs_distance": _plain(decisions.best_arm_probs_distance.value),
                "num_candidates": _plain(decisions.num_candidates.value),
                "other_arm_prob": _plain(decisions.other_arm_prob.value),
            }
            for label, (latents, decisions) in point.engines.items()
        },
    }


def _plain(value: Any) -> Any:
    """Return floats and lists of floats, None where a value is not finite."""
    if np.ndim(value):
        return [_plain(entry) for entry in np.asarray(value)]
    return float(value) if np.isfinite(value) else None


def _pair(value: Estimate, index: int | None = None) -> dict[str, Any]:
    pick = (lambda part: part) if index is None else (lambda part: part[..., index])
    return {"value": _plain(pick(value.value)), "error": _plain(pick(value.error))}
