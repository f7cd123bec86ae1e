"""The doctor's checks of installed packages, on metadata in temporary folders."""

from __future__ import annotations

import platform

import pytest

from lightning_sm.doctor.checks import packages
from lightning_sm.doctor.context import Context
from lightning_sm.doctor.report import Status

_CONTEXT = Context.of({}, 20)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts the metadata of a package before those that are installed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(name, version, *requirements):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Requires-Dist: {requirement}" for requirement in requirements]
        header = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (folder / "METADATA").write_text("\n".join([*header, *lines, ""]))

    return installed


def test_versions_are_listed(install):
    """Python and the packages that matter are shown; NCCL is known without an import of torch."""
    install("nvidia-nccl-cu12", "2.21.5")
    (result,) = packages.versions(_CONTEXT)
    assert result.found.startswith(f"Python {platform.python_version()}, ")
    assert "nvidia-nccl-cu12 2.21.5" in result.found
    assert "torch " in result.found


def test_installed_packages_of_this_environment_fit():
    """Where the tests run, every requirement is met."""
    assert [result.found for result in packages.requirements(_CONTEXT)] == ["met"]


def test_unmet_requirement_of_ours_is_a_problem(install):
    """A version outside of what lightning-sm asks for, and a missing package, are problems; extras are optional."""
    install("lightning-sm", "9.0", "numpy<1", "no-such-package>=1", "not-there-either>=1; extra == 'vision'")
    found = [result for result in packages.requirements(_CONTEXT) if result.status is Status.PROBLEM]
    assert [result.found.partition(",")[0] for result in found] == [
        "lightning-sm needs numpy<1",
        "lightning-sm needs no-such-package>=1",
    ]


def test_either_lightning_is_enough(install):
    """Where lightning is installed, pytorch-lightning need not be."""
    install("lightning-sm", "9.0", "lightning>=2")
    assert [result.found for result in packages.requirements(_CONTEXT)] == ["met"]
