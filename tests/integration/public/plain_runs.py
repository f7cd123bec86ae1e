"""A process that imports torch and Lightning once, which takes seconds, and runs each script in a fork of itself.

It reads one line of JSON per run, ``{"script": ..., "args": [...], "folder": ...}``, and answers with the exit code.
The script runs in the folder, and its output goes to log.txt there.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lightning_sm._linux import kill_with_parent
from lightning_sm.data.ipc.processes import run_and_exit

# Includes the imports, which the first run waits for.
_TIMEOUT_S = 120


class PlainRuns:
    """Runs scripts off SageMaker, one at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, script: Path, args: Sequence[str], folder: Path) -> tuple[int, str]:
        """Run a script and wait for it to exit.

        Args:
            script: The script.
            args: Its arguments.
            folder: An existing folder to run it in.

        Returns:
            Its exit code and output.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"script": str(script), "args": list(args), "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        answered = select.select([self._process.stdout], [], [], _TIMEOUT_S)[0]
        assert answered, f"{script.name} did not end within {_TIMEOUT_S} s"
        code = int(self._process.stdout.readline())
        return code, (folder / "log.txt").read_text(errors="replace")


@contextmanager
def started(repository: Path) -> Iterator[PlainRuns]:
    """Start the process, and stop it at the end of the context."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SM_", "LIGHTNING_SM_"))}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.public.plain_runs"],
        cwd=repository,
        env={**env, "SAGEMAKER_BASE_DIR": str(repository / "no such folder"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield PlainRuns(process)
            process.communicate(timeout=10)  # closes stdin, which makes the process exit
        finally:
            process.kill()


def _run(script: str, args: list[str], folder: str) -> None:
    kill_with_parent()
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [script, *args]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Run the script that each line of stdin describes."""
    import pytorch_lightning.cli  # noqa: F401
    import torchmetrics  # noqa: F401
    import torchvision  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            run_and_exit(partial(_run, **json.loads(line)))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
