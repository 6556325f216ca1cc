"""Rank programs on the same rows: by log evidence, and by leave-one-out predictive density."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit import engines as library
from ppl_bandit.comparison.engine_runs import CompiledEngine, EngineFactory, compile_engine
from ppl_bandit.comparison.results import ModelScore, Ranking, arviz_object
from ppl_bandit.comparison.tables import ranking_text
from ppl_bandit.display.terminal import printable
from ppl_bandit.inputs.checks import check_data
from ppl_bandit.inputs.numbers import Arms, check_count
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.simulation.standings import standard_error
from ppl_bandit.types import Interaction, check_function


def rank_models(
    models: Mapping[str, RewardModel],
    data: Interaction | Mapping[str, Interaction],
    *,
    num_samples: int = 2000,
    num_runs: int = 4,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Ranking:
    """Rank programs by how well they predict the same rows.

    The log evidence is that of the engine that `engines.choose` picks: exact for `conjugate` and `kalman`, and otherwise the
    mean of independent runs. It depends on the prior: it predicts each row from the rows before it. LOO predicts each row
    from all others; it is not computed if latents of a program move, because the rows of such a program have an order.

    Args:
        models: two programs or more, by name.
        data: the rows; a mapping gives each program its own contexts, with the same arms and rewards.
        num_samples: posterior draws for LOO.
        num_runs: runs of an engine that estimates the log evidence, at least 2.
        seed: random seed.
        say: called with a line per program.
    """
    if not isinstance(models, Mapping):
        raise ValueError(f"models must be {{name: RewardModel}}, got {models!r}")
    check_count(num_samples, "num_samples")
    check_count(num_runs, "num_runs", 2)
    check_count(seed, "seed", 0)
    check_function(say, "say", "of a line of text, such as print")
    for name, model in models.items():
        check_reward_model(model, f"models[{name!r}]")
    if len(models) < 2:
        raise ValueError(f"models must have at least two programs, got {list(models)}; use compare() for one program")
    given: dict[str, Interaction] = {}
    for name, model in models.items():
        own: Any = data if isinstance(data, Interaction) or not isinstance(data, Mapping) else data.get(name)
        with jax.enable_x64(True):
            given[name] = check_data(model, own, Arms(model.num_arms, None))
    _check_same(given, models)
    why_no_loo = _why_no_loo(models)
    scores: list[ModelScore] = []
    pointwise: dict[str, np.ndarray] = {}
    for name, model in models.items():
        with jax.enable_x64(True):
            evidence, error, way, draws, explanation = _evidence(model, given[name], num_samples, num_runs, seed)
        later = float("nan")
        score = ModelScore(name, evidence, error, way, later, later, later, later, later, 0, explanation)
        if not why_no_loo:
            pointwise[name], num_bad = _leave_one_out(model, given[name], draws, num_runs)
            score = score._replace(num_bad_rows=num_bad)
        scores.append(score)
        say(f"{name}: log evidence {evidence:.3f}{'' if way == 'exact' else f' +- {error:.3f}'} ({way})")
    scores = _compared(scores, pointwise)
    ranking = Ranking(scores, len(next(iter(given.values())).arm), seed, why_no_loo=why_no_loo)
    return ranking._replace(text=printable(ranking_text(ranking)))


def _why_no_loo(models: Mapping[str, RewardModel]) -> str:
    """Return why LOO is not computed, empty if it is."""
    moving = [name for name, model in models.items() if model.moving_sites]
    if moving:
        return f"latents of {', '.join(moving)} move, and LOO would predict rows from later ones"
    return "" if importlib.util.find_spec("arviz") is not None else "it needs ArviZ (pip install arviz)"


def _check_same(given: Mapping[str, Interaction], models: Mapping[str, RewardModel]) -> None:
    (first_name, first), *rest = given.items()
    for name, rows in rest:
        outcomes = models[first_name].outcomes, models[name].outcomes
        same_kind = set(outcomes[0]) == set(outcomes[1])
        observed = (first.arm, first.reward), (rows.arm, rows.reward)
        if not same_kind or not jax.tree.all(jax.tree.map(np.array_equal, *observed)):
            raise ValueError(
                f"{name} and {first_name} must predict the same arms and outcomes, got the outcomes {list(outcomes[1])} and "
                f"{list(outcomes[0])}; log evidence of different data cannot be compared"
            )


def _evidence(
    model: RewardModel, data: Interaction, num_samples: int, num_runs: int, seed: int
) -> tuple[float, float, str, dict[str, np.ndarray], str]:
    """Return log evidence, standard error and way, the posterior draws of all runs, and the engine's explanation."""
    rows = jax.tree.map(jnp.asarray, data)._replace(mask=jnp.ones(len(data.arm), bool))
    drawn, values, errors, runner = _runs_of(library.choose, model, rows, num_samples, num_runs, seed)
    if not values:  # a row that the closed form does not cover
        other = library.particle_filter if model.moving_sites else library.reweight
        drawn, values, errors, runner = _runs_of(other, model, rows, num_samples, num_runs, seed)
    explanation = runner.engine.explanation
    if explanation.is_exact:
        return values[0], 0.0, "exact", _concatenate(drawn), str(explanation)
    # The estimate of the evidence is unbiased, its log is not. Take the larger of two errors: a few runs can agree by chance,
    # and the engine's error assumes independent draws.
    value = float(np.logaddexp.reduce(values) - np.log(num_runs))
    error = max(float(np.std(values, ddof=1)), float(np.mean(errors))) / np.sqrt(num_runs)
    return value, error, explanation.engine, _concatenate(drawn), str(explanation)


