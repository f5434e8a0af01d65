"""Sphinx configuration: Markdown by MyST, docstrings by numpydoc, a gallery that is executed at every build."""

from __future__ import annotations

import gc
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grace_opt._util.quiet import quietly
from grace_opt.hf.models import disable_progress_bars

gc.disable()  # looking through what torch imports takes a quarter of a build, which ends soon

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What is compiled or loaded for the first time on this machine is no part of an example's output.
disable_progress_bars()
silence = ExitStack()  # as long as this name
silence.enter_context(quietly())

project = "grace_opt"
author = "The grace_opt maintainers"
release = version = PROJECT["version"]
project_copyright = "the grace_opt maintainers"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
    "mathml",  # ours, in _ext
    "complete",
]
templates_path = ["_templates"]
# Tutorials and the gallery's sources are executed and rewritten into start/ and gallery/; autosummary writes
# api/generated/.
exclude_patterns = ["_build", "_ext", "examples", "tutorials"]
nitpicky = False

html_theme = "furo"
html_title = f"grace_opt {version}"
# Only Markdown and gallery pages are written by hand: no "view source" of generated files.
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # the docstrings name the types, in words that fit arrays
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # the class template lists them once

sphinx_gallery_conf = {
    "examples_dirs": ["tutorials", "examples"],
    "gallery_dirs": ["start", "gallery"],
    "filename_pattern": r"\.py$",  # all are executed
    "abort_on_example_error": True,
    "download_all_examples": False,
    "write_computation_times": False,
    "show_memory": False,
    "remove_config_comments": True,
}


def setup(app: Any) -> None:
    """Open the sidebar at the current section alone: all sections on each of 170 pages take 40 % of the build."""

    def collapse(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
        toctree = context["toctree"]
        context["toctree"] = lambda **options: toctree(**{**options, "collapse": True})

    app.connect("html-page-context", collapse, priority=400)  # before the theme's own, at 500
