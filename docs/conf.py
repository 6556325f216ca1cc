"""The documentation as a site: python -m pip install -e '.[docs]' && python -m sphinx -W --keep-going docs build/docs"""

from importlib.metadata import version as installed_version

project = "ppl_bandit"
author = "The ppl_bandit developers"
version = release = installed_version("ppl_bandit")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
root_doc = "index"
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write names in single backticks

nb_execution_mode = "force"  # an error in a notebook stops the build
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"  # tqdm prints a warning about widgets

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # the docstring of a NamedTuple describes its fields

html_theme = "furo"
html_title = "ppl_bandit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"


def _skip_fields(app, what, name, item, skip, options):
    """Skip the generated docstrings of NamedTuple fields ('Alias for field number 0')."""
    return True if type(item).__name__ == "_tuplegetter" or name in ("count", "index") else None


def setup(app):
    """Register the filter of autodoc members."""
    app.connect("autodoc-skip-member", _skip_fields)
