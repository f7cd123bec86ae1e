"""Installing requirements before the script starts, into a virtual environment, from a folder of tiny packages."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import site
import subprocess
import sys
import venv

import pytest

from tests.fakes.job_folder import resource_config, write_job
from tests.fakes.s3 import fake_s3
from tests.fakes.wheel import write_wheel
from tests.integration.hosts import REPOSITORY
from tests.integration.launching import TIMEOUT_S, failure, local_addresses, started, train

_IMPORT = "import tiny\nprint('tiny', tiny.VERSION)"


@pytest.fixture
def base(tmp_path):
    """A job with one host and mounted code, as in SDK v2's local_code mode."""
    folder = write_job(
        tmp_path / "ml",
        resource_config({"homogeneousCluster": ["algo-1"]}, "algo-1"),
        hyperparameters={"sagemaker_program": '"train.py"', "sagemaker_submit_directory": '"/opt/ml/code"'},
    )
    (folder / "code").mkdir()
    return folder


@pytest.fixture
def python(tmp_path):
    """The interpreter of a virtual environment that also sees all packages of the tests' environment."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "venv" / "lib" / version / "site-packages"
    (packages / "outer.pth").write_text("\n".join([str(REPOSITORY), *site.getsitepackages()]))
    return tmp_path / "venv" / "bin" / "python"


@pytest.fixture
def index(tmp_path):
    """A folder of packages that pip uses instead of an index."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "tiny", "1.0")
    return folder


def _source(base, requirements=None, script=_IMPORT):
    (base / "code" / "train.py").write_text(script)
    if requirements is not None:
        (base / "code" / "requirements.txt").write_text(requirements)


def _variables(index, **variables):
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_NO_CACHE_DIR": "1"}
    return {**own, "PIP_CONFIG_FILE": os.devnull, **variables}  # a machine's constraints would be in the messages


def _run(base, python, index, *args, **variables):
    return train(base, base, *args, python=str(python), **_variables(index, **variables))


def test_requirements_of_the_job_are_installed_first(base, python, index):
    """The script can import the packages in its requirements.txt, and the log has pip's output."""
    _source(base, "tiny\n")
    ended = _run(base, python, index)
    assert (ended.returncode, ended.stdout) == (0, "tiny 1.0\n"), ended.stderr
    assert "lightning-sm: pip install -r requirements.txt in " in ended.stderr
    assert "Successfully installed tiny-1.0" in ended.stderr


@pytest.mark.proof
def test_relative_paths_in_requirements_start_from_the_code(base, python, index):
    """Relative paths in requirements.txt start from the code's folder, and the code's modules do not shadow pip's."""
    _source(base, "./wheels/tiny-2.0-py3-none-any.whl\n")
    (base / "code" / "wheels").mkdir()
    write_wheel(base / "code" / "wheels", "tiny", "2.0")
    (base / "code" / "types.py").write_text("raise RuntimeError('not for pip')")
    (base / "code" / "train.py").write_text("import sys\nsys.path.remove(sys.path[0])\n" + _IMPORT)
    ended = _run(base, python, index)
    assert "Successfully installed tiny-2.0" in ended.stderr, ended.stderr


def test_a_requirement_that_does_not_exist_fails_the_host(base, python, index):
    """The failure file begins with pip's error, the exit code is 2, and the script is not started."""
    _source(base, "tiny==9.9\n")
    ended = _run(base, python, index)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = failure(base).splitlines()
    assert said[0].startswith("ScriptError: pip could not install the requirements of ")
    assert "No matching distribution found for tiny==9.9" in failure(base)
    assert "PIP_INDEX_URL" in said[-2]


@pytest.mark.matrix(first=1)
@pytest.mark.parametrize("how", ["directly", "by another package"])
def test_requirements_that_would_replace_torch_are_refused(base, python, index, how):
    """Requiring another torch, directly or through another package, is an error that names both versions."""
    write_wheel(index, "torch", "0.0.1")
    write_wheel(index, "needy", "1.0", requires=["torch==0.0.1"])
    _source(base, "torch==0.0.1\n" if how == "directly" else "needy\n", "print('started')")
    ended = _run(base, python, index)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert "torch==0.0.1" in failure(base)
    assert f"(constraint) torch=={importlib.metadata.version('torch')}" in failure(base)
    assert "(LIGHTNING_SM_INSTALL_REQUIREMENTS=unprotected lets pip replace them).\non " in failure(base)


def test_torch_is_replaced_if_that_is_wanted(base, python, index):
    """With LIGHTNING_SM_INSTALL_REQUIREMENTS=unprotected, pip replaces torch."""
    write_wheel(index, "torch", "0.0.1")
    _source(base, "torch==0.0.1\n", "import torch\nprint(torch.VERSION)")
    ended = _run(base, python, index, LIGHTNING_SM_INSTALL_REQUIREMENTS="unprotected", PIP_NO_DEPS="1")
    assert (ended.returncode, ended.stdout) == (0, "0.0.1\n"), ended.stderr


