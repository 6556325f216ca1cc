"""`ppl-bandit tune`: find the selector of a model file for a horizon, and write the table and the figure behind it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ppl_bandit import engines
from ppl_bandit.commands.model_files import ModelFile, load_model
from ppl_bandit.commands.words import ENGINES, check_words, chosen_selectors
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.figures import draw_tuned
from ppl_bandit.simulation.races import Tuned
from ppl_bandit.simulation.tune import tune

__all__ = ["tune_model"]

_HEAVY = 0.1  # share of all regret in one world, of hundreds, above which a mean says little
_ENOUGH = 128


def tune_model(
    spec: str,
    out: Path,
    *,
    horizon: int,
    names: Sequence[str] | None = None,
    criterion: str = "mean",
    doubt: float = 1.0,
    engine: str = "auto",
    num_worlds: int = 512,
    tolerance: float = 0.06,
    num_samples: int = 1000,
    seed: int = 0,
    say: Callable[[str], None],
) -> tuple[Tuned, str]:
    """Tune a model file, and write `tune.md` and `tune.png` to `out`.

    Args:
        names: words of the candidates; None is all of them.
        criterion: "mean", or a quantile as digits.

    Returns:
        The answer, and the lines of Python that use it.
    """
    factories = {"auto": engines.choose, **ENGINES}
    check_words([engine], factories, "--engine")
    chosen = None if names is None else chosen_selectors(names, horizon)
    file = load_model(spec)
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    doubted = "" if doubt == 1.0 else f" and from priors {doubt:g} times too narrow and too wide"
    say(f"{file.name}: up to {num_worlds} worlds from the prior{doubted}, {horizon} decisions in each")
    tuned = tune(
        model,
        horizon,
        chosen,
        criterion=_criterion(criterion),
        contexts=file.contexts,
        doubt=doubt,
        engine=factories[engine],
        num_worlds=num_worlds,
        tolerance=tolerance,
        num_samples=num_samples,
        seed=seed,
        say=say,
    )
    code = f"from ppl_bandit import Bandit, selectors\nbandit = Bandit({_program(file)}, selector={tuned.code})"
    notes = [f"{tuned.horizon} decisions; criterion {tuned.criterion}; doubt {doubt:g}; {tuned.seconds:.0f} s"]
    if tuned.heaviest > _HEAVY and tuned.standings[0].num_worlds >= _ENOUGH:
        notes.append(
            f"one world of the prior has {100 * tuned.heaviest:.0f}% of all regret: its tails are heavy, and means and their "
            "errors say little; use --criterion 0.9, or a prior that you believe"
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "tune.md").write_text(f"{tuned}\n\n{'; '.join(notes)}\n\n```python\n{code}\n```\n")
    draw_tuned(tuned, out, f"{file.name}: {notes[0]}")
    for note in notes[1:]:
        say(note)
    return tuned, code


def _criterion(word: str) -> str | float:
    if word == "mean":
        return word
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"--criterion must be mean or a quantile such as 0.95, got {word!r}") from None


def _program(file: ModelFile) -> str:
    extra = "" if file.context is None else ", context=context"
    extra += "" if file.outcomes == ("reward",) else f", outcomes={file.outcomes}"
    return f"{file.program.__name__}, num_arms={file.num_arms}{extra}"
