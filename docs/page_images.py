"""The ``<picture>`` elements of pages, with which GitHub chooses an image for light or dark mode and for phones.

Sphinx and the package index do not support this element, so their builds replace it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PICTURE = re.compile(r"^<picture>\n(.*?)^</picture>\n", re.MULTILINE | re.DOTALL)
_SOURCE = re.compile(r'^  <source media="(.+)" srcset="(.+)">$', re.MULTILINE)
_IMAGE = re.compile(r'^  <img src="(\S+)" alt="([^"]+)"(?: width="(\d+)")?>$', re.MULTILINE)
# CSS classes with which the site chooses a file, by screen (site.css) and by colours (furo).
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
        file: The default file, as the page names it.
        text: What the picture shows.
        width: Width in CSS pixels; None for the width of the page.
        others: Other files, by media query.
    """

    file: str
    text: str
    width: int | None
    others: dict[str, str]


def page_images(page: str) -> list[PageImage]:
    """Return the pictures of a page.

    Raises:
        ValueError: A ``<picture>`` does not have the expected format.
    """
    return [_read(match) for match in _PICTURE.finditer(page)]


def as_markdown(page: str) -> str:
    """Return a page with each picture replaced by a Markdown image of its default file."""
    return _PICTURE.sub(lambda match: f"![{_read(match).text}]({_read(match).file})\n", page)


def as_directives(page: str) -> str:
    """Return a page with each picture replaced by Sphinx directives, one per file; the theme shows one of them."""
    return _PICTURE.sub(lambda match: _directives(_read(match)), page)


def _read(match: re.Match[str]) -> PageImage:
    image, others = _IMAGE.search(match[1]), dict(_SOURCE.findall(match[1]))
    if image is None or len(others) != match[1].count("<source") or not others.keys() <= _MEDIA.keys():
        raise ValueError(f"A <picture> does not have the format that docs/page_images.py expects:\n{match[0]}")
    return PageImage(image[1], image[2], int(image[3]) if image[3] else None, others)


def _directives(image: PageImage) -> str:
    files = {"": image.file} | image.others
    media = [_MEDIA[query] for query in files]
    is_on_all_screens = not any(screen == "only-phone" for screen, _ in media)
    has_all_colours = not any(colours == "only-dark" for _, colours in media)
    lines = []
    for (screen, colours), file in zip(media, files.values(), strict=True):
        container = "on-all-screens" if is_on_all_screens else screen
        lines += ["", f".. container:: {container}", "", f"   .. image:: {file}"]
        lines += [f"      :alt: {image.text}", *([] if has_all_colours else [f"      :class: {colours}"])]
        lines += [] if image.width is None else [f"      :width: {image.width}px"]
    return "\n".join(["```{eval-rst}", *lines, "```", ""])
