"""Imports go downwards only, and never in a circle: read from the source, not from what happens to be loaded."""

import ast
import functools
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Bottom to top: the path of the data. A file may import from its own folder and from folders on lower levels.
LEVELS = (
    ("types",),
    ("runtime", "display"),
    ("numerics",),
    ("program", "selectors"),
    ("engines",),
    ("inputs",),
    ("simulation",),
    ("posterior",),
    ("journal",),
    ("evaluation",),
    ("trials",),
    ("live",),
    ("paper", "comparison", "deciders"),
    ("__init__",),
    ("files",),
    ("serving",),
    ("commands",),
)
LEVEL = {folder: level for level, folders in enumerate(LEVELS) for folder in folders}
NO_MODEL = ("runtime", "numerics", "selectors")  # what is a function of numbers knows no model
ADAPTER = "ppl_bandit.runtime.numpyro_adapter"  # the one file of these folders that may know a model
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
    for path in sorted((ROOT / "ppl_bandit").rglob("*.py"))
}


def folder_of(module: str) -> str:
    """The first name below the package: `ppl_bandit.engines.proof.analyticity` lies in `engines`."""
    name = (module.split(".") + ["__init__"])[1]
    return name if name in LEVEL else "__init__"


@functools.cache
def imported_names(module: str, source: str) -> tuple[str, ...]:
    """Return the absolute dotted name of every import, wherever it stands."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            names += [f"{stem}.{alias.name}" for alias in node.names]
    return tuple(names)


def upward(module: str, source: str) -> list[str]:
    """List the imports of a module that reach beside or above its folder, or a model where none may be known."""
    own = folder_of(module)
    ours = [name for name in imported_names(module, source) if name.split(".")[0] == "ppl_bandit"]
    found = [name for name in ours if folder_of(name) != own and LEVEL[folder_of(name)] >= LEVEL[own]]
    if own in NO_MODEL and module != ADAPTER:
        found += [name for name in imported_names(module, source) if name.startswith(("numpyro", ADAPTER))]
    return found


def files_imported(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the graph of files: a name that is no file of its own belongs to the file that it is imported from."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for name in imported_names(module, source):
            stem = name.rpartition(".")[0]
            candidates = (name, f"{name}.__init__", stem, f"{stem}.__init__")
            target = next((file for file in candidates if file in sources), None)
            graph[module] |= {target} - {module} if target else set()
    return graph


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_downwards(module):
    assert upward(module, SOURCES[module]) == []


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter(files_imported(SOURCES)).prepare()


def test_a_circle_is_found():
    with pytest.raises(CycleError):
        TopologicalSorter(files_imported({"a": "import b", "b": "def late():\n    from a import x"})).prepare()


@pytest.mark.parametrize("path", sorted((ROOT / "models").rglob("*.py")), ids=lambda path: path.name)
def test_models_import_jax_and_numpyro_only(path):
    roots = {name.partition(".")[0] for name in imported_names(path.stem, path.read_text())}
    assert roots - set(sys.stdlib_module_names) <= {"jax", "numpyro"}


@pytest.mark.parametrize(
    "source",
    [
        "import ppl_bandit.engines",
        "from ppl_bandit import Bandit",
        "from .. import engines",
        "from ..engines.updates.exact import conjugate",
        "from ppl_bandit.program.model.tracing import Site",
        "import numpyro",
        "def late():\n    from ppl_bandit.live.bandit import Bandit",
    ],
)
def test_an_upward_arrow_is_found_however_it_is_spelled(source):
    assert len(upward("ppl_bandit.selectors.constraints", source)) == 1


@pytest.mark.parametrize("source", ["import jax", "from ppl_bandit.types import Key", "from ..numerics import tails"])
def test_a_downward_arrow_is_not_a_fault(source):
    assert upward("ppl_bandit.selectors.constraints", source) == []


def test_no_two_test_files_have_the_same_name():
    """pytest imports test files by their names alone: two of one name end the run before its first test."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name in names if names.count(name) > 1] == []
