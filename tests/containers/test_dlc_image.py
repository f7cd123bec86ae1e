"""The image on top of AWS's Deep Learning Container, with a stand-in for AWS's image."""

from __future__ import annotations

import json

import pytest

from tests.containers.engine import docker
from tests.containers.images import REPOSITORY, build
from tests.fakes.job_folder import resource_config, write_job

pytestmark = [pytest.mark.docker, pytest.mark.proof]

# Prints the version of torch, and when each of its files was written.
_TORCH = (
    "cd / && python -c 'import torch; print(torch.__version__)' && "
    'find "$(python -c "import sysconfig; print(sysconfig.get_path(\\"purelib\\"))")/torch" -name "*.py" '
    '-printf "%P %T@\\n" | sort'
)


@pytest.fixture(scope="module")
def base(image):
    """A stand-in for AWS's image: torch and its settings, without lightning_sm and Lightning."""
    return build(
        REPOSITORY / "tests" / "containers" / "stand_in" / "Dockerfile.dlc", "lightning-sm-test/dlc-base", IMAGE=image
    )


@pytest.fixture(scope="module")
def dlc_image(base):
    """The name of the image built from docker/Dockerfile.dlc."""
    return build(REPOSITORY / "docker" / "Dockerfile.dlc", "lightning-sm-test/dlc", BASE_IMAGE=base)


def _inside(image, script):
    return docker("run", "--rm", "--network", "none", "--entrypoint", "bash", image, "-euc", script).stdout


def test_the_build_keeps_the_torch_of_its_base(base, dlc_image):
    """Every file of torch is the same as in AWS's image, which lacks lightning_sm."""
    assert _inside(dlc_image, _TORCH) == _inside(base, _TORCH)
    assert "No module named 'lightning_sm'" in _inside(base, "cd / && python -c 'import lightning_sm' 2>&1 || true")


def test_the_launcher_takes_the_place_of_the_shell(dlc_image):
    """Process 1 is lightning-sm, and doctor reports that signals work."""
    config = json.loads(docker("image", "inspect", dlc_image).stdout)[0]["Config"]
    assert (config["Entrypoint"], config["Cmd"]) == (["lightning-sm"], ["train"])
    ended = docker("run", "--rm", dlc_image, "doctor", "--json", check=False)
    checks = {check["name"]: check for check in json.loads(ended.stdout)["results"]}
    assert checks["signals"]["status"] == "ok"


def test_the_app_of_the_image_trains(dlc_image, tmp_path):
    """AWS's settings do not start AWS's entry point: the app trains and saves its model."""
    resources = resource_config({"homogeneousCluster": ["algo-1"]}, "algo-1")
    ml = write_job(tmp_path / "ml", resources, hyperparameters={"config": "app/configs/smoke.yaml"})
    mounts = []
    for name in ("input", "output", "model"):
        (ml / name).mkdir(exist_ok=True)
        mounts.append(f"--volume={ml / name}:/opt/ml/{name}")
    options = ["--rm", "--hostname=algo-1", "--env=OMP_NUM_THREADS=1", *mounts]
    docker("run", *options, dlc_image, "train", timeout_s=300)
    assert {path.name for path in (ml / "model").iterdir()} >= {"model.ckpt", "state_dict.pt", "config.yaml"}
    assert not (ml / "output" / "failure").exists()
