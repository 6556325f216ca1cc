"""`ppl-bandit run`: simulate selectors on a model, and write a table, figures and the data."""

import argparse
from typing import TYPE_CHECKING

import jax

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.names import engine_factory, executor_of, make_selectors
from ppl_bandit.journal.model_files import ModelFileError, load_model
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.figures import draw_run
from ppl_bandit.simulation.simulate import simulate
from ppl_bandit.simulation.standings import pairwise_table, score_selectors, score_table

if TYPE_CHECKING:
    import xarray


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Simulate, and write `runs.nc`, `table.md` and the figures; the status is 130 if Ctrl-C ended it early."""
    make_engine = engine_factory(arguments.engine)
    horizon = arguments.steps if arguments.horizon is None else arguments.horizon
    selectors = make_selectors(arguments.selectors.split(","), horizon)
    file = load_model(arguments.model)
    if arguments.worlds == "truth" and file.truth is None:
        raise ModelFileError(
            f"{file.path} has no truth to simulate: add `truth = {{site: value}}`, or use --worlds prior"
        )
    model = file.reward_model()
    progress(
        f"{file.name}: building the engine; then each of {len(selectors)} selectors is compiled (up to half a minute each) "
        f"and simulated, {arguments.realizations} realizations of {arguments.steps} steps"
    )
    with jax.enable_x64(True):
        engine = make_engine(model)
    if arguments.worlds == "prior":
        environment = Environment.from_prior(model, file.contexts)
    else:
        environment = Environment(model, file.truth, file.contexts)
    mesh = None
    if arguments.devices is not None:
        mesh = jax.make_mesh((arguments.devices or len(jax.devices()),), ("realization",))
    with executor_of(arguments) as executor:
        runs = simulate(
            arguments.seed,
            model,
            engine,
            selectors,
            environment,
            num_steps=arguments.steps,
            num_realizations=arguments.realizations,
            num_samples=arguments.samples,
            summary=True,
            mesh=mesh,
            executor=executor,
            progress=not arguments.json,
        )
    out, caption, scores = arguments.out, _caption(file.name, runs), score_selectors(runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(f"{score_table(scores)}\n\n{pairwise_table(runs)}\n\n{caption}\n")
    runs.to_netcdf(out / "runs.nc")
    draw_run(runs, out, caption)
    name = engine.explanation.engine
    show(f"{score_table(scores)}\n\n{name} engine; wrote table.md, runs.nc and figures to {out}")
    result = {"engine": name, "scores": scores, "out": str(out)}
    return result, 0 if runs.attrs["is_complete"] else 130


def _caption(name: str, runs: "xarray.Dataset") -> str:
    facts = runs.attrs
    return (
        f"{name}: {facts['num_realizations']} realizations of {facts['num_steps']} steps, M = {facts['num_samples']}, "
        f"{facts['engine']} engine, worlds from the {facts['worlds']}; regret is expected (pseudo) regret"
    )
