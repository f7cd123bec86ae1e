"""The lines that a large job logs before its script prints anything."""

import pytest

from tests.integration.emulators import SCRIPT_START, job_dir, local

pytestmark = [pytest.mark.processes, pytest.mark.proof]

# The launcher ends a data host as soon as all trainers have exited, possibly before its script has printed anything. So
# the hosts wait for each other, through the script's folder, which they share.
_SCRIPT = (
    SCRIPT_START
    + """
import pathlib, sys, time
sys.stdout.write('hello\\n')
sys.stdout.flush()
folder = pathlib.Path(__file__).with_name("seen")
folder.mkdir(exist_ok=True)
(folder / host).touch()
deadline = time.monotonic() + 120
while (seen := len(list(folder.iterdir()))) < 20:
    assert time.monotonic() < deadline, f"only {seen} hosts have run the script"
    time.sleep(0.1)
"""
)


def test_each_of_twenty_hosts_begins_with_one_line(tmp_path):
    """Sixteen trainers and four data hosts each log one line (version, host, role and script), and nothing else."""
    (tmp_path / "train.py").write_text(_SCRIPT)
    jobs = tmp_path / "jobs"
    ended = local(jobs, tmp_path, "--group", "trainer=16", "--group", "data=4", "--", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    logs = {path: path.read_text() for path in job_dir(jobs).glob("algo-*/output/log.txt")}
    assert len(logs) == 20
    for path, log in logs.items():
        first, *others = log.splitlines()
        assert "role trainer" in first or "role data" in first, path
        assert others == ["hello"], f"{path}:\n{log}"
