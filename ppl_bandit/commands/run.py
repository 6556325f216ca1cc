"""`ppl-bandit run`: play selectors on a model, and write a table, figures and the data."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ppl_bandit import engines
from ppl_bandit.commands.model_files import ModelFileError, load_model
from ppl_bandit.commands.words import ENGINES, SELECTORS, check_words
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.figures import draw_run
from ppl_bandit.simulation.scores import Score, scores, table
from ppl_bandit.simulation.simulate import simulate

if TYPE_CHECKING:
    import xarray

__all__ = ["run_model"]


def run_model(
    spec: str,
    names: Sequence[str],
    out: Path,
    *,
    engine: str = "auto",
    num_steps: int,
    num_realizations: int,
    num_samples: int = 1000,
    seed: int = 0,
    devices: int | None = None,
    progress: bool = False,
) -> tuple[list[Score], str, bool]:
    """Simulate selectors on a model file at its truth, and write `runs.nc`, `table.md` and the figures to `out`.

    Returns:
        The scores, the engine's name, and whether all realizations were done: Ctrl-C keeps those that were.
    """
    factories = {"auto": engines.choose, **ENGINES}
    check_words(names, SELECTORS, "--selectors")
    check_words([engine], factories, "--engine")
    chosen = {SELECTORS[name][0]: SELECTORS[name][1]() for name in names}
    file = load_model(spec)
    if file.truth is None:
        raise ModelFileError(f"{file.path} has no truth: add `truth = {{site: value}}`, the world to simulate")
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    with jax.enable_x64(True):
        built = factories[engine](model)
    world = Environment(model, file.truth, file.contexts)
    settings: dict[str, Any] = {"num_steps": num_steps, "num_samples": num_samples, "progress": progress}
    mesh = None
    if devices is not None:
        mesh = jax.make_mesh((devices or len(jax.devices()),), ("realization",))
    found = simulate(
        seed, model, built, chosen, world, num_realizations=num_realizations, summary=True, mesh=mesh, **settings
    )
    out.mkdir(parents=True, exist_ok=True)
    scored = scores(found)
    (out / "table.md").write_text(f"{table(scored)}\n\n{_caption(file.name, found)}\n")
    found.to_netcdf(out / "runs.nc")
    draw_run(found, out, _caption(file.name, found))
    return scored, built.explanation.engine, bool(found.attrs["is_complete"])


def _caption(name: str, found: "xarray.Dataset") -> str:
    facts = found.attrs
    return (
        f"{name}: {facts['num_realizations']} realizations of {facts['num_steps']} steps, M = {facts['num_samples']}, "
        f"{facts['engine']} engine, key {facts['key']}; regret is expected (pseudo) regret"
    )
