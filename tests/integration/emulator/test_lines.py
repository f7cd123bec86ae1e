"""How much a large job says before the script does."""

import pytest

from tests.integration.emulators import job_dir, local

pytestmark = [pytest.mark.processes, pytest.mark.proof]


def test_each_of_twenty_hosts_begins_with_one_line(tmp_path):
    """Sixteen trainers and four data hosts: version, host, role and script, and nothing else before or after."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    jobs = tmp_path / "jobs"
    ended = local(jobs, tmp_path, "--group", "trainer=16", "--group", "data=4", "--", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    logs = [path.read_text().splitlines() for path in job_dir(jobs).glob("algo-*/output/log.txt")]
    assert len(logs) == 20
    assert [len(lines) for lines in logs] == [2] * 20, logs
    assert all("role trainer" in first or "role data" in first for first, _ in logs)
    assert {last for _, last in logs} == {"hello"}
