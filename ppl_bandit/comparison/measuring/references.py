"""What engines are compared with: the exact posterior, where there is one, or a long run; after every part of the rows."""

from collections.abc import Callable
from functools import partial

import jax
import jax.random as jr
import numpy as np

from ppl_bandit import engines as library
from ppl_bandit.comparison.measuring.closed_form import Law, exact_marginals
from ppl_bandit.comparison.measuring.errors import QUANTILES, Estimate, Target, latent_floor, spread, total_variation
from ppl_bandit.comparison.measuring.results import Floor, Reference
from ppl_bandit.comparison.measuring.running import (
    Factory,
    Lab,
    Run,
    Runner,
    build_runner,
    check_certified,
    flatten,
    run,
    say_cost,
)
from ppl_bandit.types import Key, NotConjugate

__all__ = ["find_references"]

_NUM_SAMPLES_OF_REFERENCE = 20  # of the engines' size, in pairs for the floor
_MOST_LONG_DRAWS = 40_000


def find_references(
    lab: Lab, key: Key, factory: Factory | None, say: Callable[[str], None]
) -> tuple[list[Reference], dict[str, str], Runner | None]:
    """Return the reference after every part; why the exact engine was refused; or that engine."""
    key_run, key_samples = jr.split(key)
    refused: dict[str, str] = {}
    if factory is None or factory is library.conjugate:
        try:
            runner = build_runner(library.conjugate, lab.model, lab.whole, lab.num_samples)
            runs = run(runner, key_run, lab.parts, lab.decide)
            check_certified(runs[-1])
        except NotConjugate as refusal:
            if factory is not None:
                raise
            refused["exact"] = str(refusal)
        else:
            keys = jr.split(key_samples, _NUM_SAMPLES_OF_REFERENCE)
            samples = [[jax.device_get(runner.draw(key, at.state)) for key in keys] for at in runs]
            say("reference: the exact posterior")
            return (
                [
                    _refer(lab, key_samples, number, runner, at, drawn)
                    for number, (at, drawn) in enumerate(zip(runs, samples, strict=True))
                ],
                refused,
                runner,
            )
    many = _NUM_SAMPLES_OF_REFERENCE * lab.num_samples
    many = max(2 * lab.num_samples, min(many, _MOST_LONG_DRAWS))
    many -= many % lab.num_samples
    if factory is None:
        factory = partial(library.nuts, num_draws=many)
    runner = build_runner(factory, lab.model, lab.whole, many)
    say_cost(lab, "the reference, a long run,", [runner], 1, say)
    runs = run(runner, key_run, lab.parts, lab.decide)
    references = []
    for number, at in enumerate(runs):
        order = (
            np.random.default_rng(0).permutation(many).reshape(-1, lab.num_samples)
        )  # chains are mixed among samples
        drawn = [{name: values[index] for name, values in at.draws.items()} for index in order]
        references.append(_refer(lab, key_samples, number, runner, at, drawn))
    say(f"reference: {references[-1].words}")
    return references, refused, None


def _refer(lab: Lab, key: Key, number: int, runner: Runner, at: Run, drawn: list[dict[str, np.ndarray]]) -> Reference:
    """Return the reference after the part of a number, from samples of it and, where there is one, its closed form."""
    samples = np.stack([flatten(lab.model, draws) for draws in drawn])
    pooled = samples.reshape(-1, samples.shape[2])
    laws = None
    mean, sd = pooled.mean(axis=0), pooled.std(axis=0)
    levels = (*QUANTILES, 0.16, 0.84)
    quantiles = np.quantile(pooled, levels, axis=0)
    if runner.engine.capabilities.parameters is not None:
        laws = exact_marginals(lab.model, runner.engine, at.state)
        sites = [laws[site] for site in lab.model.latent_shapes]
        mean, sd = (np.concatenate([np.ravel(part) for part in parts]) for parts in _moments(sites))
        quantiles = np.stack([np.concatenate([np.ravel(site.law.ppf(q)) for site in sites]) for q in levels])
    unit = np.where(np.isfinite(sd), sd, (quantiles[-1] - quantiles[-2]) / 2)
    target = Target(mean, sd, unit, quantiles[: len(QUANTILES)], samples)
    num_rows = lab.num_rows_after(number)
    keys = jr.split(key, len(drawn))
    chosen = [jax.device_get(lab.decide(k, draws, num_rows + 1)) for k, draws in zip(keys, drawn, strict=True)]
    probs, plays = (np.stack([getattr(c, part) for c in chosen]) for part in ("best_arm_probs", "propensities"))
    is_exact = laws is not None and runner.engine.explanation.is_exact
    name = "exact" if is_exact else runner.engine.explanation.engine
    words = (
        "the exact posterior, in closed form"
        if is_exact
        else f"a long run of the {name} engine, {len(pooled):,} draws: no exact posterior is at hand"
    )
    return Reference(
        name,
        is_exact,
        bool(at.info.get("is_trusted", 1.0)),
        words,
        runner.engine.explanation,
        target,
        Floor(*latent_floor(target), _leave_one_out(probs), _leave_one_out(plays)),
        laws,
        probs.mean(axis=0),
        np.mean([c.num_candidates for c in chosen], axis=0),
        plays.mean(axis=0),
    )


def _moments(sites: list[Law]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [site.mean for site in sites], [site.sd for site in sites]


def _leave_one_out(probs: np.ndarray) -> Estimate:
    """Return the total variation of each sample's probabilities (S, C, A) from the mean of the others', over contexts."""
    number = len(probs)
    others = (probs.sum(axis=0) - probs) / (number - 1)
    return spread(total_variation(probs, others).mean(axis=1))
