"""Draw the Mermaid diagrams of the pages as SVGs (``make diagrams``), because the site loads no scripts.

This needs Node 22 with npm, and Chromium or Chrome. Each picture is named by a hash of its diagram's text, so the site
fails to build if a diagram was changed but not drawn again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mermaid

_REPOSITORY = mermaid.DOCS.parent
_RENDERER = "@mermaid-js/mermaid-cli@12"
_TIMEOUT_S = 300
# Draw text as SVG text: by default Mermaid embeds HTML in the SVG, which some browsers and viewers show as empty.
_STYLE = {
    "theme": "neutral",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "wrappingWidth": 400},
    "deterministicIds": True,
}


def main() -> int:
    """Draw all diagrams without a picture, and delete the pictures of removed diagrams."""
    pages = [*_REPOSITORY.glob("*.md"), *mermaid.DOCS.rglob("*.md")]
    sources = {
        mermaid.picture(source): source
        for page in pages
        for source in mermaid.diagrams(page.read_text(encoding="utf-8"))
    }
    for file in mermaid.PICTURES.glob("*.svg"):
        if file not in sources:
            file.unlink()
    browser = os.environ.get("PUPPETEER_EXECUTABLE_PATH") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("No browser found. Install Chromium, or name one in PUPPETEER_EXECUTABLE_PATH.")
    mermaid.PICTURES.mkdir(exist_ok=True)
    for file, source in sources.items():
        if not file.exists():
            _draw(source, file, browser)
    return 0


def _draw(source: str, file: Path, browser: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        diagram, style, settings = (Path(folder) / name for name in ("diagram.mmd", "style.json", "browser.json"))
        diagram.write_text(source, encoding="utf-8")
        style.write_text(json.dumps(_STYLE), encoding="utf-8")
        # Chromium's sandbox cannot start as root, for example in a container.
        settings.write_text(json.dumps({"executablePath": browser, "args": ["--no-sandbox"]}), encoding="utf-8")
        command = [
            "npx",
            "--yes",
            "--loglevel",
            "error",
            "--package",
            _RENDERER,
            "mmdc",
            "--quiet",
            "--input",
            str(diagram),
        ]
        command += ["--output", str(file), "--configFile", str(style), "--puppeteerConfigFile", str(settings)]
        subprocess.run(command, check=True, timeout=_TIMEOUT_S, env={**os.environ, "PUPPETEER_SKIP_DOWNLOAD": "1"})
    file.write_text(_with_size(file.read_text(encoding="utf-8")), encoding="utf-8")


def _with_size(picture: str) -> str:
    """Give an SVG its natural size; Mermaid's SVGs fill the page, however wide it is."""
    box = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', picture)
    if box is None:
        sys.exit("The renderer's SVG has no viewBox.")
    width, height = (round(float(side)) for side in box.groups())
    return picture.replace('width="100%"', f'width="{width}" height="{height}"', 1)


if __name__ == "__main__":
    sys.exit(main())
