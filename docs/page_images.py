"""Pictures of pages that exist for light and dark viewers, and for phones, as GitHub shows them: ``<picture>``.

Sphinx and the package index know no such elements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PICTURE = re.compile(r"^<picture>\n(.*?)^</picture>\n", re.MULTILINE | re.DOTALL)
_SOURCE = re.compile(r'^  <source media="(.+)" srcset="(.+)">$', re.MULTILINE)
_IMAGE = re.compile(r'^  <img src="(\S+)" alt="([^"]+)"(?: width="(\d+)")?>$', re.MULTILINE)
# The classes by which the site shows a file: of the screen (site.css) and of the colours (furo).
_MEDIA = {
    "": ("only-page", "only-light"),
    "(prefers-color-scheme: dark)": ("only-page", "only-dark"),
    "(max-width: 600px)": ("only-phone", "only-light"),
    "(max-width: 600px) and (prefers-color-scheme: dark)": ("only-phone", "only-dark"),
}


@dataclass(frozen=True)
class PageImage:
    """A picture of a page.

    Attributes:
        file: The file for whoever gets no other one, as the page names it.
        text: What the picture shows.
        width: In CSS pixels; None: as wide as the page.
        others: Files by the media for which they are.
    """

    file: str
    text: str
    width: int | None
    others: dict[str, str]


def page_images(page: str) -> list[PageImage]:
    """Return the pictures of a page.

    Raises:
        ValueError: A picture is not written as all others are.
    """
    return [_read(found) for found in _PICTURE.finditer(page)]


def as_markdown(page: str) -> str:
    """Return a page whose pictures are images of Markdown, each with one file."""
    return _PICTURE.sub(lambda found: f"![{_read(found).text}]({_read(found).file})\n", page)


def as_directives(page: str) -> str:
    """Return a page whose pictures are directives of Sphinx, one for each file, of which the theme shows one."""
    return _PICTURE.sub(lambda found: _directives(_read(found)), page)


def _read(found: re.Match[str]) -> PageImage:
    image, others = _IMAGE.search(found[1]), dict(_SOURCE.findall(found[1]))
    if image is None or len(others) != found[1].count("<source") or not others.keys() <= _MEDIA.keys():
        raise ValueError(f"A picture is not written as docs/page_images.py reads it:\n{found[0]}")
    return PageImage(image[1], image[2], int(image[3]) if image[3] else None, others)


def _directives(image: PageImage) -> str:
    files = {"": image.file} | image.others
    media = [_MEDIA[one] for one in files]
    is_on_all_screens = not any(screen == "only-phone" for screen, _ in media)
    has_all_colours = not any(colours == "only-dark" for _, colours in media)
    lines = []
    for (screen, colours), file in zip(media, files.values(), strict=True):
        container = "on-all-screens" if is_on_all_screens else screen
        lines += ["", f".. container:: {container}", "", f"   .. image:: {file}"]
        lines += [f"      :alt: {image.text}", *([] if has_all_colours else [f"      :class: {colours}"])]
        lines += [] if image.width is None else [f"      :width: {image.width}px"]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])
