"""Judging a local job by its containers."""

import io
import tarfile

import pytest

pytest.importorskip("botocore", reason="needs the SageMaker SDK (extra launch)")

from lightning_sm.submit.local_mode import failure_reasons, judge
from lightning_sm.submit.sdk.containers import Container

pytestmark = pytest.mark.sdk2


def hosts(*endings):
    """Containers; a number is an exit code, a word another status than "exited"."""
    return [
        Container(str(index), f"algo-{index}", "exited", ending)
        if isinstance(ending, int)
        else Container(str(index), f"algo-{index}", ending, 0)
        for index, ending in enumerate(endings)
    ]


@pytest.mark.parametrize(
    ("endings", "num_hosts", "sdk", "expected"),
    [
        ((0, 0), 2, 0, 0),
        ((0, 42), 2, 0, 42),  # the SDK calls this a success, depending on which host left first
        ((137, 42), 2, 1, 42),  # Compose killed the other one
        ((143, 1), 2, 1, 1),
        ((0, 137), 2, 0, 137),
        ((0,), 2, 0, 1),
        ((), 2, 0, 1),
        ((), 2, 7, 7),
        ((0, "running"), 2, 0, 1),
        ((0, "created"), 2, 1, 1),
        ((0, 0), 2, 1, 1),  # the model could not be packed, for instance
        ((0, 0), 2, 124, 124),
        (("running", "running"), 2, 124, 124),
    ],
)
def test_only_containers_decide(endings, num_hosts, sdk, expected):
    """A job has succeeded if every host started and ended with 0, and the SDK got through."""
    assert judge(hosts(*endings), num_hosts, sdk) == expected


def test_an_image_that_was_not_asked_to_train_has_not_trained(caplog):
    """Though it ended with 0: it printed its help."""
    assert judge([Container("1", "algo-1", "exited", 0, is_training=False)], 1, 0) == 1
    assert "'train'" in caplog.text


def test_reasons_of_failures_are_found_wherever_the_sdk_leaves_them(tmp_path):
    """In the folders of the hosts, and in the archive of the output; each once."""
    for host, text in {"algo-1": "first", "algo-2": "second"}.items():
        folder = tmp_path / "root" / host / "output"
        folder.mkdir(parents=True)
        (folder / "failure").write_text(text)
    with tarfile.open(tmp_path / "output.tar.gz", "w:gz") as archive:
        for name, text in {"./failure": b"second", "data/failures": b"no"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    assert sorted(failure_reasons(tmp_path)) == ["first", "second"]
    assert failure_reasons(tmp_path / "root" / "algo-1") == ["first"]


def test_an_incomplete_archive_tells_no_reasons(tmp_path, caplog):
    """The time limit may have ended the SDK while it wrote the archive: a warning says so, and the job's end stands."""
    path = tmp_path / "output.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(__file__)
    path.write_bytes(path.read_bytes()[:-100])
    assert failure_reasons(tmp_path) == []
    assert "output.tar.gz is incomplete" in caplog.text
