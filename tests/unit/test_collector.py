"""Pausing the garbage collector in the processes of a job."""

from __future__ import annotations

import gc

import pytest

from lightning_sm._collector import pause_collector


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_paused_and_left_as_it_was(was_enabled):
    """The collector's previous state is restored, even if an import fails."""

    def fail_in_a_pause():
        with pause_collector():
            assert not gc.isenabled()
            raise ImportError

    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ImportError):
            fail_in_a_pause()
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if before else gc.disable)()
