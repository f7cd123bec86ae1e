"""Jobs in the local mode of SDK v3, judged by the exit codes of all containers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.containers.local_mode import OFFLINE, ROLE, LocalJob, run_job, sdk_variables

_TRAIN = Path(__file__).parent / "scripts" / "model_trainer.py"


def train(
    python: Path,
    folder: Path,
    arguments: Mapping[str, Any],
    inputs: Mapping[str, Path] | None = None,
    *,
    num_hosts: int = 1,
    timeout_s: float = 180.0,
) -> LocalJob:
    """Run ``ModelTrainer.train`` until it ends, without network, and remove the containers.

    Args:
        python: An interpreter with version 3 of the SDK.
        folder: Empty folder for everything that the job leaves behind.
        arguments: Arguments of ``ModelTrainer``, as JSON, with the arguments of ``SourceCode`` and ``Torchrun`` as
            ``source_code`` and ``distributed``.
        inputs: Folder of each channel, by name.
        num_hosts: Number of containers.
        timeout_s: Time limit of the job, after which its containers are killed.
    """
    # Compose names the project after the folder (train/local/local_container.py sets no name), and allows only letters
    # and digits in it.
    root = folder / f"lightningsm{secrets.token_hex(8)}"
    root.mkdir(parents=True)
    settings = {
        "arguments": {"role": ROLE, **arguments},
        "inputs": {name: str(path) for name, path in (inputs or {}).items()},
        "num_hosts": num_hosts,
        "root": str(root),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [*OFFLINE, str(python), str(_TRAIN), str(folder / "settings.json")]
    label = f"com.docker.compose.project={root.name}"
    return run_job(command, sdk_variables(folder), label, root / "compressed_artifacts", timeout_s)
