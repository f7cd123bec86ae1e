"""The documentation site builds without warnings, is complete, and loads nothing from the network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_sm
from tests.integration.report.browser import PROGRAM, browser

pytestmark = pytest.mark.proof

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as ``make docs`` builds it."""
    pytest.importorskip("sphinx", reason="the site needs Sphinx: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--nitpicky", "--fail-on-warning", "--keep-going", "--quiet"]
    command += ["--conf-dir", "docs", "--doctree-dir", str(folder / "cache"), ".", str(folder / "html")]
    # Block network access with a proxy on a port where nothing listens.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **nowhere}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_page_is_there(site):
    """Every page and notebook is in the site, and index.html redirects to the README."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "docs").glob("*.ipynb")]
    missing = [page for page in pages if not (site / page.relative_to(REPOSITORY).with_suffix(".html")).is_file()]
    assert missing == []
    assert 'url=README.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_the_reference_names_the_public_api(site):
    """Each public name has an anchor for links in signatures."""
    page = (site / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    names = set(lightning_sm.__all__) - {"__version__"}
    assert {name for name in names if f'id="lightning_sm.{name}"' not in page} == set()


def test_nothing_is_loaded_from_the_network(site):
    """Scripts, styles, fonts and images are files of the site."""
    loaded = re.compile(
        r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//[^"']*|url\(["']?https?:"""
    )
    found = {
        str(file.relative_to(site)): loaded.findall(file.read_text(encoding="utf-8"))
        for file in [*site.rglob("*.html"), *site.rglob("*.css")]
    }
    assert {name: links for name, links in found.items() if links} == {}


def test_the_search_finds_pages_by_their_search_words(site):
    """A page's ``search:`` comment becomes an index entry, which the search ranks first, and is not in the page."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    pages = {index["docnames"][number] for number, *_ in index["indexentries"]["spot interruption"]}
    assert pages == {"docs/lifecycle"}
    assert "search: " not in (site / "docs" / "lifecycle.html").read_text(encoding="utf-8")


def test_the_search_finds_a_generated_word(site):
    """The search index contains a variable that appears only in the generated table."""
    assert "lightning_sm_peers_timeout_" in (site / "searchindex.js").read_text(encoding="utf-8")


@pytest.mark.chromium
@pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (Debian: chromium, fonts-dejavu-core)")
def test_diagrams_can_be_read_in_the_dark_and_on_a_phone(site, tmp_path):
    """Diagrams keep a white background and their natural width, and do not make the page scroll sideways."""
    with browser(tmp_path) as page:
        page.open(site / "ARCHITECTURE.html", width=390, is_dark=True)
        shown = page.evaluate(
            "[...document.querySelectorAll('article img')].map(one => "
            "[one.getBoundingClientRect().width >= one.naturalWidth, getComputedStyle(one).backgroundColor])"
        )
        assert shown == [[True, "rgb(255, 255, 255)"]] * 3
        assert page.evaluate("document.documentElement.scrollWidth") == 390
