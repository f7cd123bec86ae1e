"""When a script is restarted."""

import signal

import pytest

from lightning_sm.launcher.train import restart_pause_s


@pytest.mark.parametrize(
    ("exit_code", "num_restarts", "pause_s"),
    [
        (137, 0, 1.0),
        (139, 1, 2.0),
        (134, 2, 4.0),
        (137, 3, None),
        (0, 0, None),
        (1, 0, None),
        (2, 0, None),
        (255, 0, None),
        (128 + signal.SIGTERM, 0, None),
        (128 + signal.SIGINT, 0, None),
    ],
)
def test_only_a_script_that_was_killed_is_restarted(exit_code, num_restarts, pause_s):
    """Three times, with growing pauses: a script that exits by itself would do so again."""
    assert restart_pause_s(exit_code, num_restarts) == pause_s
