"""Builds README, the pages of this folder, and the reference, which is generated from the code, into one site.

``make docs`` calls it strictly: a dead link, a page that no other lists, and a name that does not exist are errors.
The sources are the whole repository, so that each relative link works here as it does where the code is hosted.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import site_pages

import lightning_sm

project = "lightning_sm"
release = version = lightning_sm.__version__
root_doc = "README"
smartquotes = False  # "--local" in a text is an option
include_patterns = ["*.md", "app/README.md", "benchmarks/README.md", "docs/**.md", "docs/**.ipynb"]
# Not searched for pages, which would take seconds.
exclude_patterns = [".*", "outputs", "tests", "lightning_sm", "docker"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"  # a test executes the notebook; the site shows what it has
myst_heading_anchors = 4

autodoc_inherit_docstrings = False  # Lightning documents its own hooks
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
nitpicky = True
# What prepare_process returns; its attributes may change.
nitpick_ignore = [
    ("py:class", "lightning_sm.training.process.PreparedProcess"),
]
# Types of the standard library, torch and Lightning: their inventories would have to come from the network.
nitpick_ignore_regex = [("py:.*", r"(?!lightning_sm\.).*")]

html_theme = "furo"
html_title = f"lightning_sm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_static/index.html"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

setup = site_pages.setup
