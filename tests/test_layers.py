"""Imports go downwards only: read from the source, not from what happens to be loaded."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ppl_bandit"

# Bottom to top. A module may import its own layer and those before it; a folder counts as one module.
LAYERS = (
    ("types",),
    (
        "compilation",
        "program",
        "tracing",
        "validation",
        "probing",
        "means",
        "jaxprs",
        "selectors",
        "sampling",
        "tails",
        "laws",
    ),
    ("environment", "engines"),
    (
        "rollouts",
        "records",
        "simulation",
        "bandit",
        "journal",
        "snapshot",
        "history",
        "inputs",
        "summary",
        "arviz_export",
        "compiled",
    ),
    ("data_files", "paper", "comparison", "report", "plots", "run_figures", "scores", "paper_figures"),
    ("__init__",),
    (
        "model_files",
        "check",
        "compare_command",
        "vocabulary",
        "demo",
        "run_command",
        "reproduce_command",
        "cli",
        "__main__",
    ),
)
HEIGHT = {module: height for height, layer in enumerate(LAYERS) for module in layer}

# What a module keeps out by contract: a function of the table, or of numbers, knows no model.
NEVER_IMPORTS = {
    "selectors": ("numpyro",),
    "tails": ("numpyro",),
    "sampling": ("numpyro",),
}


def module_of(path: Path) -> str:
    """The first name below the package: `ppl_bandit/engines/nuts.py` is `engines`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_names(source: str, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) for every import, wherever it stands; `package` resolves relative ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *filter(None, [node.module])))
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def project_module(name: str) -> str | None:
    """The module of the package that a dotted name reaches, `__init__` for a re-exported name, or None from outside."""
    first, _, rest = name.partition(".")
    if first != "ppl_bandit":
        return None
    head = rest.partition(".")[0]
    return head if head in HEIGHT else "__init__"


def faults(path: Path, source: str) -> list[str]:
    """Say what is wrong with the imports of one module."""
    module = module_of(path)
    where = path.relative_to(ROOT)
    if module not in HEIGHT:
        return [f"{where}: {module!r} has no layer; place it in LAYERS"]
    package = ("ppl_bandit", *path.relative_to(PACKAGE).parts[:-1])
    found = []
    for line, name in imported_names(source, package):
        target = project_module(name)
        if target is not None and HEIGHT.get(target, 0) > HEIGHT[module]:
            found.append(f"{where}:{line}: {module} imports {target}, which lies above it")
        if name.partition(".")[0] in NEVER_IMPORTS.get(module, ()):
            found.append(f"{where}:{line}: {module} must not import {name.partition('.')[0]}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    assert not faults(path, path.read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_import_jax_and_numpyro_only(path):
    roots = {name.partition(".")[0] for _, name in imported_names(path.read_text(), ())}
    assert roots - set(sys.stdlib_module_names) <= {"jax", "numpyro"}


@pytest.mark.parametrize(
    "source",
    [
        "import ppl_bandit.engines",
        "from ppl_bandit.engines import conjugate",
        "from ppl_bandit import engines",
        "from ppl_bandit import Bandit",
        "from .. import engines",
        "from ..engines.conjugate import engine",
        "import numpyro",
        "def late():\n    from ppl_bandit.bandit import Bandit",
    ],
)
def test_an_upward_arrow_is_found_however_it_is_spelled(source):
    assert len(faults(PACKAGE / "selectors" / "__init__.py", source)) == 1


@pytest.mark.parametrize("source", ["import jax", "from ppl_bandit.types import Key", "from ..tails import log_tail"])
def test_a_downward_or_level_arrow_is_not_a_fault(source):
    assert not faults(PACKAGE / "selectors" / "__init__.py", source)
