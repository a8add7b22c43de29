"""Sphinx configuration. `make docs` builds with -W -n: a broken link or reference fails the build."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "Headwater"
author = "the Headwater authors"
copyright = "the Headwater authors; Apache-2.0"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_reference", "_plots"]
nitpicky = True

# Links within a page and between pages name headings; three levels of them have anchors.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

html_theme = "furo"
html_title = "Headwater"
html_static_path = ["_static"]
html_show_sphinx = False
html_copy_source = False
