"""The tutorial's files, and those of its commands that run on a laptop."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.docs.pages import DOCS, commands, examples, language

pytestmark = [pytest.mark.proof, pytest.mark.processes]

BLOCKS = examples(DOCS / "tutorial.md")
COMMANDS = [command for one in BLOCKS if language(one) == "bash" for command in commands(one.parsed)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The reader's folder, with every file that a block names in its first line."""
    folder = tmp_path_factory.mktemp("tutorial")
    for block in BLOCKS:
        comment = block.parsed.partition("\n")[0]
        if comment.startswith("# ") and language(block) in {"python", "yaml"}:
            file = folder / comment.removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(block.parsed, encoding="utf-8")
    return folder


def run(command, folder, **variables):
    """Run a command of the tutorial and return its stdout, then stdout and stderr together. It must succeed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout, done.stdout + done.stderr


def the(*words):
    """Find the tutorial's only command with these words."""
    found = [command for command in COMMANDS if all(word in command for word in words)]
    assert len(found) == 1, f"{words}: {found}"
    return found[0]


def test_the_script_runs_on_the_laptop(folder):
    """The script trains with nothing but the tutorial's files."""
    assert "`max_epochs=2` reached" in run(the("python src/train.py"), folder)[1]


def test_an_interrupted_cluster_resumes(folder):
    """The second attempt resumes from the step at which the first was interrupted, and finishes."""
    output = run(the("lightning-sm local", "--fault"), folder)[1]
    # Ranks agree on a step to stop at once a second, and the remaining six steps may take less than that.
    (step,) = {int(step) for step in re.findall(r"Interrupted: step (\d+) is saved", output)}
    assert 10 <= step <= 16
    assert re.search(rf"Resuming from \S+step={step}\.ckpt", output)
    assert "epoch=2/2 step=16" in output


def test_a_data_host_builds_the_batches(folder):
    """With a data host, training finishes, the log shows the wait for data, and the data host exits with 0."""
    output = run(the("lightning-sm local", "--group data=1"), folder)[1]
    assert re.search(r"epoch=8/8 step=64 .* data_wait=[0-9.]+%", output)
    assert "too few for a verdict" not in output
    assert re.search(r"^ *algo-\d +data +data +0 ", output, re.MULTILINE)


def test_the_job_file_makes_a_request(folder):
    """The dry run prints the request for a heterogeneous job."""
    request = json.loads(run(the("submit", "--dry-run"), folder, AWS_DEFAULT_REGION="eu-west-1")[0])
    groups = {group["InstanceGroupName"] for group in request["ResourceConfig"]["InstanceGroups"]}
    assert groups == {"trainer", "data"}
    assert request["HyperParameters"]["trainer.max_epochs"] == "20"
