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


def test_both_lightnings_in_one_version_are_fine(install):
    """Lightning brings pytorch-lightning along: both are shown, and nothing is to be done."""
    install("pytorch-lightning", "2.6.6")
    install("lightning", "2.6.6")
    (result,) = packages.lightnings(_CONTEXT)
    assert (result.status, result.found) == (Status.OK, "pytorch-lightning 2.6.6 and lightning 2.6.6")


def test_lightnings_of_two_versions_are_a_warning(install):
    """The same code in two versions is named, and neither is to be removed."""
    install("pytorch-lightning", "2.6.6")
    install("lightning", "2.6.5")
    (result,) = packages.lightnings(_CONTEXT)
    assert result.status is Status.WARNING
    assert "pytorch-lightning 2.6.6 and lightning 2.6.5" in result.found
    assert "uninstall" not in result.advice


def test_compromised_release_is_a_problem(install):
    """The two releases of the supply-chain attack are named."""
    install("pytorch-lightning", "2.6.3")
    assert Status.PROBLEM in {result.status for result in packages.lightnings(_CONTEXT)}


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


def test_what_an_extra_of_a_package_lacks_is_a_problem(install):
    """The package alone, as conda installs it, is not what was asked for."""
    install("lightning-sm", "9.0", "some-parser[typed]>=1")
    install("some-parser", "1.5", "no-such-types>=2; extra == 'typed'", "not-there-either; extra == 'other'")
    found = [result for result in packages.requirements(_CONTEXT) if result.status is Status.PROBLEM]
    assert [result.found for result in found] == ["some-parser needs no-such-types>=2, which is not installed."]


def test_unfit_extra_of_ours_is_a_problem(install):
    """What an extra asks for counts only if the package is installed."""
    install("lightning-sm", "9.0", "sagemaker<3; extra == 'launch'", "ruff>=1; extra == 'dev'")
    install("sagemaker", "3.20.0")
    install("ruff", "0.1")
    results = list(packages.requirements(_CONTEXT))
    assert [result.found for result in results] == ["lightning-sm needs sagemaker<3, but 3.20.0 is installed."]


def test_either_lightning_is_enough(install):
    """Where lightning is installed, pytorch-lightning need not be."""
    install("lightning-sm", "9.0", "lightning>=2")
    assert [result.found for result in packages.requirements(_CONTEXT)] == ["met"]


def test_conflict_between_other_packages_is_a_warning(install):
    """What pip would call a conflict is a warning where it is not ours."""
    install("grpcio", "1.70", "numpy<1")
    found = [result.found for result in packages.requirements(_CONTEXT) if result.status is Status.WARNING]
    assert any(text.startswith("grpcio needs numpy<1, but ") for text in found)


@pytest.mark.parametrize(("version", "is_clash"), [("4.8.0", True), ("5.1.4", False)])
def test_old_toolkit_with_new_protobuf_is_a_problem(install, version, is_clash):
    """sagemaker-training before 5 does not start with protobuf 4 and newer."""
    install("sagemaker-training", version)
    install("protobuf", "5.28.1")
    found = [result.found for result in packages.requirements(_CONTEXT) if result.status is Status.PROBLEM]
    assert any("sagemaker-training 4.8.0 with protobuf 5.28.1" in text for text in found) is is_clash
