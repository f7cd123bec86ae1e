"""How much a large job says before the script does."""

import pytest

from tests.integration.emulators import SCRIPT_START, job_dir, local

pytestmark = [pytest.mark.processes, pytest.mark.proof]

# A data host is ended as soon as all trainers have left, at the latest before its script has done anything. So they
# wait for each other, in the script's folder, which all hosts see.
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
    """Sixteen trainers and four data hosts: version, host, role and script, and nothing else before or after."""
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
