"""The gallery shows every bundled model, with its figure, and says of it what the bandit says today."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ppl_bandit.journal.model_files import bundled_models

DOCS = Path(__file__).parents[1] / "docs"
TEXT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


def load_script():
    spec = importlib.util.spec_from_file_location("make_gallery", DOCS / "make_gallery.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    return script


script = load_script()
sections = script.sections_of((DOCS / "gallery.md").read_text())


def test_every_model_has_a_section_and_a_figure():
    assert list(sections) == sorted(bundled_models())
    assert {path.stem for path in (DOCS / "gallery").glob("*.png")} == set(sections)
    for name, section in sections.items():
        assert f"(gallery/{name}.png)" in section and f"../models/{name}.py" in section


def test_every_model_is_described_in_its_own_words():
    for name, section in sections.items():
        source = (DOCS.parent / "models" / f"{name}.py").read_text()
        words = " ".join(source.split('"""')[1].split())
        assert words in " ".join(section.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", bundled_models())
def test_the_page_says_what_explain_prints(name):
    shown, bandit = TEXT.search(sections[name])[1].rstrip(), script.play(name)
    said = script.explained(bandit).rstrip()
    if bandit.explanation.is_exact:
        assert said == shown
    else:  # another processor rounds otherwise, and after some updates the draws are others: the words stay
        assert words_of(said) == words_of(shown)


def words_of(text):
    return NUMBER.sub("#", text).split()
