"""On a dark page figures, which are drawn on white, take the colour of the page; what is black turns white, and hues stay."""

import io
from pathlib import Path

import pytest

from ppl_bandit.display.figure_style import figure_tools, html_figure, html_page

CHROMIUM = Path("/usr/bin/chromium")
SITE_CSS = Path(__file__).parents[2] / "docs" / "_static" / "site.css"


def drawn():
    """Return a figure of a black and a blue area on white."""
    figure, axis = figure_tools().subplots(figsize=(3, 1))
    axis.axvspan(0, 1, color="black")
    axis.axvspan(1, 2, color="#0072B2")
    axis.set(xlim=(0, 2), position=(0.2, 0.2, 0.6, 0.6))
    axis.set_axis_off()
    return figure


def site(theme, colour):
    """Return a page of the documentation's theme with the figure."""
    style = f"<style>body {{ background: {colour} }} {SITE_CSS.read_text()}</style>"
    return f"{style}<body data-theme={theme}><div class=content>{html_figure('x', drawn())}</div>"


def test_figures_follow_the_colours_of_the_page():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    pages = {
        ("report", "light"): (html_page("x", "", [html_figure("x", drawn())], None), (255, 255, 255)),
        ("report", "dark"): (html_page("x", "", [html_figure("x", drawn())], None), (0x16, 0x18, 0x1C)),
        ("site, automatic", "light"): (site("auto", "#fff"), (255, 255, 255)),
        ("site, automatic", "dark"): (site("auto", "#131416"), (0x13, 0x14, 0x16)),
        ("site, chosen", "light"): (site("dark", "#131416"), (0x13, 0x14, 0x16)),
        ("site, light chosen", "dark"): (site("light", "#fff"), (255, 255, 255)),
    }
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page()
        for (name, scheme), (text, background) in pages.items():
            page.emulate_media(color_scheme=scheme)
            page.set_content(text)
            box = page.locator("img").bounding_box()
            shown = images.open(io.BytesIO(page.screenshot())).convert("RGB")

            def colour(share, box=box, shown=shown):
                return shown.getpixel((int(box["x"] + share * box["width"]), int(box["y"] + box["height"] / 2)))

            black, (red, _, blue) = colour(0.35), colour(0.65)
            assert colour(0.05) == background, (name, scheme)
            assert min(black) > 220 if sum(background) < 300 else max(black) < 30, (name, scheme, black)
            assert blue > red + 100, (name, scheme)
        browser.close()
