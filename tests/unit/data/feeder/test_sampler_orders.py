"""Getting the order of a user's sampler from data hosts."""

import json
import threading
import time
from types import SimpleNamespace

import numpy as np

from lightning_sm.data.feeder.host_link import LinkState
from lightning_sm.data.feeder.sampler_orders import SamplerOrders

_FACTS = {"template": dict.fromkeys(("opening", "loader", "seed", "epoch", "pass_index"), 0), "num_shards": 0}


def test_an_order_comes_once_a_host_is_up_and_waiting_for_it_costs_nothing():
    """While all hosts are down, the thread sleeps; it used to spin."""
    order = json.dumps({"num_keys": 3, "num_offsets": 0}).encode() + b"\n" + np.arange(3, dtype="<i8").tobytes()
    link = SimpleNamespace(name="h", state=LinkState.CONNECTING, sampler_order=lambda request: order)
    orders = SamplerOrders({"h": link}, print)
    found = []
    waiting = threading.Thread(target=lambda: found.append(orders.get(_FACTS)))
    before = time.process_time()
    waiting.start()
    waiting.join(1.0)
    used_s = time.process_time() - before
    assert waiting.is_alive()
    assert used_s < 0.5
    link.state = LinkState.UP
    waiting.join(20.0)
    assert found[0].keys.tolist() == [0, 1, 2]
    orders.close()
