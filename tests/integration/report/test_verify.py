"""``lightning-sm verify`` on the records of real jobs."""

from __future__ import annotations

import subprocess
import sys

from tests.integration.emulators import local
from tests.integration.hosts import REPOSITORY, SCRIPTS


def test_epochs_with_an_uneven_last_step_that_are_over_in_no_time(tmp_path):
    """Each sample of 203 was used once, although the record has nothing between an epoch's first batch and its end."""
    options = ("--group", "trainer=2", "--group", "data=1", "--env", "NUM_SAMPLES=203", "--env", "STEP_S=0.005")
    ended = local(tmp_path, REPOSITORY, *options, "--", str(SCRIPTS / "train_dropout.py"), "fit")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    command = [sys.executable, "-m", "lightning_sm", "verify", str(tmp_path)]
    verified = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert verified.returncode == 0, verified.stdout
    assert "each sample was trained on exactly once in 4 complete epochs (1 start of rank 0)." in verified.stdout
