"""The release workflow builds packages that install, with absolute links and a description that renders."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from lightning_sm import __version__
from tests.integration.submit.test_submit import JOB

REPOSITORY = Path(__file__).parents[2]
URL = "https://github.com/someone/lightning-sm"
TAG = f"v{__version__}"
TIMEOUT_S = 300
pytestmark = pytest.mark.proof


def run(*command, cwd, code=0):
    """Run a command, check its exit code, and return its output."""
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == code, f"{command} ended with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the files that the packages are built from, prepared for a release."""
    folder = tmp_path_factory.mktemp("release") / "repository"
    names = ["lightning_sm", "app", "docker", "tests", "docs", "benchmarks"]
    names += [path.name for path in REPOSITORY.iterdir() if path.is_file()]
    for name in names:
        source = REPOSITORY / name
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        _ = shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)
    run(sys.executable, "docs/release.py", URL, TAG, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def packages(checkout):
    """The sdist, and the wheel that is built from it, as `python -m build` does."""
    dist = checkout / "dist"
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", dist, cwd=checkout)
    (sdist,) = dist.glob("*.tar.gz")
    shutil.unpack_archive(sdist, checkout / "unpacked", filter="data")
    (unpacked,) = (checkout / "unpacked").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", dist, cwd=unpacked)
    (wheel,) = dist.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


@pytest.fixture(scope="module")
def metadata(packages):
    """The wheel's metadata."""
    with zipfile.ZipFile(packages["wheel"]) as wheel:
        (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def test_twine_accepts_the_packages(packages):
    """Twine can render the long description as the index does."""
    pytest.importorskip("twine", reason="group proof")
    told = run(sys.executable, "-m", "twine", "check", "--strict", *packages.values(), cwd=REPOSITORY)
    assert told.count("PASSED") == 2


def test_no_link_of_the_description_needs_the_repository(metadata):
    """Links and images are absolute addresses of existing files, and diagrams are images."""
    text = metadata.get_payload()
    assert "```mermaid" not in text
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    assert all(target.startswith("https://") for target in targets)
    files = {target.removeprefix(f"{URL}/").split("#")[0] for target in targets if target.startswith(URL)}
    assert {file.split("/")[0] for file in files} == {"blob", "raw"}
    assert all((REPOSITORY / file.split("/", 2)[2]).exists() for file in files)
    assert f"raw/{TAG}/docs/images/terminal.svg" in files


def test_the_metadata_says_who_where_and_for_what(metadata):
    """The metadata has the author, addresses, licence and Python versions."""
    assert metadata["Version"] == __version__
    assert metadata["Author"]
    assert dict(line.split(", ") for line in metadata.get_all("Project-URL"))["Repository"] == URL
    assert metadata["License-Expression"] == "Apache-2.0"
    tested = (REPOSITORY / "docs" / "tested.md").read_text(encoding="utf-8")
    (versions,) = re.findall(r"^\| Python \| ([\d., ]+);", tested, re.MULTILINE)
    stated = {one.rpartition(" ")[2] for one in metadata.get_all("Classifier") if re.search(r":: 3\.\d+$", one)}
    assert stated == set(versions.split(", "))


def test_another_tag_is_refused(checkout):
    """A tag that does not match the package's version stops the workflow before anything is built."""
    assert "The tag is v9.9.9" in run(sys.executable, "docs/release.py", URL, "v9.9.9", cwd=checkout, code=1)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_documented_commands_install_what_submits(packages, tmp_path, kind):
    """In an empty environment, the commands in docs/install.md install all that a dry run needs, without torch."""
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8").partition("## Only to submit jobs")[2]
    (block,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    alone = ("env", "--unset=PYTHONPATH", "AWS_DEFAULT_REGION=us-east-1")
    for line in block.splitlines():
        command = line.replace("--no-deps lightning-sm", f"--no-deps '{packages[kind]}'").replace("pip ", "-m pip ", 1)
        run(*alone, "bash", "-c", f"'{programs}/python' {command} --quiet", cwd=tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    told = run(*alone, programs / "lightning-sm", "submit", "job.yaml", "--dry-run", cwd=tmp_path)
    assert '"TrainingJobName": "digits-' in told
    assert "0 problems" in told
    assert run(*alone, programs / "lightning-sm", "jobs", "--help", cwd=tmp_path).startswith("usage: lightning-sm jobs")
    run(*alone, programs / "python", "-c", "import torch", cwd=tmp_path, code=1)
