"""Pictures of README and the docs (docs/pictures.py), and their elements in the pages (docs/page_images.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
IMAGE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+)\)")
PAIR = """\
Before.

<picture>
  <source media="(prefers-color-scheme: dark)" srcset="images/a-dark.png">
  <img src="images/a.png" alt="What it shows" width="390">
</picture>

After.
"""


@pytest.fixture
def modules(monkeypatch):
    """Import the modules from the docs folder."""
    monkeypatch.syspath_prepend(str(DOCS))
    import page_images
    import pictures

    yield page_images, pictures
    for name in ("page_images", "pictures", "terminal"):
        sys.modules.pop(name, None)


def shown(page_images):
    """Yield each page with the pictures that it shows."""
    for page in [*REPOSITORY.glob("*.md"), *DOCS.glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        files = [file for _, file in IMAGE.findall(text) if "://" not in file]
        for image in page_images.page_images(text):
            files += [image.file, *image.others.values()]
        yield page, [page.parent / file for file in files]


def test_pages_show_what_make_pictures_makes(modules):
    """The pictures that pages show, the existing files and the files that the command creates are the same."""
    page_images, pictures = modules
    named = {file for _, files in shown(page_images) for file in files if file.parent == pictures.IMAGES}
    assert named == set(pictures.IMAGES.iterdir()) == pictures.files()


def test_each_picture_element_can_be_read(modules):
    """Pages use no other HTML for pictures, which the site and the package index would not convert."""
    page_images, _ = modules
    for page, _ in shown(page_images):
        text = page.read_text(encoding="utf-8")
        assert len(page_images.page_images(text)) == len(re.findall(r"<img\b", text)), page


def test_pictures_are_small(modules):
    """Pictures are at most 200 KB, so that README loads quickly on a phone."""
    _, pictures = modules
    assert [file.name for file in pictures.files() if file.stat().st_size > 200_000] == []


def test_no_picture_names_a_folder_of_the_machine(modules):
    """Text in SVG files has no absolute paths except those of a job's host."""
    _, pictures = modules
    for file in pictures.IMAGES.glob("*.svg"):
        words = re.sub(r"<style>.*?</style>|<[^>]*>", " ", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.findall(r"(?<![\w/.:…])/(?!opt/ml|etc/|dev/)\w+/\S*", words) == [], file.name


def test_a_picture_becomes_an_image_of_markdown(modules):
    """The package index shows the file for light mode."""
    page_images, _ = modules
    assert page_images.as_markdown(PAIR) == "Before.\n\n![What it shows](images/a.png)\n\nAfter.\n"


def test_a_picture_becomes_an_image_for_each_colour_of_the_site(modules):
    """Furo shows the image for the reader's colour scheme."""
    page_images, _ = modules
    text = page_images.as_directives(PAIR)
    assert text.count(".. image:: ") == 2
    for file, colours in (("a.png", "only-light"), ("a-dark.png", "only-dark")):
        assert re.search(rf"image:: images/{file}\n +:alt: What it shows\n +:class: {colours}\n +:width: 390px", text)
    assert "only-p" not in text


def test_on_the_site_a_phone_has_its_own_files(modules):
    """Files for phones and files for pages are in containers, of which the style sheet hides one."""
    page_images, _ = modules
    phone = '  <source media="(max-width: 600px)" srcset="images/a-phone.png">\n'
    text = page_images.as_directives(PAIR.replace("<picture>\n", f"<picture>\n{phone}"))
    found = re.findall(r"container:: (\S+)\n\n +.. image:: images/(\S+)", text)
    assert sorted(found) == [("only-page", "a-dark.png"), ("only-page", "a.png"), ("only-phone", "a-phone.png")]


def test_another_picture_is_refused(modules):
    """A media query without a class on the site raises an error that names it."""
    page_images, _ = modules
    with pytest.raises(ValueError, match="prefers-contrast"):
        page_images.as_directives(PAIR.replace("prefers-color-scheme: dark", "prefers-contrast: more"))
