"""The Mermaid diagrams of pages, and their pictures, for readers whose viewer draws no diagrams."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "_static" / "diagrams"
_FENCED = re.compile(r"^```mermaid\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def picture(source: str) -> Path:
    """Return where the picture of a diagram is. A changed diagram has none until ``make diagrams`` has drawn it."""
    return PICTURES / f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def diagrams(text: str) -> list[str]:
    """Return the diagrams of a page."""
    return _FENCED.findall(text)


def with_pictures(text: str, address: Callable[[Path], str]) -> str:
    """Return a page with pictures in place of its diagrams.

    Args:
        text: The page.
        address: Gives the address of a picture by its file.
    """
    return _FENCED.sub(lambda found: f"![Diagram]({address(picture(found[1]))})\n", text)
