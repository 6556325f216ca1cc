"""Reference posterior of a comparison, after every part of the rows: exact if there is one, otherwise a long run."""

from collections.abc import Callable
from functools import partial

import jax
import jax.random as jr
import numpy as np

from ppl_bandit import engines as library
from ppl_bandit.comparison.engine_runs import (
    ComparisonSetup,
    CompiledEngine,
    EngineFactory,
    EngineRun,
    check_certified,
    compile_engine,
    flatten_latents,
    run_engine,
)
from ppl_bandit.comparison.results import (
    QUANTILES,
    Estimate,
    Reference,
    ReferenceLatents,
    SamplingNoise,
    exact_marginals,
    latent_floor,
    mean_with_sd,
    total_variation,
)
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Key, NotConjugate

_NUM_REFERENCE_SAMPLES = 20  # samples of M draws
_MAX_LONG_DRAWS = 40_000
_DRAWS_PER_FILTER = 4  # of a long run of Kalman filters over particles


def exact_factory(model: RewardModel) -> EngineFactory:
    """Return the factory of the engine that is exact if it accepts the program."""
    return library.kalman if model.moving_sites else library.conjugate


def find_references(
    setup: ComparisonSetup, key: Key, factory: EngineFactory | None, say: Callable[[str], None]
) -> tuple[list[Reference], CompiledEngine | None, str]:
    """Return the reference after every part, and the exact engine if it is that, else the reason if it was refused."""
    key_run, key_samples = jr.split(key)
    exact, runner, refusal = exact_factory(setup.model), None, ""
    if factory is None or factory is exact:
        try:
            runner = compile_engine(exact, setup.model, setup.all_rows, setup.num_samples)
            runs = run_engine(runner, key_run, setup.parts, setup.decide)
            check_certified(runs[-1])
        except NotConjugate as refused:
            if factory is not None:
                raise
            runner, refusal = None, str(refused)
    used = runner
    if used is not None:
        keys = jr.split(key_samples, _NUM_REFERENCE_SAMPLES)
        samples = [[jax.device_get(used.draw(key, at.state)) for key in keys] for at in runs]
    else:
        many = max(2 * setup.num_samples, min(_NUM_REFERENCE_SAMPLES * setup.num_samples, _MAX_LONG_DRAWS))
        many -= many % setup.num_samples
        used = compile_engine(factory or _long_run(setup.model, many), setup.model, setup.all_rows, many)
        say(f"reference: running {used.engine.explanation.engine}, {many:,} draws ...")
        runs = run_engine(used, key_run, setup.parts, setup.decide)
        # Every sample mixes all chains.
        order = np.random.default_rng(0).permutation(many).reshape(-1, setup.num_samples)
        samples = [[{name: values[own] for name, values in at.draws.items()} for own in order] for at in runs]
    references = [
        _make_reference(setup, key_samples, number, used, at, drawn)
        for number, (at, drawn) in enumerate(zip(runs, samples, strict=True))
    ]
    say(f"reference: {references[-1].description}")
    return references, runner, refusal


def _long_run(model: RewardModel, num_draws: int) -> EngineFactory:
    """Return the factory of an engine that replaces the exact posterior."""
    if not model.moving_sites:
        return partial(library.nuts, num_draws=num_draws)

    def filters(model: RewardModel) -> Engine:
        try:  # exact given each particle, so that several draws may share one
            return library.collapsed_kalman(model, num_particles=-(-num_draws // _DRAWS_PER_FILTER))
        except NotConjugate:
            return library.particle_filter(model, num_particles=num_draws)

    return filters


def _make_reference(
    setup: ComparisonSetup,
    key: Key,
    number: int,
    runner: CompiledEngine,
    at: EngineRun,
    drawn: list[Draws],
) -> Reference:
    """Return the reference after part `number`, from samples of it and, if it is exact, from its closed form."""
    samples = np.stack([flatten_latents(setup.model, draws) for draws in drawn])
    pooled = samples.reshape(-1, samples.shape[2])
    laws = None
    mean, sd = pooled.mean(axis=0), pooled.std(axis=0)
    levels = (*QUANTILES, 0.16, 0.84)
    quantiles = np.quantile(pooled, levels, axis=0)
    if runner.engine.capabilities.parameters is not None:
        laws = exact_marginals(setup.model, runner.engine, at.state)
        sites = [laws[site] for site in setup.model.latent_shapes]
        mean, sd = (np.concatenate([np.ravel(getattr(site, name)) for site in sites]) for name in ("mean", "sd"))
        quantiles = np.stack([np.concatenate([np.ravel(site.law.ppf(q)) for site in sites]) for q in levels])
    unit = np.where(np.isfinite(sd), sd, (quantiles[-1] - quantiles[-2]) / 2)
    target = ReferenceLatents(mean, sd, unit, quantiles[: len(QUANTILES)], samples)
    num_rows = setup.num_rows_after(number)
    keys = jr.split(key, len(drawn))
    chosen = [jax.device_get(setup.decide(k, draws, num_rows + 1)) for k, draws in zip(keys, drawn, strict=True)]
    probs, plays = (np.stack([getattr(c, part) for c in chosen]) for part in ("best_arm_probs", "propensities"))
    is_exact = laws is not None and runner.engine.explanation.is_exact
    name = "exact" if is_exact else runner.engine.explanation.engine
    description = (
        "the exact posterior, in closed form"
        if is_exact
        else f"a long run of the {name} engine, {len(pooled):,} draws: the program has no exact posterior"
    )
    return Reference(
        name,
        is_exact,
        bool(at.info.get("is_trusted", 1.0)),
        description,
        runner.engine.explanation,
        target,
        SamplingNoise(*latent_floor(target), _distance_to_others(probs), _distance_to_others(plays)),
        laws,
        probs.mean(axis=0),
        np.mean([c.num_candidates for c in chosen], axis=0),
        plays.mean(axis=0),
    )


def _distance_to_others(probs: np.ndarray) -> Estimate:
    """Return the total variation of each sample's probabilities (S, C, A) from the others' mean, averaged over contexts."""
    number = len(probs)
    others = (probs.sum(axis=0) - probs) / (number - 1)
    return mean_with_sd(total_variation(probs, others).mean(axis=1))
