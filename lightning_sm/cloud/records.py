"""The records of a job's hosts, copied from the job's checkpoints and output in S3."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from lightning_sm._log import command_logger
from lightning_sm._text import count
from lightning_sm.cloud.find import ENDED
from lightning_sm.errors import AWSError
from lightning_sm.record.events import FOLDER, file_attempt
from lightning_sm.record.prices import Prices
from lightning_sm.record.runs import archived_files

_LOG = command_logger(__name__)

# Contains the output of all hosts, unless the job asks for plain files.
_ARCHIVE = "output.tar.gz"

# Writes a report. Its arguments are the folders with records, the name of the job, the report page, and prices.
ReportWriter: TypeAlias = Callable[[Sequence[Path], str, Path, Prices], None]


def fetch_records(client: Any, description: Mapping[str, Any], folder: Path) -> int:
    """Copy the records of all hosts of a training job.

    A job with a checkpoint folder keeps its record in that folder, which SageMaker uploads while the job runs. Other
    jobs write their records to their output, which is uploaded when the job ends.

    Args:
        client: boto3's S3 client.
        description: A response from DescribeTrainingJob.
        folder: Receives the records. If other jobs share the checkpoints, it also receives their records.

    Returns:
        The number of files copied.

    Raises:
        AWSError: There is no record, or an archive is damaged.
        ClientError: S3 rejects a request.
    """
    checkpoints = description.get("CheckpointConfig", {}).get("S3Uri")
    output = f"{description['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{description['TrainingJobName']}/output/"
    sources = [f"{checkpoints.rstrip('/')}/", output] if checkpoints else [output]
    number = 0
    for number, (path, content) in enumerate(_record_files(client, sources), 1):
        copy = folder / str(number) / path.parent.name / path.name  # not the key, which may be any path
        copy.parent.mkdir(parents=True)
        copy.write_bytes(content)
    if not number:
        raise AWSError(_no_record(description, sources))
    return number


def write_report_of(
    client: Any,
    description: Mapping[str, Any],
    write: ReportWriter,
    page: Path,
    prices: Prices,
    *,
    folder: Path | None = None,
) -> None:
    """Write the report of a training job from the records of all its hosts.

    Args:
        client: boto3's S3 client.
        description: A response from DescribeTrainingJob.
        write: Writes a report.
        page: The HTML file to write.
        prices: Prices for computing the cost of the job.
        folder: Where to keep the records. If None, they are deleted.

    Raises:
        AWSError: There is no record, or an archive is damaged.
        ClientError: S3 rejects a request.
        JobConfigError: The record cannot be read.
        OutputDirectoryError: The page cannot be written.
    """
    with contextlib.ExitStack() as until_written:
        folder = folder or Path(until_written.enter_context(tempfile.TemporaryDirectory(prefix="lightning_sm-")))
        number = fetch_records(client, description, folder)
        _LOG.info("Fetched %s from the record of %s", count(number, "file"), description["TrainingJobName"])
        write([folder], description["TrainingJobName"], page, prices)


def _record_files(client: Any, sources: Sequence[str]) -> Iterator[tuple[PurePosixPath, bytes]]:
    for source in sources:
        bucket, _, prefix = source.removeprefix("s3://").partition("/")
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        for key in keys:
            path = PurePosixPath(key)
            if FOLDER in path.parts and file_attempt(path):
                yield path, client.get_object(Bucket=bucket, Key=key)["Body"].read()
        if f"{prefix}{_ARCHIVE}" in keys:
            yield from _archived_files(client, bucket, f"{prefix}{_ARCHIVE}")


def _archived_files(client: Any, bucket: str, key: str) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Stream an archive from S3, and yield its records."""
    body = client.get_object(Bucket=bucket, Key=key)["Body"]
    try:
        with tarfile.open(fileobj=body, mode="r|gz") as archive:
            yield from archived_files(archive)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise AWSError(f"s3://{bucket}/{key} cannot be read as an archive: {error}.") from error


def _no_record(description: Mapping[str, Any], sources: Sequence[str]) -> str:
    name, status = description["TrainingJobName"], description["TrainingJobStatus"]
    if status not in ENDED:
        why = f"The job is {status}: it uploads checkpoints, if it has any, while it runs, and its output when it ends."
    else:
        why = "Only scripts started by lightning-sm train write a record."
    return f"{name} has no record in {' or '.join(sources)}. {why}"
