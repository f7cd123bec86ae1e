"""environment.yml and the Dockerfiles require the same packages as pyproject.toml."""

import importlib.metadata
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from lightning_sm import __version__
from tests.sdk import REQUIREMENTS

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer reads pyproject.toml")
REPOSITORY = Path(__file__).parents[2]
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
# The interpreter and pip, which only conda's file lists.
CONDA_ONLY = {"python", "pip"}
# The extras that the image includes.
EXTRAS = ("container", "vision", "report")


@pytest.fixture(scope="module")
def project():
    """Return the table ``project`` of pyproject.toml."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def environment():
    """Return the content of environment.yml."""
    return yaml.safe_load((REPOSITORY / "environment.yml").read_text(encoding="utf-8"))


def conda_specs(environment):
    """Return the packages that conda installs."""
    return [item for item in environment["dependencies"] if isinstance(item, str)]


def pip_specs(environment):
    """Return the packages that pip installs."""
    return [spec for item in environment["dependencies"] if isinstance(item, dict) for spec in item["pip"]]


def _extras(requirement):
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def split(spec):
    """Split a spec into its name with extras, and its sorted version constraints."""
    name, version = re.fullmatch(r"([A-Za-z0-9_-]+(?:\[[a-z,]+\])?)(.*)", spec).groups()
    return name.lower(), sorted(filter(None, version.split(",")))


def test_each_dependency_has_the_same_version_in_both_files(project, environment):
    """The image installs the versions that the package and the image's extras require.

    Extras of dependencies must match as well, although conda has none: Lightning's CLI does not start without
    jsonargparse's.
    """
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    requirements = {item.name: item for item in map(Requirement, wanted)}
    expected = {
        CONDA_NAMES.get(name, name).lower() + _extras(requirement): sorted(map(str, requirement.specifier))
        for name, requirement in requirements.items()
    }
    found = dict(map(split, [*conda_specs(environment), *pip_specs(environment)]))
    assert {name: version for name, version in found.items() if name not in CONDA_ONLY} == expected


@pytest.mark.proof
def test_every_conda_spec_parses(environment):
    """Conda's parser accepts each spec and finds the intended name."""
    import rattler

    for spec in conda_specs(environment):
        assert rattler.MatchSpec(spec).name.normalized == split(spec)[0]


def test_python_is_one_that_the_package_allows(project, environment):
    """The image's Python satisfies requires-python."""
    (python,) = (spec for spec in conda_specs(environment) if spec.startswith("python="))
    assert python.removeprefix("python=") in Requirement(f"python{project['requires-python']}").specifier


def test_channels_are_conda_forge_alone(environment):
    """Packages from Anaconda's channels, which companies must pay for, are never used."""
    assert environment["channels"] == ["conda-forge", "nodefaults"]


def test_bolts_is_the_same_everywhere():
    """All files that create an environment install the same lightning-bolts, without its dependencies."""
    pattern = re.compile(r"--no-deps '?(lightning-bolts==[0-9.]+)")
    found = [
        pattern.findall((REPOSITORY / name).read_text(encoding="utf-8"))
        for name in ("docker/Dockerfile", "docker/Dockerfile.dlc", "Makefile", "environment.yml", "README.md")
    ]
    assert len(found[0]) == 1
    assert found == [found[0]] * len(found)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.dlc"])
def test_images_say_which_version_and_source_they_have(name):
    """The images' labels have the package's version and the source address from a build argument."""
    text = (REPOSITORY / "docker" / name).read_text(encoding="utf-8")
    labels = dict(re.findall(r"org\.opencontainers\.image\.(\w+)=(\S+)", text))
    assert labels == {"title": "lightning_sm", "version": __version__, "source": "${SOURCE}"}


def test_the_table_of_versions_accepts_what_is_asked_for(project):
    """Versions in the second table satisfy the constraints in pyproject.toml or tests/sdk.py, which it repeats."""
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
        *REQUIREMENTS.values(),
    ]
    specifiers = {one.name: one.specifier for one in map(Requirement, wanted)}
    text = (REPOSITORY / "docs" / "tested.md").read_text(encoding="utf-8").partition("no other combination was run")[2]
    found = set()
    for package, tested, accepted in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.MULTILINE):
        names = [name for name in re.findall(r"`([\w-]+)`", package.partition("(")[0]) if name in specifiers]
        for name, bounds, versions in zip(names, re.findall(r"`([^`]+)`", accepted), tested.split(", "), strict=False):
            assert set(bounds.split(",")) == {str(one) for one in specifiers[name]}, name
            assert re.match(r"[\d.]+", versions)[0] in specifiers[name], name
            found.add(name)
    assert {
        "torch",
        "torchvision",
        "numpy",
        "grpcio",
        "h2",
        "msgspec",
        "boto3",
        "sagemaker",
        "sagemaker-train",
        "sagemaker-training",
    } <= found


def test_the_sdks_that_readers_install_are_those_of_the_tests():
    """docs/sdk.md and tests/sdk.py require the same versions."""
    text = (REPOSITORY / "docs" / "sdk.md").read_text(encoding="utf-8")
    assert re.findall("pip install '(sagemaker.+?)'", text) == list(REQUIREMENTS.values())


@pytest.mark.parametrize("name", ["pytorch-lightning", "jsonargparse"])
def test_no_newer_minor_version_is_accepted_than_was_tested(project, name):
    """The table repeats pyproject.toml's bounds, which exclude minor versions newer than the newest tested one."""
    (requirement,) = (one for one in map(Requirement, project["dependencies"]) if one.name == name)
    text = (REPOSITORY / "docs" / "tested.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{name}`.*\| ([\d.]+) \| ([\d.]+) \| `([^`]+)`", text, re.MULTILINE)
    oldest, newest, accepted = row
    assert set(accepted.split(",")) == {str(one) for one in requirement.specifier if one.operator != "!="}
    assert oldest in requirement.specifier
    assert newest in requirement.specifier
    major, minor = map(int, newest.split(".")[:2])
    assert f"{major}.{minor + 1}" not in requirement.specifier
    assert importlib.metadata.version(name) in requirement.specifier


def test_each_extra_that_is_named_exists(project):
    """Messages and pages name only existing extras, and docs/install.md describes each extra."""
    extras = set(project["optional-dependencies"])
    files = [
        *(REPOSITORY / "lightning_sm").rglob("*.py"),
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
    ]
    named = {
        name
        for path in files
        for group in re.findall(r"(?:lightning[-_]sm|'\.)\[([a-z,-]+)\]", path.read_text(encoding="utf-8"))
        for name in group.split(",")
    }
    assert {"report", "completion", "submit"} <= named
    assert named <= extras
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == extras
