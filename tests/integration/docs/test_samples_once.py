"""The page on samples that are used once, as a reader goes through it: its commands, and the output that it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.docs.pages import DOCS, REPOSITORY, commands, examples, language

pytestmark = [pytest.mark.proof, pytest.mark.processes]

BLOCKS = examples(DOCS / "samples-once.md")


def shown_after(name):
    """The command of the page that runs ``lightning-sm NAME``, and the output that it shows below."""
    number, command = next(
        (number, command)
        for number, block in enumerate(BLOCKS)
        if language(block) == "bash"
        for command in commands(block.parsed)
        if command.startswith(f"lightning-sm {name} ")
    )
    assert language(BLOCKS[number + 1]) == "text"
    return command, BLOCKS[number + 1].parsed.splitlines()


def run(command, folder):
    """Run a command of the page, which must succeed, and return the lines that it prints, with the page's paths."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout.replace(f"{folder}/", "").splitlines()


def without_job(lines):
    """Lines without the name of the job, which each run has its own of."""
    return [re.sub(r"local-\d{8}-\d{6}-[0-9a-f]{4}", "JOB", line) for line in lines]


def facts(lines):
    """The beginnings of log lines, without numbers: names of hosts are drawn, and the step depends on the machine."""
    return [re.sub(r"\d+", "0", line.partition(", ")[0]) for line in without_job(lines)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder like the clone, in which the first command has run, and what that printed."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(REPOSITORY / "app", folder / "app")
    return folder, run(shown_after("local")[0], folder)


def test_the_run_is_interrupted_and_resumes(trained):
    """The log says what the page shows: a step is saved, and the next attempt resumes from it."""
    assert set(facts(shown_after("local")[1])) <= set(facts(trained[1]))
    (saved,) = set(re.findall(r"Interrupted: step (\d+) is saved", "\n".join(trained[1])))
    assert any(re.search(rf"Resuming from \S+-step={saved}\.ckpt", line) for line in trained[1])


@pytest.mark.parametrize("name", ["verify", "replay"])
def test_the_commands_print_what_the_page_shows(trained, name):
    """The verdict and the samples are those of every run: they follow from the seed of the app's configuration."""
    command, shown = shown_after(name)
    assert without_job(run(command, trained[0])) == without_job(shown)
