"""``build`` in a job file, with fakes of Docker's client and of the service."""

from __future__ import annotations

import pytest

from lightning_sm.errors import ContainerError, SubmitError
from lightning_sm.submit.image_build import build_image
from lightning_sm.submit.submit_job import submit_job
from tests.fakes import docker_client
from tests.fakes.sagemaker_service import FakeService

REPOSITORY = "111122223333.dkr.ecr.us-east-1.amazonaws.com/team/digits"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
JOB = f"""
image: {REPOSITORY}:v1
build: .
role: arn:aws:iam::111122223333:role/training
groups: {{trainer: {{instance_type: ml.g5.xlarge}}}}
output: s3://bucket/output
"""
# After a push, Docker knows the image's digest in that repository.
_CLIENT = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in
    build) exit "${BUILD_CODE:-0}";;
    login) cat >> "$CALLS"; echo >> "$CALLS";;
    push) touch "$CALLS.pushed"; exit "${PUSH_CODE:-0}";;
    image)
        if [ -e "$CALLS.pushed" ]; then echo "[\\"other@sha256:1\\", \\"$REPOSITORY@$DIGEST\\"]"; else echo null; fi;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The file to which the fake client appends its arguments and its input."""
    monkeypatch.setenv("REPOSITORY", REPOSITORY)
    monkeypatch.setenv("DIGEST", DIGEST)
    return docker_client.install(_CLIENT, tmp_path, monkeypatch)


@pytest.fixture
def submit(tmp_path, monkeypatch, calls):
    """A function that submits the job and returns the Docker calls that this made."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM scratch\n")
    (folder / "job.yaml").write_text(JOB)

    def run(service):
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        calls.unlink(missing_ok=True)
        submit_job(folder / "job.yaml", wait=False)
        return calls.read_text().splitlines()

    return run


def test_the_image_is_built_and_pushed_and_named_by_its_digest(submit, tmp_path):
    """A new image goes to a new repository, with the password on stdin; an unchanged image is not pushed again."""
    inspect = f"image inspect --format {{{{json .RepoDigests}}}} {REPOSITORY}:v1"
    build = f"build --platform linux/amd64 --tag {REPOSITORY}:v1 {tmp_path / 'code'}"
    with FakeService(images=[], repositories=[]) as service:
        service.images.append(DIGEST)  # what the stand-in pushes
        login = f"login --username AWS --password-stdin {REPOSITORY.partition('/')[0]}"
        pushed = [build, inspect, login, "a password", f"push {REPOSITORY}:v1", inspect]
        assert submit(service) == pushed
        assert service.repositories == ["team/digits"]
        assert submit(service) == [build, inspect]
        service.images.clear()  # as an expiry rule would: Docker's memory of the push does not count
        with pytest.raises(ContainerError, match=r"has pushed .*, but .* has no image with its digest"):
            submit(service)
    images = [request["AlgorithmSpecification"]["TrainingImage"] for request in service.requests]
    assert images == [f"{REPOSITORY}@{DIGEST}"] * 2


@pytest.mark.parametrize("step", ["build", "push"])
def test_a_failure_of_docker_ends_the_submission(submit, monkeypatch, step):
    """Nothing is submitted if Docker fails to build or push the image."""
    monkeypatch.setenv(f"{step.upper()}_CODE", "3")
    with FakeService(images=[], repositories=[]) as service:
        with pytest.raises(ContainerError, match=f"docker {step} failed with exit code 3; its output says why"):
            submit(service)
        assert service.requests == []


def test_a_build_for_this_machine_is_of_its_kind(calls):
    """--local, which starts the image here, builds it for this machine's platform."""
    build_image("digits", ".", None, for_service=False)
    assert calls.read_text() == "build --tag digits .\n"


def test_the_dockerfile_may_lie_elsewhere(submit, calls, tmp_path):
    """``dockerfile`` is relative to the job file, as ``build`` is, and the build folder then needs no Dockerfile."""
    folder = tmp_path / "code"
    (folder / "docker").mkdir()
    (folder / "Dockerfile").rename(folder / "docker" / "train.Dockerfile")
    (folder / "job.yaml").write_text(f"{JOB}dockerfile: docker/train.Dockerfile\n")
    with FakeService(images=[DIGEST], repositories=["team/digits"]) as service:
        built = submit(service)[0]
    file = folder / "docker" / "train.Dockerfile"
    assert built == f"build --platform linux/amd64 --file {file} --tag {REPOSITORY}:v1 {folder}"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("build: .", "build: nowhere", "job.yaml:3: build: there is no file .*nowhere/Dockerfile"),
        (
            "build: .",
            "build: ..",
            "job.yaml:3: build: there is no file .*Dockerfile. If the Dockerfile is elsewhere, set d",
        ),
        ("build: .", "dockerfile: Dockerfile", "job.yaml:3: dockerfile is set, but build is not"),
        ("build: .", "build: .\ndockerfile: nowhere", "job.yaml:4: dockerfile: there is no file .*nowhere"),
    ],
)
def test_what_cannot_be_built_is_a_problem(submit, tmp_path, old, new, words):
    """A missing Dockerfile is reported before anything is built."""
    file = tmp_path / "code" / "job.yaml"
    file.write_text(JOB.replace(old, new))
    with FakeService() as service, pytest.raises(SubmitError, match=words):
        submit(service)
