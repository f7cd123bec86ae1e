"""Draw the Mermaid diagrams of the pages, for the site, which loads no script from the network (``make diagrams``).

Needs Node 22 with npm, and Chromium or Chrome. A picture is named by its diagram's text: the site's build fails for a
diagram that was changed and not drawn again.
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
# Text as SVG text: what Mermaid does by default, HTML in SVG, is empty in some browsers and viewers.
_STYLE = {
    "theme": "neutral",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "wrappingWidth": 400},
    "deterministicIds": True,
}


def main() -> int:
    """Draw what has no picture yet, and remove the pictures of diagrams that are gone."""
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
        # Chromium's sandbox does not start as root, as in a container.
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
    """Return an SVG that is as large as its text is to be, where the page has room. Mermaid's fills any page."""
    box = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', picture)
    if box is None:
        sys.exit("The renderer's SVG has no viewBox.")
    width, height = (round(float(side)) for side in box.groups())
    return picture.replace('width="100%"', f'width="{width}" height="{height}"', 1)


if __name__ == "__main__":
    sys.exit(main())
