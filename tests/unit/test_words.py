"""Automated checks of the pages' style: headings, navigation, units and code blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    REPOSITORY / "app" / "README.md",
    REPOSITORY / "benchmarks" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
# Pages for users, without ARCHITECTURE, which is for readers of the code, and CHANGELOG, which is a list.
GUIDES = [page for page in PAGES if page.name not in {"ARCHITECTURE.md", "CHANGELOG.md"}]
TESTED = REPOSITORY / "docs" / "tested.md"
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"""<(?:/?picture|source\b[^>]*|img\b[^>]*?(?:alt="([^"]*)"[^>]*)?)>""")
_LONGEST_SENTENCE = 40


def name(page):
    """Return the path of a page, for the test's name."""
    return page.relative_to(REPOSITORY).as_posix()


def prose(page):
    """Return a page without its code blocks."""
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def sentences(page):
    """Yield the sentences of paragraphs and items, each on one line, with text in backquotes as one word."""
    text = _COMMENT.sub("", _FENCED.sub("\n\n", page.read_text(encoding="utf-8")))
    text = _TAG.sub(lambda found: found[1] or "", text)  # a picture is read as its alternative text
    paragraphs = [[]]
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith(("#", "|")) or re.match(r"(?:[-*>]|\d+\.) ", line):
            paragraphs.append([])
        if not line.startswith(("#", "|")):
            paragraphs[-1].append(line)
    for lines in paragraphs:
        words = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", " ".join(lines)))
        yield from re.split(r"(?<=[.!?:])(?:\*\*)?\s+(?=[A-Z*\[(])", words)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_keeps_the_rules_of_its_words(page):
    """Headings are not questions, units follow a space but % does not, and no sentence continues after a code block."""
    assert re.findall(r"^#+ .*\?$|\*\*[^*\n]+\?\*\*", prose(page), re.MULTILINE) == []
    assert re.findall(r"\d %", prose(page)) == []
    words = re.sub(r"`[^`]*`|H100 80GB", "", prose(page))
    assert re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:s|ms|min|kB|KB|MB|GB|KiB|MiB|GiB)\b", words) == []
    assert re.findall(r"^```\n\n([a-z][^\n]*)", page.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_the_navigation_has_the_titles_of_the_pages():
    """README lists each page of docs once, and guides under their titles."""
    section = README.partition("\n## Documentation\n")[2].partition("\n## ")[0]
    guides = section.partition("**Reference**")[0]
    found = re.findall(r"\[([^\]]+)\]\((docs/[\w-]+\.md)\)", section)
    links = {path: label for label, path in found}
    pages = {path.relative_to(REPOSITORY).as_posix(): path for path in (REPOSITORY / "docs").glob("*.md")}
    assert sorted(path for _, path in found) == sorted(pages)
    titles = {name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for name, path in pages.items()}
    assert {name: links[name] for name in pages if name in guides} == {
        name: titles[name] for name in pages if name in guides
    }


def test_search_words_stand_below_the_title():
    """Search words are in a comment below the title, where the site reads them and viewers hide them."""
    for page in PAGES:
        for line, text in enumerate(page.read_text(encoding="utf-8").splitlines()):
            assert not text.startswith("<!-- search:") or (line == 2 and re.fullmatch(r"<!-- search: .+ -->", text)), (
                page
            )


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_a_guide_is_read_sentence_by_sentence(page):
    """A guide begins with a sentence, and no sentence has more than 40 words."""
    lines = page.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines[1:] if line and not line.startswith("<!--"))
    assert re.match(r"[A-Z]", first), first
    assert [one for one in sentences(page) if len(one.split()) > _LONGEST_SENTENCE] == []


@pytest.mark.parametrize("page", [page for page in GUIDES if page != TESTED], ids=name)
def test_what_never_ran_stands_once(page):
    """A page has at most one box on what never ran, with a link to the page on what was tested."""
    text = _COMMENT.sub("", page.read_text(encoding="utf-8"))
    boxes = re.findall(r"(?:^> .*\n)+", text, re.MULTILINE)
    said = [box for box in boxes if "tested.md" in box]
    assert len(said) <= 1
    assert re.findall(r"(?i)never\s+run", text.replace("".join(said), "")) == []
