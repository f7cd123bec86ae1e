"""Make the pictures of README and the pages from emulated jobs (``make pictures``).

Each report becomes PNGs for pages and phones, light and dark; each terminal session becomes one SVG. This needs Linux
and Chromium or Chrome, and takes ten minutes. Steps and transforms of the jobs sleep for fixed times
(``slow_data.py``), so a busy machine changes little.
"""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import terminal
from PIL import Image

_REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(_REPOSITORY))

from tests.fakes.job_folder import resource_config, write_job  # noqa: E402 - found by the line above
from tests.integration.report.browser import Page, browser  # noqa: E402

IMAGES = _REPOSITORY / "docs" / "images"
_COMMAND = [sys.executable, "-m", "lightning_sm"]
_TIMEOUT_S = 900
_MAX_BYTES = 200_000
_MARGIN_PX, _SCALE, _NUM_COLOURS = 12, 2, 255

# Example prices in dollars per hour, close to those in us-east-1; they are not looked up.
_TRAINER, _DATA = "ml.g5.xlarge", "ml.c5.2xlarge"
_PRICES = [f"--price={_TRAINER}=1.408", f"--price={_DATA}=0.408"]
# One worker per vCPU of a data host.
_SLOW_DATA = ["docs/slow_data.py", "fit", "--data_service.workers=8"]
_STEPS = 600

# From this check on, doctor's results describe the machine that makes the pictures, not the job.
_FIRST_OF_MACHINE = "EFA and NCCL"

_DIGITS_OPTIONS = ["--group", "trainer=2", "--group", "data=1", "--fault", "interrupt@step=40"]
_DIGITS = ["app/train.py", "fit", "--config", "app/configs/digits.yaml"]
# The lines that a reader with half a minute needs. The picture omits all others.
_SHOWN = [
    r"^Attempt \d",
    r"^algo-\d \| +(host +group|-{7} |algo-\d)",
    r"epoch=\d+/\d+ step=\d+ validation=",
    r"^Fault ",
    r"\| Interrupted: step \d+ is saved",
    r"Resuming from",
    r"\| lightning-sm: \S+: \w+ after ",
    r"^attempt +host|^-+  -+  |^ +\d+  algo-",
]


