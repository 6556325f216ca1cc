"""The program of a recorded experiment: the file that the journal names, if it is a model file."""

import ast
from pathlib import Path

from ppl_bandit.journal.open_experiment import ExperimentHeader
from ppl_bandit.journal.stores.store import JournalError

_REMEDY = "give --model path/to/file.py, or file.py:function"


def find_program(header: ExperimentHeader, url: str, action: str) -> str:
    """Return the program of an experiment as `load_model` takes it.

    The recorded file is taken where it was, or from the folder of the journal. Only a model file is: loading executes it, and a
    script that happens to define the program may do anything.

    Args:
        url: of the journal.
        action: that needs the program, for messages.

    Raises:
        JournalError: if it is not found, with the places that were looked at.
    """
    if header.source is None:
        raise JournalError(f"{action} needs the program: {_REMEDY}; the journal does not say where it is")
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
    raise JournalError(f"{action} needs the program: {_REMEDY}; {function!r} was not found at {'; '.join(looked)}")


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
