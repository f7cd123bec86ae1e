"""Additions to the pages on the site: navigation, pictures of diagrams, and the generated reference."""

from __future__ import annotations

import re
from typing import Any

import mermaid
import page_images
import reference
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import lightning_sm

# Matches hidden keywords by which the search finds a page.
_SEARCH_WORDS = re.compile(r"^<!-- search: (.+) -->$", re.MULTILINE)
_NAVIGATION = "## Documentation\n"
# On the site, Sphinx adds whole docstrings to the public names.
_GENERATED = {**reference.GENERATED, "python": reference.python_directives}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the handlers that change each page while Sphinx reads it."""
    app.connect("env-get-outdated", _reference_pages)
    app.connect("source-read", _complete)
    app.connect("missing-reference", _public_name)
    return {"parallel_read_safe": True}


def _reference_pages(app: Sphinx, env: BuildEnvironment, *_changes: set[str]) -> list[str]:
    """Mark the reference pages as outdated in each build: the code may have changed although their files did not."""
    return [page for page in env.found_docs if page.startswith("docs/reference/")]


def _complete(app: Sphinx, page: str, content: list[str]) -> None:
    text = content[0]
    if page == app.config.root_doc:
        text += _toctrees(text)
    # Sphinx resolves absolute paths against the root of the repository.
    text = mermaid.with_pictures(text, lambda file: f"/{file.relative_to(app.srcdir)}")
    text = page_images.as_directives(text)
    text = _SEARCH_WORDS.sub(lambda match: f"```{{eval-rst}}\n.. index:: {match[1]}\n```\n", text)
    content[0] = reference.PLACE.sub(lambda match: _GENERATED[match[1]](), text)


def _toctrees(readme: str) -> str:
    """Build the navigation from the links and captions of README's section "Documentation"."""
    section = readme.partition(_NAVIGATION)[2].partition("\n## ")[0]
    parts = re.split(r"^\*\*(.+)\*\*", section, flags=re.MULTILINE)[1:]
    trees = []
    for caption, links in zip(parts[::2], parts[1::2], strict=True):
        entries = "\n".join(re.findall(r"\]\(([\w/.-]+)\.(?:md|ipynb)\)", links))
        trees.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n")
    return "".join(trees)


def _public_name(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.reference | None:
    """Link a class that a signature names by its module to the public name that documents it."""
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in lightning_sm.__all__:
        return None
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"lightning_sm.{name}", node, content
    )
