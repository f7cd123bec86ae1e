"""Checkpoints that only some hosts have, in jobs whose hosts share no folder."""

from __future__ import annotations

import re

import pytest

from tests.integration.emulators import local
from tests.integration.faulty_jobs import said_after
from tests.integration.hosts import SCRIPTS, Hosts, script

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Results of the ranks of two hosts that read checkpoints."""
    hosts = Hosts(tmp_path_factory.mktemp("shared"))
    store = f"tcp://{hosts.address('algo-1')}:{hosts.main_port}"
    arguments = {host: script("share_checkpoints.py", str(rank), store) for rank, host in enumerate(hosts.names)}
    ended = hosts.run(arguments, {"GLOO_SOCKET_IFNAME": "lo"})
    assert [one.code for one in ended.values()] == [0, 0]
    return hosts.seen()


@pytest.mark.parametrize(
    ("case", "contents", "owners"),
    [
        pytest.param("same", "both", [True, True], id="equal files stay where they are"),
        pytest.param("stale", "host 1", [False, False], id="of different files, that of the given host counts"),
        pytest.param("plain", "of host 0" * 300, [False, False], id="also in formats without checksums"),
        pytest.param("first", "host 0", [False, False], id="a file of the first host"),
        pytest.param("second", "host 1", [False, False], id="a file of the second host"),
        pytest.param("folder", {"deep/empty": "", "meta": "m" * 2500}, [False, False], id="a folder of both"),
        pytest.param("none", None, [True, True], id="a file that no host has"),
        pytest.param("address", None, [True, True], id="an address"),
    ],
)
def test_all_hosts_read_the_same(seen, case, contents, owners):
    """All hosts read the same contents from the same path, and received files are removed afterwards."""
    assert [rank[case][:2] for rank in seen] == [[contents, is_own] for is_own in owners]
    assert [rank[case][2] for rank in seen] == [[], []]


def _run(folder, kind, *options):
    work = folder / "work"
    work.mkdir(parents=True)
    job = ["--group", "trainer=2", "--checkpoints", "bucket", "--env", f"KIND={kind}", "--env=LIGHTNING_SM_REPORT_S=0"]
    ended = local(folder / "jobs", work, *job, *options, "--", str(SCRIPTS / "train_and_restart.py"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def _said(output, words):
    return {host: [text for name, text in said_after(output, words) if name == host] for host in ("algo-1", "algo-2")}


@pytest.mark.matrix(rows=["sharded"])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_a_job_restarts_from_what_its_hosts_have(tmp_path, kind):
    """A restarted job ends with the weights of an undisturbed one, and tests the same best and last checkpoints."""
    undisturbed = _run(tmp_path / "undisturbed", kind, "--env", "FAIL_AT=-1")
    output = _run(tmp_path / "disturbed", kind, "--env", "FAIL_AT=11", "--env", "LIGHTNING_SM_MAX_RESTARTS=1")
    assert "Cause: ConnectionError: meant to fail once" in output
    for starts in _said(output, "starts at").values():
        assert [text.split()[0] for text in starts] == ["0", "10"]
        assert starts[1] != "10 0", "the optimizer has no states"
    for words, number in (("ends with", 1), ("tests", 2)):
        expected = _said(undisturbed, words)
        assert expected["algo-1"] == expected["algo-2"]
        assert len(expected["algo-1"]) == number
        assert _said(output, words) == expected
    assert re.search(r"Received \S*/ml/checkpoints/\S+ from another host", output)
    assert not list(tmp_path.glob("*/jobs/*/algo-*/checkpoints/*.sagemaker-ignore"))


def test_a_search_for_a_learning_rate_needs_no_shared_folder(tmp_path):
    """All hosts can read the temporary checkpoint that Lightning writes on rank 0 only."""
    output = _run(tmp_path, "search", "--env", "FAIL_AT=-1")
    assert [text.split()[0] for _, text in said_after(output, "starts at")] == ["0"] * 4
    # The search's progress bar has no newline, so the end of the search is not seen: compare the last lines.
    ends = _said(output, "ends with")
    assert ends["algo-1"][-1] == ends["algo-2"][-1]
