"""The tests' images: the real Dockerfile, on a base image that needs no registry."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.containers.engine import docker

REPOSITORY = Path(__file__).parents[2]
IMAGE = "lightning-sm-test/image"
# Names a real image with micromamba, for machines that can reach a registry and conda's channels.
BASE_VARIABLE = "LIGHTNING_SM_TEST_BASE_IMAGE"
_DEBIAN, _STAND_IN = "lightning-sm-test/debian", "lightning-sm-test/micromamba"
_SUITE, _PACKAGES = "bookworm", "ca-certificates,python3,python3-venv,python3-dev"
# Copies this machine's additional certificates, such as a proxy's, because pip in a container needs them too.
_TRUST = (
    "if ls /usr/local/share/ca-certificates/*.crt >/dev/null 2>&1; then "
    'cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/"; '
    'chroot "$1" update-ca-certificates; fi'
)
_BUILD_TIMEOUT_S = 1800.0


def build_image() -> str:
    """Build ``docker/Dockerfile`` and return the image's name; the engine reuses what it has built before."""
    base = os.environ.get(BASE_VARIABLE) or _build_stand_in()
    return build(REPOSITORY / "docker" / "Dockerfile", IMAGE, BASE_IMAGE=base)


def build(dockerfile: Path, tag: str, context: Path = REPOSITORY, **arguments: str) -> str:
    """Build an image and return its name.

    Args:
        dockerfile: The Dockerfile.
        tag: Name of the image.
        context: Build context, from which the Dockerfile may copy.
        arguments: Build arguments.
    """
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    docker("build", "--file", str(dockerfile), "--tag", tag, *options, str(context), timeout_s=_BUILD_TIMEOUT_S)
    return tag


def what_is_missing() -> list[str]:
    """Return what this machine lacks to build the images."""
    if os.environ.get(BASE_VARIABLE) or _has(_DEBIAN) or shutil.which("mmdebstrap"):
        return []
    return [f"mmdebstrap, or {BASE_VARIABLE} (such as mambaorg/micromamba)"]


def _build_stand_in() -> str:
    if not _has(_DEBIAN):
        # Skip the sync after each file, as Debian's images do.
        options = ["--variant=minbase", "--dpkgopt=force-unsafe-io", f"--include={_PACKAGES}"]
        make = ["mmdebstrap", *options, f"--customize-hook={_TRUST}", _SUITE, "-"]
        with subprocess.Popen(make, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as root_folder:
            subprocess.run(["docker", "import", "-", _DEBIAN], stdin=root_folder.stdout, check=True, timeout=600)
        assert root_folder.returncode == 0, f"{' '.join(make)} failed with exit code {root_folder.returncode}"
    return build(REPOSITORY / "tests" / "containers" / "stand_in" / "Dockerfile", _STAND_IN, DEBIAN=_DEBIAN)


def _has(image: str) -> bool:
    return docker("image", "inspect", image, check=False).returncode == 0
