"""Sphinx configuration of the site: README, the pages of this folder, and the reference generated from the code.

``make docs`` builds strictly: dead links, pages missing from the navigation, and unknown names are errors. The source
folder is the whole repository, so that relative links work on the site as they do where the code is hosted.
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
smartquotes = False  # would turn the "--" of options into a dash
include_patterns = ["*.md", "app/README.md", "benchmarks/README.md", "docs/**.md", "docs/**.ipynb"]
# Searching these folders for pages would take seconds.
exclude_patterns = [".*", "outputs", "tests", "lightning_sm", "docker"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"  # a test executes the notebook; the site shows its stored output
myst_heading_anchors = 4

autodoc_inherit_docstrings = False  # Lightning documents its own hooks
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
nitpicky = True
# prepare_process returns this class, which is not documented because its attributes may change.
nitpick_ignore = [
    ("py:class", "lightning_sm.training.process.PreparedProcess"),
]
# Ignore types of the standard library, torch and Lightning: resolving them needs inventories from the network.
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
