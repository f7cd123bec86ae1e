"""Which failures a restart within the job cannot overcome."""

import pytest

from lightning_sm.launcher.permanent_failures import is_permanent_failure


def _raised(exception):
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    go()\n{exception}\n'


@pytest.mark.parametrize(
    ("stderr", "exit_code"),
    [
        ("usage: train.py\ntrain.py: error: unrecognized arguments: --x\n", 2),
        ("", 143),
        ("", 130),
        (_raised("ImportError: cannot import name 'x'"), 1),
        (_raised("ModuleNotFoundError: No module named 'x'"), 1),
        ('  File "train.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n', 1),
        ('Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n' * 2 + "SyntaxError: bad", 1),
        (_raised("IndentationError: unexpected indent"), 1),
        (_raised("lightning_sm.errors.JobConfigError: no hosts"), 1),
        (_raised("lightning_sm.errors.StrategyError: not here"), 1),
        (_raised("lightning_sm.errors.ResumeError: other data"), 1),
        (_raised("lightning_sm.errors.MixedLightningError: both"), 1),
        (_raised("lightning_sm.errors.NeedsLinuxError: memfd"), 1),
        (_raised("lightning_sm.errors.RemoteTransformError: ModuleNotFoundError: No module named 'x'"), 1),
        # The other rank has failed only because this one had.
        (_raised("RuntimeError: Connection closed by peer [127.0.0.2]:1") + _raised("ImportError: x"), 1),
    ],
)
def test_what_lies_in_the_script_or_the_job_would_come_again(stderr, exit_code):
    """Usage errors, missing modules, contradictions in the job's settings, and what was told to end."""
    assert is_permanent_failure(stderr, exit_code)


@pytest.mark.parametrize(
    ("stderr", "exit_code"),
    [
        ("", 1),
        ("", 7),
        ("", 137),
        ("out of memory\n", 134),
        (_raised("ValueError: NaN"), 1),
        (_raised("torch.OutOfMemoryError: CUDA out of memory"), 1),
        (_raised("RuntimeError: Connection closed by peer [127.0.0.2]:1"), 1),
        (_raised("lightning_sm.errors.DataTimeoutError: no batch"), 1),
        (_raised("lightning_sm.errors.DataHostUnreachableError: all"), 1),
        (_raised("lightning_sm.errors.HostResolutionError: algo-1"), 1),
        (_raised("lightning_sm.errors.PortInUseError: 20000"), 1),
        (_raised("lightning_sm.errors.CheckpointError: damaged"), 1),
        (_raised("lightning_sm.errors.RemoteTransformError: ValueError: sample 3"), 1),
        (_raised("mine.errors.JobConfigError: not of this package"), 1),
        (_raised("ImportErrorOfMine: x"), 1),
    ],
)
def test_all_other_failures_may_pass(stderr, exit_code):
    """Exceptions, kills and exit codes of all kinds, our own errors about hosts, ports and files among them."""
    assert not is_permanent_failure(stderr, exit_code)
