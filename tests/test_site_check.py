"""The browser's check of the site finds what it is made for."""

import importlib.util
import shutil
from pathlib import Path

import pytest

CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
PAGE = '<!doctype html><meta name="viewport" content="width=device-width"><article>{}</article>'


def load_checker():
    spec = importlib.util.spec_from_file_location("check_site", Path(__file__).parents[1] / "docs" / "check_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: the check was not tried")
def test_each_kind_of_problem_is_found_and_a_good_page_has_none(tmp_path):
    pages = {
        "index": "<p>For 5 $, <code>$x$</code>.</p><div style='overflow-x: auto'><p style='width: 900px'>x</p></div>",
        "wide": "<p style='width: 900px'>wide</p>",
        "formula": "<p>Here $x + 1$ is raw.</p>",
        "figure": "<img src='data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA='>",
        "script": "<script>nothing.at.all</script>",
    }
    for name, body in pages.items():
        (tmp_path / f"{name}.html").write_text(PAGE.format(body))
    problems = "\n".join(load_checker().check_site(tmp_path, CHROMIUM))
    assert "wide.html: is 9" in problems and "formula.html: a formula is not rendered: Here $x" in problems
    assert "figure.html: no description" in problems and "nothing is not defined" in problems
    assert "index.html" not in problems and len(problems.splitlines()) == 4
