"""`ppl-bandit run`: play selectors on a model, and write a table, figures and the data."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from ppl_bandit import engines
from ppl_bandit.commands.model_files import ModelFileError, load_model
from ppl_bandit.commands.words import ENGINES, check_words, chosen_selectors
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.figures import draw_run
from ppl_bandit.simulation.scores import Score, pairwise, scores, table
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
    horizon: int | None = None,
    worlds: str = "truth",
) -> tuple[list[Score], str, bool]:
    """Simulate selectors on a model file, and write `runs.nc`, `table.md` and the figures to `out`.

    Args:
        horizon: what selectors with a horizon are told; None is the truth, `num_steps`.
        worlds: "truth", the file's own, or "prior", a new world from the program's prior for every realization.

    Returns:
        The scores, the engine's name, and whether all realizations were done: Ctrl-C keeps those that were.
    """
    factories = {"auto": engines.choose, **ENGINES}
    check_words([engine], factories, "--engine")
    check_words([worlds], ("truth", "prior"), "--worlds")
    chosen = chosen_selectors(names, num_steps if horizon is None else horizon)
    file = load_model(spec)
    if worlds == "truth" and file.truth is None:
        raise ModelFileError(
            f"{file.path} has no truth: add `truth = {{site: value}}`, the world to simulate, or use --worlds prior"
        )
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    with jax.enable_x64(True):
        built = factories[engine](model)
    is_drawn = worlds == "prior" or file.truth is None
    world = (
        Environment.from_prior(model, file.contexts)
        if is_drawn
        else Environment(model, file.truth or {}, file.contexts)
    )
    settings: dict[str, Any] = {"num_steps": num_steps, "num_samples": num_samples, "progress": progress}
    mesh = None
    if devices is not None:
        mesh = jax.make_mesh((devices or len(jax.devices()),), ("realization",))
    found = simulate(
        seed, model, built, chosen, world, num_realizations=num_realizations, summary=True, mesh=mesh, **settings
    )
    out.mkdir(parents=True, exist_ok=True)
    scored = scores(found)
    (out / "table.md").write_text(f"{table(scored)}\n\n{pairwise(found)}\n\n{_caption(file.name, found)}\n")
    found.to_netcdf(out / "runs.nc")
    draw_run(found, out, _caption(file.name, found))
    return scored, built.explanation.engine, bool(found.attrs["is_complete"])


def _caption(name: str, found: "xarray.Dataset") -> str:
    facts = found.attrs
    return (
        f"{name}: {facts['num_realizations']} realizations of {facts['num_steps']} steps, M = {facts['num_samples']}, "
        f"{facts['engine']} engine, key {facts['key']}, worlds from the {facts['worlds']}; regret is expected (pseudo) regret"
    )
