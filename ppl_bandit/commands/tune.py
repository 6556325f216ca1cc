"""`ppl-bandit tune`: find the selector of a model file for a horizon, and write the table and the figure behind it."""

import argparse

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.names import engine_factory, executor_of, make_selectors
from ppl_bandit.journal.model_files import ModelFile, load_model
from ppl_bandit.simulation.figures import draw_tuned
from ppl_bandit.simulation.tune import tune

_HEAVY_TAIL = 0.1  # share of all regret in one world above which means are unreliable
_MIN_WORLDS_FOR_TAIL = 128


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Tune a model file, and write `tune.md` and `tune.png`."""
    make_engine = engine_factory(arguments.engine)
    names = arguments.selectors
    candidates = None if names is None else make_selectors(names.split(","), arguments.horizon)
    file = load_model(arguments.model)
    out = arguments.out
    progress(f"{file.name}: {arguments.num_worlds} worlds from the prior, {arguments.horizon} decisions each")
    with executor_of(arguments) as executor:
        tuned = tune(
            file.reward_model(),
            arguments.horizon,
            candidates,
            criterion=_criterion(arguments.criterion),
            contexts=file.contexts,
            engine=make_engine,
            num_worlds=arguments.num_worlds,
            num_samples=arguments.samples,
            seed=arguments.seed,
            executor=executor,
            say=progress,
        )
    code = f"from ppl_bandit import Bandit, selectors\nbandit = Bandit({_program(file)}, selector={tuned.code})"
    notes = [
        f"{tuned.horizon} decisions; criterion {tuned.criterion}; {tuned.num_worlds} worlds; {tuned.seconds:.0f} s"
    ]
    if not tuned.is_complete:
        notes.append(f"interrupted: only the {len(tuned.standings)} candidates that had played all worlds are compared")
    if tuned.heaviest > _HEAVY_TAIL and tuned.num_worlds >= _MIN_WORLDS_FOR_TAIL:
        notes.append(
            f"one world has {100 * tuned.heaviest:.0f}% of all regret: the prior has heavy tails, so means and their "
            "standard errors are unreliable; use --criterion 0.9, or a prior with lighter tails"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "tune.md").write_text(f"{tuned}\n\n{'; '.join(notes)}\n\n```python\n{code}\n```\n")
    draw_tuned(tuned, out, f"{file.name}: {notes[0]}")
    for note in notes[1:]:
        progress(note)
    show(f"{tuned}\n\n{code}\n\nwrote tune.md and tune.png to {out}")
    result = {"best": tuned.code, "num_worlds": tuned.num_worlds, "standings": tuned.standings, "out": str(out)}
    return result, 0 if tuned.is_complete else 130


def _criterion(text: str) -> str | float:
    if text == "mean":
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--criterion must be mean or a quantile such as 0.95, got {text!r}") from None


def _program(file: ModelFile) -> str:
    extra = "" if file.context is None else ", context=context"
    extra += "" if file.outcomes == ("reward",) else f", outcomes={file.outcomes}"
    return f"{file.program.__name__}, num_arms={file.num_arms}{extra}"
