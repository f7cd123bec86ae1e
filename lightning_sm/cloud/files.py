"""The files that a job leaves in S3: where they are, and a copy of one of them on this machine."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from lightning_sm._table import draw_table
from lightning_sm.cloud.find import ENDED
from lightning_sm.errors import AWSError

# The output of all hosts, unless the job asks for plain files.
ARCHIVE = "output.tar.gz"
_ARCHIVES = (ARCHIVE, "model.tar.gz")


def places(description: Mapping[str, Any]) -> dict[str, str]:
    """Return the S3 addresses of a job's files, by kind.

    Args:
        description: An answer of DescribeTrainingJob.
    """
    tensorboard = description.get("TensorBoardOutputConfig", {}).get("S3OutputPath")
    found = {
        "model": description.get("ModelArtifacts", {}).get("S3ModelArtifacts"),
        "output": f"{output_folder(description)}{ARCHIVE}",
        "checkpoints": description.get("CheckpointConfig", {}).get("S3Uri"),
        "TensorBoard": tensorboard,
    }
    if description.get("OutputDataConfig", {}).get("CompressionType") == "NONE":
        found["output"] = output_folder(description)
    return {name: uri for name, uri in found.items() if uri}


def shown_places(description: Mapping[str, Any]) -> str:
    """Show the S3 addresses; for a running job, say that it has yet to upload its files."""
    text = draw_table(places(description).items())
    if description["TrainingJobStatus"] in ENDED:
        return text
    return f"{text}\nThe job is {description['TrainingJobStatus']}: it uploads model and output when it ends."


def fetch(client: Any, description: Mapping[str, Any], name: str, target: Path) -> str:
    """Copy one file of a job's output or model to this machine, without the rest.

    Args:
        client: boto3's client of S3.
        description: An answer of DescribeTrainingJob.
        name: The end of the file's path, such as ``report.html`` or ``algo-1/report.html``.
        target: The file to write; it must not exist.

    Returns:
        The file's path in the output.

    Raises:
        AWSError: There is no such file, there are several, or ``target`` exists.
        ClientError: S3 rejects a request.
    """
    if target.exists():
        raise AWSError(f"{target} exists. Name another file with --to.")
    bucket, folder = split(output_folder(description))
    keys = keys_below(client, bucket, folder)
    plain = [key for key in keys if _matches(key.removeprefix(folder), name)]
    _check_one(plain, name)
    # Write to a folder beside the target first, so that a file with the target's name is always complete.
    with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}-") as scratch:
        part = Path(scratch, "part")
        if plain:
            with part.open("wb") as file:
                shutil.copyfileobj(client.get_object(Bucket=bucket, Key=plain[0])["Body"], file)
            part.replace(target)
            return str(plain[0].removeprefix(folder))
        for archive in _ARCHIVES:
            if f"{folder}{archive}" not in keys:
                continue
            body = client.get_object(Bucket=bucket, Key=f"{folder}{archive}")["Body"]
            found = _extract(body, name, part)
            if found is not None:
                part.replace(target)
                return f"{archive}: {found}"
    what = ", ".join(key.removeprefix(folder) for key in keys) or "nothing"
    raise AWSError(f"There is no file {name} in s3://{bucket}/{folder}, which contains {what}.")


def _extract(body: IO[bytes], name: str, target: Path) -> str | None:
    """Read an archive as it arrives, and write its only member whose path ends with ``name``."""
    found: list[str] = []
    with tarfile.open(fileobj=body, mode="r|gz") as archive:
        for member in archive:
            path = str(PurePosixPath(member.name))
            if not member.isfile() or not _matches(path, name):
                continue
            found.append(path)
            content = archive.extractfile(member)
            if content is not None and (len(found) == 1 or path == name):
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
            if path == name:
                return path
    _check_one(found, name)
    return found[0] if found else None


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith(f"/{name}")


def _check_one(paths: list[str], name: str) -> None:
    if len(paths) > 1:
        raise AWSError(f"{name} is the name of {len(paths)} files; name one with its folder: {', '.join(paths)}.")


def output_folder(description: Mapping[str, Any]) -> str:
    """Return the address of the folder with a job's output and model, with a slash at the end.

    Args:
        description: An answer of DescribeTrainingJob.
    """
    path = description["OutputDataConfig"]["S3OutputPath"].rstrip("/")
    return f"{path}/{description['TrainingJobName']}/output/"


def keys_below(client: Any, bucket: str, prefix: str) -> list[str]:
    """List the keys of all objects whose keys start with a prefix.

    Raises:
        ClientError: S3 rejects a request.
    """
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def split(uri: str) -> tuple[str, str]:
    """Split an address in S3 into bucket and key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
