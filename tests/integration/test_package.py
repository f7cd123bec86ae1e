"""The sdist and the wheel are built, and the wheel runs in an environment without torch."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from lightning_sm import __version__

REPOSITORY = Path(__file__).parents[2]
# All dependencies of the commands; torch is not one of them.
LIGHT_DEPENDENCIES = ("msgspec>=0.19,<1", "psutil>=5.9,<8", "rich>=13.7,<16")
TIMEOUT_S = 120


def run(*command, cwd):
    """Run a command, which must succeed, and return its stdout."""
    ended = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert ended.returncode == 0, f"{command} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The folder of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=REPOSITORY)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def installed(sdist, tmp_path_factory):
    """The bin folder of an environment with a wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=sdist)
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, *LIGHT_DEPENDENCIES, cwd=folder)
    run(*pip, "--no-deps", *folder.glob("*.whl"), cwd=folder)
    return programs


def test_the_sdist_can_be_built_and_tested(sdist):
    """The sdist has the package, the app, the tests and the files that they read."""
    for name in ("lightning_sm/py.typed", "app/job.yaml", "docker/Dockerfile", "environment.yml", "tests/conftest.py"):
        assert (sdist / name).is_file()


def test_the_package_imports_without_torch(installed, tmp_path):
    """The package can be imported without torch and Lightning, and its version is the distribution's."""
    code = (
        "import importlib.metadata, importlib.util, lightning_sm; "
        "print(lightning_sm.__version__, importlib.metadata.version('lightning-sm'), importlib.util.find_spec('torch'))"
    )
    assert run(installed / "python", "-c", code, cwd=tmp_path).split() == [__version__, __version__, "None"]


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["local", "--help"], ["doctor", "--help"]])
def test_the_command_starts_without_torch(installed, tmp_path, arguments):
    """Commands print their help if torch is not installed."""
    assert "usage: lightning-sm" in run(installed / "lightning-sm", *arguments, cwd=tmp_path)


def test_the_command_states_the_version(installed, tmp_path):
    """``--version`` prints the package's version."""
    assert run(installed / "lightning-sm", "--version", cwd=tmp_path) == f"lightning-sm {__version__}\n"
