"""The pages as a site: built strictly, complete, and read without a network."""

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
    """The folder that ``make docs`` fills."""
    pytest.importorskip("sphinx", reason="the site needs Sphinx: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--nitpicky", "--fail-on-warning", "--keep-going", "--quiet"]
    command += ["--conf-dir", "docs", "--doctree-dir", str(folder / "cache"), ".", str(folder / "html")]
    # A network, if there is one, would not be reached: a proxy at a port where nothing listens.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **nowhere}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_page_is_there(site):
    """Each page and notebook of the documentation, the project's own, the reference; index.html leads to the first."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "docs").glob("*.ipynb")]
    missing = [page for page in pages if not (site / page.relative_to(REPOSITORY).with_suffix(".html")).is_file()]
    assert missing == []
    assert 'url=README.html"' in (site / "index.html").read_text(encoding="utf-8")


def test_the_reference_names_the_public_api(site):
    """Each public name has an anchor, which links in signatures lead to."""
    page = (site / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    names = set(lightning_sm.__all__) - {"__version__"}
    assert {name for name in names if f'id="lightning_sm.{name}"' not in page} == set()


def test_nothing_is_loaded_from_the_network(site):
    """Scripts, styles, fonts and pictures are files of the site."""
    loaded = re.compile(
        r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["'](?:https?:)?//[^"']*|url\(["']?https?:"""
    )
    found = {
        str(file.relative_to(site)): loaded.findall(file.read_text(encoding="utf-8"))
        for file in [*site.rglob("*.html"), *site.rglob("*.css")]
    }
    assert {name: links for name, links in found.items() if links} == {}


def test_the_search_finds_pages_by_their_search_words(site):
    """A word in the comment of a page is an entry of the index, which the search ranks first, and leads there."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    pages = {index["docnames"][number] for number, *_ in index["indexentries"]["spot interruption"]}
    assert pages == {"docs/lifecycle"}
    assert "search: " not in (site / "docs" / "lifecycle.html").read_text(encoding="utf-8")


def test_the_search_finds_a_generated_word(site):
    """The index, a script that is loaded with the page, knows a variable that only the generated table has."""
    assert "lightning_sm_peers_timeout_" in (site / "searchindex.js").read_text(encoding="utf-8")


@pytest.mark.chromium
@pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed (Debian: chromium, fonts-dejavu-core)")
def test_diagrams_can_be_read_in_the_dark_and_on_a_phone(site, tmp_path):
    """Each has the white page that it is drawn for, and its own size, in which it moves sideways; the page does not."""
    with browser(tmp_path) as page:
        page.open(site / "ARCHITECTURE.html", width=390, is_dark=True)
        shown = page.evaluate(
            "[...document.querySelectorAll('article img')].map(one => "
            "[one.getBoundingClientRect().width >= one.naturalWidth, getComputedStyle(one).backgroundColor])"
        )
        assert shown == [[True, "rgb(255, 255, 255)"]] * 3
        assert page.evaluate("document.documentElement.scrollWidth") == 390
