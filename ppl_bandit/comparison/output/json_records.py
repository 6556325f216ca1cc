"""Comparisons and rankings as dicts and lists for JSON."""

from typing import Any

from ppl_bandit.comparison.measurement.errors import QUANTILES, largest_error
from ppl_bandit.comparison.measurement.results import Comparison, EngineResult, Ranking, StreamPoint
from ppl_bandit.comparison.output.conclusions import answer
from ppl_bandit.display.terminal import to_plain

_OF_REFERENCE = (
    "name",
    "is_exact",
    "is_trusted",
    "description",
    "best_arm_probs",
    "num_candidates",
    "propensities",
)


def comparison_records(result: Comparison) -> dict[str, Any]:
    """Return everything that a comparison measured; values that are not finite become None."""
    reference, floor = result.reference, result.reference.floor
    distances = {"best_arm_probs_distance": floor.best_arm_probs, "other_arm_prob": floor.other_arm_prob}
    records = {
        "program": result.name,
        "num_rows": len(result.data.arm),
        "arms": [str(arm) for arm in result.arms],
        "num_samples": result.num_samples,
        "seed": result.seed,
        "answer": answer(result),
        "selector": result.selector,
        "has_compilation_cache": result.is_cached,
        "reference": {name: getattr(reference, name) for name in _OF_REFERENCE} | {"floor": distances},
        "refused": result.refused,
        "is_complete": result.is_complete,
        "engines": {label: _engine_record(result, engine) for label, engine in result.engines.items()},
        "stream": [_stream_record(point) for point in result.stream],
    }
    return to_plain(records)


def ranking_records(ranking: Ranking) -> dict[str, Any]:
    """Return the scores of a ranking; values that are not finite become None."""
    return to_plain({"num_rows": ranking.num_rows, "seed": ranking.seed, "ranking": ranking.scores})


def _engine_record(result: Comparison, engine: EngineResult) -> dict[str, Any]:
    errors, floor = engine.latents, result.reference.floor
    measured = {
        "mean_error": errors.mean,
        "sd_error": errors.sd,
        "wasserstein": errors.wasserstein,
        "wasserstein_floor": floor.wasserstein,
        "kolmogorov": errors.kolmogorov,
        "kolmogorov_floor": floor.kolmogorov,
    }
    return {
        "seconds_cold": engine.seconds_cold,
        "seconds_warm": engine.seconds_warm,
        "info": engine.info,
        "decisions": engine.decisions,
        "latents": [
            {
                "latent": name,
                **{what: {"value": value[k], "error": error[k]} for what, (value, error) in measured.items()},
                "quantile_errors": {f"{q:g}": errors.quantiles.value[i, k] for i, q in enumerate(QUANTILES)},
                "ess": engine.ess[k],
                "r_hat": engine.r_hat[k],
            }
            for k, name in enumerate(result.labels)
        ],
    }


def _stream_record(point: StreamPoint) -> dict[str, Any]:
    floor = point.reference.floor
    return {
        "num_rows": point.num_rows,
        "floor": {
            "wasserstein": largest_error(floor.wasserstein.value),
            "best_arm_probs_distance": floor.best_arm_probs.value,
            "other_arm_prob": floor.other_arm_prob.value,
        },
        "engines": {
            label: {
                "mean_error": largest_error(latents.mean.value),
                "sd_error": largest_error(latents.sd.value),
                "wasserstein": largest_error(latents.wasserstein.value),
                "best_arm_probs_distance": decisions.best_arm_probs_distance.value,
                "num_candidates": decisions.num_candidates.value,
                "other_arm_prob": decisions.other_arm_prob.value,
            }
            for label, (latents, decisions) in point.engines.items()
        },
    }
