"""Prepare a checkout for the package index: add the project's URLs, and make README's links absolute.

    python docs/release.py https://github.com/OWNER/NAME v0.1.0

The release workflow runs this before it builds. In the repository itself, links stay relative and no file contains the
repository's URL, so that a fork has nothing to change.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mermaid
import page_images

_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
_TABLE_AFTER_URLS = "[project.optional-dependencies]\n"


def prepare(repository: Path, url: str, tag: str) -> None:
    """Write the project's URLs into pyproject.toml, and absolute links into README.

    Args:
        repository: Folder of the checkout.
        url: URL of the repository, on a host that uses GitHub's paths.
        tag: Tag of the release: ``v`` and the version.

    Raises:
        ValueError: The tag does not match the package's version, or README links to a file that does not exist.
    """
    version = _VERSION.search((repository / "lightning_sm" / "_version.py").read_text(encoding="utf-8"))
    if version is None or tag != f"v{version[1]}":
        raise ValueError(f"The tag is {tag}, but the package's version is {version and version[1]}.")
    readme = repository / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), repository, url, tag), encoding="utf-8")
    project = repository / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(text.replace(_TABLE_AFTER_URLS, f"{_urls(url, tag)}\n{_TABLE_AFTER_URLS}", 1), encoding="utf-8")


def absolute(text: str, repository: Path, url: str, tag: str) -> str:
    """Return README with absolute links and pictures, and with pictures of its diagrams.

    Args:
        text: Text of README.
        repository: Folder of the checkout, with the files that README links to.
        url: URL of the repository, as for `prepare`.
        tag: Tag of the release, as for `prepare`.

    Raises:
        ValueError: README links to a file that does not exist.
    """

    def address(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target:
            return match[0]
        path, _, place = target.partition("#")
        if path and not (repository / path).exists():
            raise ValueError(f"README.md links to {path}, which does not exist.")
        kind = "raw" if label.startswith("!") else "blob"
        return f"{label}({url}/{kind}/{tag}/{path or 'README.md'}{f'#{place}' if place else ''})"

    with_pictures = mermaid.with_pictures(
        page_images.as_markdown(text), lambda file: file.relative_to(mermaid.DOCS.parent).as_posix()
    )
    # Code blocks may contain text that looks like a link: leave them unchanged.
    parts = re.split(r"(^```.*?^```$)", with_pictures, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(address, part) for part in parts)


def _urls(url: str, tag: str) -> str:
    pages = {
        "Repository": url,
        "Documentation": f"{url}/blob/{tag}/README.md#documentation",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    return "[project.urls]\n" + "".join(f'{name} = "{page}"\n' for name, page in pages.items())


if __name__ == "__main__":
    prepare(Path(__file__).parents[1], *sys.argv[1:])
