"""Messages that all ranks of a host would log are logged once."""

import pytest

from lightning_sm.data.host.pickler import pickle_object
from lightning_sm.data.ipc.feeder_messages import Configure
from lightning_sm.data.protocol.calls import HeartbeatRequest
from lightning_sm.data.protocol.openings import Opening
from lightning_sm.data.trainer.feeder_client import FeederClient
from tests.integration.data.fakes import FakeHost, credentials
from tests.integration.emulators import until

pytestmark = pytest.mark.processes

TIMEOUT_S = 60


@pytest.mark.parametrize("is_quiet", [False, True])
def test_the_first_rank_of_a_host_reports_a_lost_connection(capfd, is_quiet):
    """Only the first rank logs the lost connection, and all ranks count it."""
    client = None
    try:
        with FakeHost().serving() as address:
            heartbeat = HeartbeatRequest("rank 1", 2)
            client = FeederClient(Configure([address], credentials(), heartbeat, is_quiet=is_quiet))
            pickled = pickle_object([], by_name=True, named={}, advice="")
            _held = client.open_source(pickled, Opening(pickled.digest, pickled.digest))
            until(lambda: client.snapshot().hosts[0].state == "up", "the host is connected", TIMEOUT_S)
        until(lambda: client.snapshot().hosts[0].num_lost == 1, "the lost connection is counted", TIMEOUT_S)
    finally:
        if client is not None:
            client.close()
    assert ("Lost connection to data host" in capfd.readouterr().err) is not is_quiet