@dataclass(frozen=True)
class ReportPicture:
    """A picture of the beginning of a report.

    Attributes:
        widths: Widths of the page in CSS pixels, by suffix of the file name.
        end: CSS selector of the element before which the picture ends.
    """

    widths: Mapping[str, int]
    end: str

    def height(self, page: Page) -> float:
        """Return the height of the picture on the current page, in pixels.

        Raises:
            LookupError: The page does not have the element.
        """
        top = page.evaluate(f"document.querySelector('{self.end}')?.getBoundingClientRect().top")
        if top is None:
            raise LookupError(f"The report has no element {self.end!r}. Name the element after the picture.")
        return float(top) - _MARGIN_PX

    def take(self, page: Page, report: Path, name: str) -> None:
        """Write the pictures of a report in all widths, light and dark."""
        for (suffix, width), is_dark in product(self.widths.items(), (False, True)):
            file = _png(name, suffix, is_dark=is_dark)
            page.open(report, width=width, is_dark=is_dark)
            clip = {"x": 0, "y": 0, "width": width, "height": self.height(page), "scale": _SCALE}
            taken = page.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
            image = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
            image.quantize(_NUM_COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
            if file.stat().st_size > _MAX_BYTES:
                sys.exit(f"{file.name} has {file.stat().st_size:,} bytes, more than {_MAX_BYTES:,}: show less of it.")


_PAGE, _PHONE = {"": 900}, {"-phone": 390}
REPORTS = {
    "report": ReportPicture(_PAGE | _PHONE, "h2:nth-of-type(3)"),
    "report-side-by-side": ReportPicture({"": 960} | _PHONE, ".columns ~ .columns h3:nth-of-type(2)"),
    "report-interrupted": ReportPicture({"": 640}, "h2:nth-of-type(2)"),
}
_TERMINALS = ["terminal", "terminal-phone", "doctor"]


def files() -> set[Path]:
    """Return the paths of all pictures."""
    made = {_svg(name) for name in _TERMINALS}
    for name, picture in REPORTS.items():
        made |= {_png(name, suffix, is_dark=is_dark) for suffix in picture.widths for is_dark in (False, True)}
    return made


def main() -> int:
    """Run the jobs, write their pictures, and delete all other files of the folder."""
    for file in set(IMAGES.iterdir()) - files():
        file.unlink()
    doctor()
    interrupted_digits()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, two, interrupted = (folder / run for run in ("one", "two", "interrupted"))
        train(one, 1)
        train(two, 2)
        train(interrupted, 1, f"--fault=interrupt@step={_STEPS // 4}", steps=_STEPS // 2)
        shown = {
            "report": {one: "digits"},
            "report-side-by-side": {one: "1 data host", two: "2 data hosts"},
            "report-interrupted": {interrupted: "digits"},
        }
        (folder / "browser").mkdir()
        with browser(folder / "browser") as page:
            for picture, runs in shown.items():
                report = folder / f"{picture}.html"
                names = [f"--name={run}" for run in runs.values()]
                _output([*_COMMAND, "report", *map(str, runs), *names, "-o", str(report), *_PRICES])
                REPORTS[picture].take(page, report, picture)
    return 0


def train(folder: Path, data_hosts: int, *options: str, steps: int = _STEPS) -> None:
    """Run a job whose transforms are slow.

    Args:
        folder: Folder in which the run gets its folder.
        data_hosts: Number of data hosts.
        options: Further options of the emulator.
        steps: Number of training steps.
    """
    command = ["local", "--base-dir", str(folder), "--group", f"trainer=1:{_TRAINER}"]
    command += ["--group", f"data={data_hosts}:{_DATA}"]
    for _ in _lines([*command, *options, "--", *_SLOW_DATA, f"--trainer.max_steps={steps}"]):
        pass


def doctor() -> None:
    """Write the picture of ``lightning-sm doctor`` on a host of a job that would fail."""
    with tempfile.TemporaryDirectory() as name:
        groups = {"trainer": ["algo-1", "algo-2"], "data": ["algo-3"]}
        resources = resource_config(groups, "algo-1", instance_types={"trainer": _TRAINER, "data": _DATA})
        write_job(Path(name), resources, hyperparameters={})
        job = {"TRAINING_JOB_NAME": "digits", "LIGHTNING_SM_MAX_RESTART": "3"}
        # Run doctor as process 1, as in a container.
        command = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", *_COMMAND, "doctor"]
        shown = _output(command, {1}, COLUMNS="118", SAGEMAKER_BASE_DIR=name, **job)
    end = next(number for number, line in enumerate(shown) if line.startswith(_FIRST_OF_MACHINE))
    lines = [*(line.replace(name, "/opt/ml").rstrip() for line in shown[:end]), "...", "", shown[-1]]
    _write_still("doctor", "lightning-sm doctor on a host of a job that would fail", lines)


def interrupted_digits() -> None:
    """Write the animated pictures of README: a job that is interrupted and resumes."""
    shown = f"$ lightning-sm local {' '.join(_DIGITS_OPTIONS)} -- {' '.join(_DIGITS)}"
    lines = _lines(["local", *_DIGITS_OPTIONS, "--discard", "--", *_DIGITS])
    kept = [line for line in lines if any(re.search(pattern, line.text) for pattern in _SHOWN)]
    title = "A job on two emulated trainer hosts and a data host: interrupted, resumed, done"
    paced = terminal.paced([terminal.TimedLine(0.0, shown), *kept])
    for name, on_phone in (("terminal", False), ("terminal-phone", True)):
        _svg(name).write_text(terminal.moving(title, paced, on_phone=on_phone), encoding="utf-8")


def _lines(arguments: Sequence[str]) -> Iterator[terminal.TimedLine]:
    """Run a lightning-sm command, and yield the lines of its output as they arrive."""
    began = time.monotonic()
    lines = []
    with subprocess.Popen(
        [*_COMMAND, *arguments],
        cwd=_REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as job:
        assert job.stdout is not None  # noqa: S101 - a pipe
        deadline = threading.Timer(_TIMEOUT_S, job.terminate)
        deadline.daemon = True
        deadline.start()
        for line in job.stdout:
            lines.append(terminal.TimedLine(time.monotonic() - began, line.rstrip()))
            yield lines[-1]
        deadline.cancel()
    if job.returncode != 0:
        sys.exit("\n".join(line.text for line in lines))


def _output(command: Sequence[str], codes: Collection[int] = (0,), **variables: str) -> list[str]:
    ended = subprocess.run(
        command,
        cwd=_REPOSITORY,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if ended.returncode not in codes:
        sys.exit(f"{' '.join(command)} exited with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout.rstrip().splitlines()


def _write_still(name: str, title: str, lines: Sequence[str]) -> None:
    _svg(name).write_text(terminal.still(title, [f"$ lightning-sm {name}", *lines]), encoding="utf-8")


def _svg(name: str) -> Path:
    return IMAGES / f"{name}.svg"


def _png(name: str, suffix: str, *, is_dark: bool) -> Path:
    return IMAGES / f"{name}{suffix}{'-dark' if is_dark else ''}.png"


if __name__ == "__main__":
    sys.exit(main())
