"""Channels in a file system: folders of FSx for Lustre or EFS, which the hosts mount instead of copying files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_sm.submit.job_file import Job
from lightning_sm.submit.problems import JobProblem

_FOLDER = re.compile(r"(?P<scheme>fsx|efs)://(?P<id>fs-[0-9a-f]{8,18})(?P<path>/\S*)?")
_KINDS: dict[str, Literal["FSxLustre", "EFS"]] = {"fsx": "FSxLustre", "efs": "EFS"}


@dataclass(frozen=True)
class FileSystemFolder:
    """A folder of a file system.

    Attributes:
        kind: The service's name for the kind of file system.
        file_system_id: Its id, ``fs-`` and hexadecimal digits.
        path: The folder, with a slash at its beginning; with FSx for Lustre its first part is the mount name.
    """

    kind: Literal["FSxLustre", "EFS"]
    file_system_id: str
    path: str


def file_system_folder(uri: str) -> FileSystemFolder | None:
    """Read the address of a folder, such as ``fsx://fs-0123456789abcdef0/abcdefgh/data``; None if it is another one."""
    match = _FOLDER.fullmatch(uri)
    if match is None:
        return None
    path = (match["path"] or "").rstrip("/")
    return FileSystemFolder(_KINDS[match["scheme"]], match["id"], path or "/")


def file_system_problems(job: Job) -> Iterator[JobProblem]:
    """Find channels in file systems that the service would refuse."""
    for name, channel in job.channels.items():
        key = f"channels.{name}"
        folder = file_system_folder(channel.uri)
        if folder is None:
            if channel.access != "ro":
                yield JobProblem(
                    f"{key}.access", f"{key}.access is {channel.access}, but only file systems can be written to."
                )
            continue
        if folder.kind == "FSxLustre" and folder.path == "/":
            yield JobProblem(
                f"{key}.uri",
                f"{key}.uri is {channel.uri!r}, which lacks the mount name of the file system "
                "(aws fsx describe-file-systems shows it): fsx://<id>/<mount name>/folder.",
            )
        if job.vpc is None:
            yield JobProblem(
                f"{key}.uri",
                f"{key}.uri is {channel.uri!r}, but vpc is missing; hosts reach a file system only in its network. "
                "Set vpc.",
                also=("vpc",),
            )
        if channel.groups is not None:
            yield JobProblem(
                f"{key}.groups", f"{key}.groups is set, but all hosts mount a file system. Remove the key."
            )
        if channel.mode != "File" or channel.distribution != "FullyReplicated":
            yield JobProblem(
                key,
                f"{key} is {channel.mode} and {channel.distribution}; a file system is mounted, and has neither mode "
                "nor distribution. Remove the keys.",
            )
