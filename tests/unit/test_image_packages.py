"""docker/install.sh passes the right packages and locks to conda and pip, both replaced by recording stand-ins."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.fakes.wheel import write_wheel

REPOSITORY = Path(__file__).parents[2]
_NOTES = """\
#!/bin/sh
echo "$(basename "$0") $* CUDA=$CONDA_OVERRIDE_CUDA" >> "$NOTES"
"""
_CLEAN = "micromamba clean --all --yes CUDA="


@pytest.fixture
def install(tmp_path):
    """Return a function that runs the script on a copy of environment.yml and returns the commands and the packages."""
    programs, folder = tmp_path / "bin", tmp_path / "environment"
    for made in (programs, folder):
        made.mkdir()
    for name in ("micromamba", "pip"):
        (programs / name).write_text(_NOTES)
        (programs / name).chmod(0o755)
    shutil.copy(REPOSITORY / "docker" / "install.sh", folder)
    shutil.copy(REPOSITORY / "environment.yml", folder)

    def run(*locks, **arguments):
        for name in locks:
            (folder / name).write_text("")
        env = {"PATH": f"{programs}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes")}
        env |= {"CUDA": "12.8", "TOOLKIT": "1", "EFA": "0", **arguments}
        subprocess.run(["bash", folder / "install.sh"], env=env, check=True, timeout=60)
        asked = yaml.safe_load((folder / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
        return (tmp_path / "notes").read_text().splitlines(), asked

    return run


def test_without_a_lock_conda_solves_for_the_environment(install):
    """Conda receives environment.yml unchanged, and the CUDA version, which it cannot detect during a build."""
    commands, asked = install()
    assert commands == ["micromamba install --yes --name base --file environment.yml CUDA=12.8", _CLEAN]
    assert asked == yaml.safe_load((REPOSITORY / "environment.yml").read_text(encoding="utf-8"))["dependencies"]


def test_a_lock_is_installed_as_it_is(install):
    """With locks, nothing is solved: conda and pip each install from a lock with checksums."""
    commands, _ = install("conda.lock", "pip.lock")
    assert commands == [
        "micromamba install --yes --name base --file conda.lock CUDA=",
        "pip install --no-deps --require-hashes --requirement pip.lock CUDA=",
        _CLEAN,
    ]


def test_the_toolkit_can_be_left_out(install):
    """Without the toolkit, boto3 stays, because the launcher uses it to fetch code from S3."""
    _, asked = install(TOOLKIT="0")
    pip = asked[-1]["pip"]
    assert not [line for line in pip if line.startswith("sagemaker-training")]
    assert "boto3>=1,<2" in pip


def test_the_plugin_for_efa_can_be_added(install):
    """The EFA plugin is installed as a conda package."""
    _, asked = install(EFA="1")
    assert "aws-ofi-nccl" in asked


@pytest.mark.proof
def test_the_lock_of_pip_has_a_checksum_that_pip_checks(tmp_path):
    """The lock has the checksum of the installed file, so pip rejects another file of the same version."""
    index, environment = tmp_path / "index", tmp_path / "environment"
    index.mkdir()
    wheel = index / write_wheel(index, "frozen_one", "1.5")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=300)
    python = str(environment / "bin" / "python")
    # Isolate pip from this machine's index and settings.
    env = {"PATH": os.environ["PATH"], "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}

    def pip(*words):
        command = [python, "-m", "pip", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)

    assert pip("uninstall", "--yes", "setuptools").returncode == 0
    assert pip("install", "frozen_one").returncode == 0
    # Mark pip as installed by Python, so that pip_lock.py does not look for it in an index.
    (record,) = environment.rglob("pip-*.dist-info/INSTALLER")
    record.write_text("venv\n")
    lock = subprocess.run(
        [python, "-"],
        input=(REPOSITORY / "docker" / "pip_lock.py").read_text(encoding="utf-8"),
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    assert lock == f"frozen_one==1.5 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    (tmp_path / "pip.lock").write_text(lock)
    frozen = (
        "install",
        "--force-reinstall",
        "--no-deps",
        "--require-hashes",
        "--requirement",
        str(tmp_path / "pip.lock"),
    )
    assert pip(*frozen).returncode == 0
    write_wheel(index, "frozen_one", "1.5", ["other"])
    refused = pip(*frozen)
    assert (refused.returncode, "DO NOT MATCH THE HASHES" in refused.stderr) == (1, True)