def _runs_of(
    factory: EngineFactory,
    model: RewardModel,
    rows: Interaction,
    num_samples: int,
    num_runs: int,
    seed: int,
) -> tuple[list[dict[str, np.ndarray]], list[float], list[float], CompiledEngine]:
    """Return posterior draws, log evidence and standard error of independent runs, and the engine.

    An exact engine learns once and draws as often. There are no runs if an engine that is proved for a program refuses a row.
    """
    runner = compile_engine(factory, model, rows, -(-num_samples // num_runs))
    find, is_exact = runner.engine.capabilities.log_evidence, runner.engine.explanation.is_exact
    assert find is not None
    learns_any_row = runner.engine.explanation.engine in ("reweight", "particle_filter")
    drawn, values, errors = [], list[float](), list[float]()
    learnt: Any = None
    for key in jr.split(jr.key(seed), num_runs):
        key_start, key_learn, key_draw = jr.split(key, 3)
        if learnt is None or not is_exact:
            learnt, info = runner.learn(key_learn, runner.start(key_start), rows)
            if not (learns_any_row or info.is_trusted or getattr(info, "may_recover", False)):
                return [], [], [], runner
            value, error = find(learnt)
        drawn.append(jax.device_get(runner.draw(key_draw, learnt)))
        values.append(value)
        errors.append(error)
    return drawn, values, errors, runner


def _concatenate(drawn: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([draws[name] for draws in drawn]) for name in drawn[0]}


def _leave_one_out(
    model: RewardModel, data: Interaction, draws: dict[str, np.ndarray], num_chains: int
) -> tuple[np.ndarray, int]:
    """Return the log density of each row given the others, and the number of rows for which it is unreliable."""
    import arviz as az

    tree = arviz_object(model, list(range(model.num_arms)), draws, data, num_chains, seed=0, num_prior_draws=4)
    found = az.loo(tree, pointwise=True)
    values = found.elpd_i if hasattr(found, "elpd_i") else found.loo_i
    return np.ravel(np.asarray(values)), int(np.sum(np.asarray(found.pareto_k) > 0.7))


def _compared(scores: list[ModelScore], pointwise: Mapping[str, np.ndarray]) -> list[ModelScore]:
    """Return the scores in order of log evidence, with the probabilities of the programs and what LOO says of them.

    Args:
        pointwise: {name: log density of each row given the others}; empty without LOO.
    """
    values = np.array([score.log_evidence for score in scores])
    probs = np.exp(values - np.logaddexp.reduce(values))
    scores = [score._replace(probability=float(prob)) for score, prob in zip(scores, probs, strict=True)]
    if pointwise:
        best = max(pointwise, key=lambda name: pointwise[name].sum())
        for index, score in enumerate(scores):
            rows = pointwise[score.name]
            behind = rows - pointwise[best]
            scores[index] = score._replace(
                elpd=float(rows.sum()),
                elpd_error=rows.size * standard_error(rows),
                elpd_difference=float(behind.sum()),
                elpd_difference_error=rows.size * standard_error(behind),
            )
    return sorted(scores, key=lambda score: -score.log_evidence)
