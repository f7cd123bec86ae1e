"""The Mermaid diagrams of pages, and pictures of them for viewers that cannot draw Mermaid."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
PICTURES = DOCS / "_static" / "diagrams"
_FENCED = re.compile(r"^```mermaid\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def picture(source: str) -> Path:
    """Return the path of a diagram's picture, which does not exist until ``make diagrams`` has drawn it."""
    return PICTURES / f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def diagrams(text: str) -> list[str]:
    """Return the diagrams of a page."""
    return _FENCED.findall(text)


def with_pictures(text: str, address: Callable[[Path], str]) -> str:
    """Return a page with pictures in place of its diagrams.

    Args:
        text: Text of the page.
        address: Function that returns the address of a picture file.
    """
    return _FENCED.sub(lambda match: f"![Diagram]({address(picture(match[1]))})\n", text)