def test_requirements_that_the_image_has_change_nothing(base, python, index):
    """Nothing is installed for unpinned torch, pytorch-lightning and numpy, which the image already has."""
    _source(base, "torch\npytorch-lightning\nnumpy\n", "print('started')")
    ended = _run(base, python, index)
    assert ended.stdout == "started\n", ended.stderr
    assert "Successfully installed" not in ended.stderr


@pytest.mark.matrix(first=2)
@pytest.mark.parametrize(
    ("setting", "is_installed"), [(None, False), ("0", False), ("1", True)], ids=["default", "never", "always"]
)
def test_requirements_of_the_image_are_installed_on_demand_only(base, python, index, setting, is_installed):
    """The image's requirements.txt is installed only with LIGHTNING_SM_INSTALL_REQUIREMENTS=1."""
    write_job(base, hyperparameters={})
    _source(base, "tiny\n", "import importlib.util\nprint(importlib.util.find_spec('tiny') is not None)")
    variables = {} if setting is None else {"LIGHTNING_SM_INSTALL_REQUIREMENTS": setting}
    ended = _run(base, python, index, SAGEMAKER_PROGRAM="train.py", **variables)
    assert ended.stdout == f"{is_installed}\n", ended.stderr
    assert ("it did not come with the job (set LIGHTNING_SM_INSTALL_REQUIREMENTS=1" in ended.stderr) == (
        setting is None
    )


def test_nothing_is_installed_if_the_job_says_so(base, python, index):
    """LIGHTNING_SM_INSTALL_REQUIREMENTS=0 ignores even the requirements.txt that came with the job."""
    _source(base, "tiny==9.9\n", "print('started')")
    assert _run(base, python, index, LIGHTNING_SM_INSTALL_REQUIREMENTS="0").stdout == "started\n"


def test_a_setting_that_means_nothing_is_an_error(base, python, index):
    """LIGHTNING_SM_INSTALL_REQUIREMENTS accepts only 0, 1 and unprotected."""
    _source(base, "tiny\n")
    assert _run(base, python, index, LIGHTNING_SM_INSTALL_REQUIREMENTS="yes").returncode == 2
    assert failure(base).startswith("JobConfigError: LIGHTNING_SM_INSTALL_REQUIREMENTS='yes': expected 0 ")


def test_a_stop_ends_pip_at_once(base, python, index):
    """If SIGTERM arrives while pip waits for an index, the host exits with 143 and a reason."""
    _source(base, "tiny\n", "print('started')")
    with fake_s3() as server:
        server.objects["/simple/tiny/"] = None
        variables = {"PIP_NO_CACHE_DIR": "1", "PIP_INDEX_URL": f"{server.url}/simple/", "python": str(python)}
        with started(base, base, **variables) as running:
            running.wait_for("host algo-1")
            assert server.asked.wait(TIMEOUT_S)
            running.process.send_signal(signal.SIGTERM)
            assert running.exit_code() == 143
    doing = f"installing the requirements of {base}/code"
    assert failure(base) == f"The job was stopped or interrupted (SIGTERM). This host was {doing}."


def test_the_failure_of_another_host_ends_pip(tmp_path, python):
    """A host whose pip is waiting for an index exits when another host fails."""
    groups = {"homogeneousCluster": ["algo-1", "algo-2"]}
    hyperparameters = {"sagemaker_program": '"train.py"', "sagemaker_submit_directory": '"/opt/ml/code"'}
    bases = {}
    for host in ("algo-1", "algo-2"):
        bases[host] = write_job(
            tmp_path / host, resource_config(groups, host, interface="lo"), hyperparameters=hyperparameters
        )
        (bases[host] / "code").mkdir()
    _source(bases["algo-1"], "tiny\n", "print('started')")
    _source(bases["algo-2"], None, "raise SystemExit('no such data')")
    with fake_s3() as server:
        server.objects["/simple/tiny/"] = None
        variables = {
            "PIP_NO_CACHE_DIR": "1",
            "PIP_INDEX_URL": f"{server.url}/simple/",
            **local_addresses("algo-1", "algo-2"),
            "LIGHTNING_SM_PEERS_TIMEOUT_S": "20",
            "python": str(python),
        }
        with started(bases["algo-1"], bases["algo-1"], **variables) as first:
            assert server.asked.wait(TIMEOUT_S)
            with started(bases["algo-2"], bases["algo-2"], **variables) as second:
                assert second.exit_code() == 1
            assert first.exit_code() == 143
    assert failure(bases["algo-1"]) == failure(bases["algo-2"])
    assert "no such data" in failure(bases["algo-1"])


def test_the_emulator_installs_nothing(tmp_path):
    """``lightning-sm local`` installs no requirements, and logs that it does not."""
    (tmp_path / "train.py").write_text("print('started')")
    (tmp_path / "requirements.txt").write_text("no-such-package-as-this\n")
    ended = subprocess.run(
        [sys.executable, "-m", "lightning_sm", "local", "--base-dir", str(tmp_path / "jobs"), "--", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout
    folder = tmp_path.resolve()
    assert f"not installing requirements.txt from {folder}: LIGHTNING_SM_INSTALL_REQUIREMENTS=0." in ended.stdout
