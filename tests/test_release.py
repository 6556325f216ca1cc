"""What a release needs: one version everywhere, and a changelog whose newest section is that version's."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version in sections[:2] and sections[0] in ("Unreleased", version)


def test_the_dates_of_releases_fall():
    dates = re.findall(r"^## [\d.]+ \((\d{4}-\d\d-\d\d)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dates and dates == sorted(dates, reverse=True)
