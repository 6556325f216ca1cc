"""Model files: a Python module with a program, its number of arms, and optionally a context, a truth and outcomes.

A model is given as a path, `path/to/file.py`; as a path and a function of that file, `file.py:function`; or, if it is
bundled with the library, by its name, such as `bernoulli`.
"""

import ast
import difflib
import importlib.util
import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ppl_bandit.journal.open_experiment import ExperimentHeader
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import BanditError


class ModelFile(NamedTuple):
    """Contents of a model file.

    Attributes:
        name: the file's name without its suffix; followed by the function's name if one was given.
        path: the file.
        program: the NumPyro program, a function of `arm` or of `arm` and `context`.
        num_arms: number of arms.
        context: one example context, without a leading axis; None for a program without context.
        truth: {latent site: value} for simulation; None if the file has none.
        contexts: key -> context, draws one; None if the file has none.
        outcomes: names of the program's outcome sites.
    """

    name: str
    path: Path
    program: Callable[..., Any]
    num_arms: int
    context: Any = None
    truth: Mapping[str, Any] | None = None
    contexts: Callable[..., Any] | None = None
    outcomes: tuple[str, ...] = ("reward",)

    def reward_model(self) -> RewardModel:
        """Build the reward model, which validates the program."""
        return RewardModel(self.program, self.num_arms, self.context, self.outcomes)


class ModelFileError(BanditError):
    """A model file was not found or is invalid; the message names the file and the remedy."""


def bundled_models() -> dict[str, Path]:
    """Return {name: path} of the bundled models, in alphabetical order."""
    package = Path(__file__).parents[1]
    # A wheel has the models inside the package, a checkout beside it.
    folder = package / "models" if (package / "models").is_dir() else package.parent / "models"
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def load_model(spec: str | Path) -> ModelFile:
    """Load a model from `path/to/file.py`, `file.py:function` or the bare name of a bundled model.

    Loading executes the file: load only files that you trust.

    Raises:
        ModelFileError: if the file or the function does not exist, the file raises, or its contents are invalid.
    """
    path, function = _find(str(spec))
    module = _run(path)
    program = _program(module, path, function)
    name = path.stem if function is None else f"{path.stem}:{function}"
    return ModelFile(name, path, program, **_contents(module, path))


def _find(spec: str) -> tuple[Path, str | None]:
    parts = re.fullmatch(r"(?P<path>.+\.py)(?::(?P<function>\w+))?", spec)
    bundled = bundled_models()
    if parts is None and spec in bundled:
        return bundled[spec], None
    path = Path(parts["path"] if parts else spec).expanduser()
    if parts is not None and path.is_file():
        return path, parts["function"]
    if path.is_file():
        raise ModelFileError(f"{path} is not a Python file; a model is a file whose name ends in .py")
    near = difflib.get_close_matches(path.stem, bundled, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    kind = "file" if parts else "bundled model"
    raise ModelFileError(
        f"there is no {kind} {str(path)!r}; {hint}give a path to a .py file or one of the bundled models: {', '.join(bundled)}"
    )


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ppl_bandit_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ModelFileError(f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}") from error
    except (Exception, SystemExit) as error:
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        where = f"{path}:{own[-1]}" if own else str(path)
        raise ModelFileError(f"{where}: {type(error).__name__}: {error}") from error
    return module


def _program(module: ModuleType, path: Path, function: str | None) -> Callable[..., Any]:
    program = getattr(module, function or "model", None)
    if callable(program):
        return program
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    functions = ", ".join(name for name in own if callable(vars(module)[name])) or "none"
    if function is None:
        raise ModelFileError(
            f"{path} has no function `model`; give the program this name, or choose another function with {path}:NAME "
            f"(its functions: {functions})"
        )
    raise ModelFileError(f"{path} has no function `{function}`; its functions: {functions}")


def _contents(module: ModuleType, path: Path) -> dict[str, Any]:
    """Return the fields of a `ModelFile` that a file defines.

    Raises:
        ModelFileError: for a field of the wrong kind.
    """
    if not hasattr(module, "num_arms"):
        raise ModelFileError(f"{path} does not define num_arms; add a line such as `num_arms = 3`")
    num_arms, truth, contexts = module.num_arms, getattr(module, "truth", None), getattr(module, "contexts", None)
    outcomes = getattr(module, "outcomes", ("reward",))
    if isinstance(num_arms, bool) or not isinstance(num_arms, int) or num_arms < 1:
        raise ModelFileError(f"{path}: num_arms must be a positive integer, got {num_arms!r}")
    if truth is not None and not isinstance(truth, Mapping):
        raise ModelFileError(f"{path}: truth must be a dictionary {{latent site: value}}, got {type(truth).__name__}")
    if contexts is not None and not callable(contexts):
        raise ModelFileError(
            f"{path}: contexts must be a function of a random key that draws one context, got {type(contexts).__name__}"
        )
    if isinstance(outcomes, str) or not all(isinstance(name, str) for name in outcomes):
        raise ModelFileError(f'{path}: outcomes must be a tuple of site names, such as ("reward",), got {outcomes!r}')
    context = getattr(module, "context", None)
    return {
        "num_arms": num_arms,
        "context": context,
        "truth": truth,
        "contexts": contexts,
        "outcomes": tuple(outcomes),
    }


_REMEDY = "give --model path/to/file.py, or file.py:function"


def find_program(header: ExperimentHeader, url: str, action: str, remedy: str = _REMEDY) -> str:
    """Return the program of an experiment as `load_model` takes it.

    The recorded file is taken where it was, or from the folder of the journal. Only a model file is: loading executes it, and a
    script that happens to define the program may do anything.

    Args:
        url: of the journal.
        action: that needs the program, for messages.
        remedy: for messages.

    Raises:
        JournalError: if it is not found, with the places that were looked at.
    """
    if header.source is None:
        raise JournalError(f"{action} needs the program: {remedy}; the journal does not say where it is")
    recorded, function = Path(header.source[0]), header.source[1]
    places = [recorded]
    if "://" not in url or url.startswith("sqlite:///"):
        beside = Path(url.removeprefix("sqlite:///")).absolute().parent / recorded.name
        places += [beside] if beside != recorded else []
    looked = []
    for place in places:
        why = _fault(place, function)
        if not why:
            return f"{place}:{function}"
        looked.append(f"{place} ({why})")
    raise JournalError(f"{action} needs the program: {remedy}; {function!r} was not found at {'; '.join(looked)}")


def _fault(path: Path, function: str) -> str:
    """Return why a file is not a model file with this function, without executing it; empty if it is."""
    if not path.is_file():
        return "no such file"
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError) as error:
        return f"cannot be read: {error}"
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in body):
        return f"it defines no function {function!r}"
    assigned = {
        target.id
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    return "" if "num_arms" in assigned else "no model file: it does not define num_arms"
