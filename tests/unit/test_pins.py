"""Actions and images with the rights of a release or a build are pinned, so that nobody else can replace them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_named_by_commit(workflow):
    """Actions are pinned to commits, since tags can move, with the version as comment; local workflows are exempt."""
    used = re.findall(r"^ *(?:- )?uses: (.+)$", workflow.read_text(encoding="utf-8"), re.MULTILINE)
    assert used
    others = [line for line in used if not line.startswith("./")]
    assert [line for line in others if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line)] == []


def test_the_base_of_the_image_is_named_by_digest():
    """The default base image has a digest, which covers all platforms."""
    text = (REPOSITORY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^ARG BASE_IMAGE=[\w/.-]+:[\d.]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
