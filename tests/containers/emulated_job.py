"""A job with instance groups in containers, run by ``lightning-sm submit --local``, and the files of its hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.containers.local_mode import ROOT

# Only a hang reaches this limit: see local_mode.
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class EmulatedJob:
    """A finished job.

    Attributes:
        returncode: Exit code of the command.
        output: What the command printed, including the hosts' output.
        folder: Folder of the job.
    """

    returncode: int
    output: str
    folder: Path

    @property
    def has_succeeded(self) -> bool:
        """Whether every host exited with 0."""
        return self.returncode == 0

    @property
    def model(self) -> dict[str, bytes]:
        """Content of the files in the hosts' model folders, by path."""
        return self._files("model")

    @property
    def artifacts(self) -> dict[str, bytes]:
        """Content of the files in the hosts' output folders, by path, such as ``data/algo-1/rank-0.json``."""
        return self._files("output")

    def hosts(self, *groups: str) -> list[str]:
        """Return the hosts of some groups, in the order of resourceconfig.json."""
        config = json.loads((self.folder / "algo-1" / "input" / "config" / "resourceconfig.json").read_text())
        by_group = {group["instance_group_name"]: group["hosts"] for group in config["instance_groups"]}
        return [host for group in groups for host in by_group[group]]

    def json(self, name: str) -> Any:
        """Return the value in a JSON file of the output."""
        return json.loads(self.artifacts[name])

    def _files(self, part: str) -> dict[str, bytes]:
        found = {}
        for root in self.folder.glob(f"algo-*/{part}"):
            found |= {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        return found

    def __str__(self) -> str:
        return f"exit code {self.returncode}\n{self.output}"


def submit(folder: Path, job: Mapping[str, Any]) -> EmulatedJob:
    """Run a job until it ends.

    Args:
        folder: Empty folder for everything that the job leaves behind.
        job: The content of the job file.
    """
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(dict(job), sort_keys=False))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS", "SAGEMAKER"))}
    env |= {"AWS_EC2_METADATA_DISABLED": "true", "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_sm", "submit", str(folder / "job.yaml"), "--local"]
    ended = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_TIMEOUT_S, check=False
    )
    (job_dir,) = folder.glob("lightning-sm-*/local-*")
    return EmulatedJob(ended.returncode, ended.stdout, job_dir)
