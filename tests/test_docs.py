"""Every Python block of the README and the docs runs, and prints what the page says it prints."""

import contextlib
import gc
import importlib.util
import io
import linecache
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The blocks of the other pages build many engines or simulate, or prove what other tests prove: run them with -m slow after
# editing them.
DEFAULT_PAGES = (
    "README.md",
    "docs/auditing.md",
    "docs/extending.md",
    "docs/quickstart.md",
    "docs/tutorials/open-bandit.md",
)
NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)  # an optional package that a page reads data from
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>.*)$")


class Block(NamedTuple):
    """One fenced block of a page; `line` is where its first line of content stands, counted from 1."""

    language: str
    line: int
    source: str
    follows_directly: bool  # only blank lines since the block before


def fenced_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    opened, content, follows_directly = None, [], False
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, first, content = fence, number + 1, []
        elif opened is None:
            follows_directly = follows_directly and not line.strip()
        elif line.strip() == opened["ticks"]:
            blocks.append(Block(opened["language"].strip(), first, "\n".join(content), follows_directly))
            opened, follows_directly = None, True
        else:
            content.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise AssertionError(f"line {first - 1}: this fence is never closed")
    return blocks


def run_page(name: str, text: str) -> None:
    """Run the Python blocks of a page, top to bottom, in one namespace; `name` is its path, for messages."""
    namespace: dict = {"__name__": "__main__"}
    printed = None
    for block in fenced_blocks(text):
        if block.language == "python":
            printed = run_block(name, block, namespace)
            continue
        if block.language.startswith("python"):
            raise AssertionError(f"{name}:{block.line - 1}: write ```python alone; every block runs")
        if block.language == "text" and block.follows_directly and printed is not None:
            said, expected = printed.rstrip(), block.source.rstrip()
            # "..." stands for what rounding decides, such as the size of a residual.
            if not re.fullmatch(re.escape(expected).replace(r"\.\.\.", "[^\n]*"), said):
                raise AssertionError(f"{name}:{block.line}: the page says\n{expected}\nbut the block printed\n{said}")
        printed = None


def run_block(name: str, block: Block, namespace: dict) -> str:
    # Blank lines in front keep the page's own line numbers, in tracebacks and for inspect.getsource.
    source = "\n" * (block.line - 1) + block.source
    code = compile(source, name, "exec")
    linecache.cache[name] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        name,
    )  # as a notebook does for its cells
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(code, namespace)
    except Exception as error:
        line, step = block.line, error.__traceback__
        while step is not None:
            line = step.tb_lineno if step.tb_frame.f_code.co_filename == name else line
            step = step.tb_next
        raise AssertionError(f"{name}:{line}: {type(error).__name__}: {error}") from error
    return output.getvalue()


def page_cases():
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        is_slow = name not in DEFAULT_PAGES and "```python" in page.read_text()
        yield pytest.param(page, id=name, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("page", page_cases())
def test_every_python_block_of_the_page_runs(page, tmp_path, monkeypatch):
    for needed in NEEDS.findall(page.read_text()):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"this page needs {needed}, which is not installed: python -m pip install --no-deps {needed}")
    monkeypatch.chdir(tmp_path)
    run_page(str(page), page.read_text())
    gc.unfreeze()  # a page may freeze what a service keeps; the tests to come keep nothing


def test_blocks_share_a_namespace_and_their_output_is_compared():
    run_page("page.md", "```python\nx = 1\n```\n\nThen\n```python\nprint(x)\n```\n\n```text\n1\n```\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Title\n\n```python\nx = 1\nx / 0\n```\n", r"page\.md:5: ZeroDivisionError"),
        ("```python\nprint(1)\n```\n```text\n2\n```\n", r"page\.md:5: the page says\n2\nbut the block printed\n1"),
        ("```python\nx = 1\n```\n```text\n2\n```\n", r"page\.md:5: the page says"),
        ("```python no-run\nx = 1\n```\n", r"page\.md:1: write ```python alone"),
        ("```python\nx = 1\n", r"line 1: this fence is never closed"),
    ],
)
def test_a_page_that_lies_is_reported_with_its_line(text, message):
    with pytest.raises(AssertionError, match=message):
        run_page("page.md", text)


def test_text_that_does_not_follow_a_python_block_is_left_alone():
    run_page("page.md", "```python\nprint(1)\n```\nSomething else:\n```text\n2\n```\n```bash\nfalse\n```\n")


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/extending.md", "docs/explain.md", "docs/engines.md"])
def test_every_path_that_a_page_names_exists(page):
    """A path is written in backticks, with a slash or as a Python file: from the root, or from the package's folder."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|types\.py)`", text)
    missing = [path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "ppl_bandit"))]
    subfolders = {folder.name + "/" for folder in (ROOT / "ppl_bandit").rglob("*") if folder.is_dir()}
    assert [path for path in missing if path not in subfolders] == []


def test_formulas_are_rendered_in_the_site(tmp_path):
    for needed in ("sphinx", "myst_nb", "furo", "sphinx_copybutton"):
        pytest.importorskip(needed, reason=f"{needed} is not installed; python -m pip install -e '.[docs]' installs it")
    source, site, pages = tmp_path / "source", tmp_path / "site", ("conjugacy", "partly-conjugate", "glossary")
    source.mkdir()
    for page in pages:
        shutil.copy(ROOT / "docs" / f"{page}.md", source)
    # These pages alone, with the settings of the site. Their links lead to pages that are not built here.
    options = ["-q", "-c", str(ROOT / "docs"), "-D", "suppress_warnings=myst.xref_missing,image.not_readable"]
    options += ["-D", f"root_doc={pages[0]}"]
    subprocess.run([sys.executable, "-m", "sphinx", *options, str(source), str(site)], check=True, capture_output=True)
    for page in pages:
        built = (site / f"{page}.html").read_text()
        outside_code = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", built, flags=re.DOTALL)
        assert 'class="math' in outside_code, (
            f"no formula of {page} was rendered: is dollarmath enabled in docs/conf.py?"
        )
        assert not re.search(r"\$[^$<>]+\$", outside_code), f"{page} shows a formula as raw text between dollar signs"
