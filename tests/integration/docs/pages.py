"""The code blocks in the documentation's pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

REPOSITORY = Path(__file__).parents[3]
DOCS = REPOSITORY / "docs"
PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    REPOSITORY / "app" / "README.md",
    REPOSITORY / "benchmarks" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]

_FENCES = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))
# A command includes its continuation lines.
_COMMAND = re.compile(r"(?:[^\n]*\\\n)*[^\n]+")


def examples(page: Path) -> list[Example]:
    """Return a page's code blocks in order, with ``language`` and ``source`` in ``region.lexemes``."""
    return list(Sybil([_regions]).parse(page))


def language(example: Example) -> str:
    """Return the language in the block's fence, or an empty string."""
    return str(example.region.lexemes["language"])


def place(example: Example) -> str:
    """Return ``page:line`` for failure messages."""
    return f"{Path(example.path).relative_to(REPOSITORY)}:{example.line}"


def commands(source: str) -> Iterator[str]:
    """Yield the commands of a shell block, without comment lines."""
    for found in _COMMAND.finditer(source):
        if not found[0].lstrip().startswith("#"):
            yield found[0].replace("\\\n", " ")


def _regions(document: Document) -> Iterable[Region]:
    for region in _FENCES(document):
        region.parsed = region.lexemes["source"]
        region.evaluator = _not_by_itself
        yield region


def _not_by_itself(example: Example) -> None:
    raise NotImplementedError(f"{place(example)}: each test evaluates the blocks that it selects.")
