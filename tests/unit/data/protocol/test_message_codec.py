"""Several threads can decode messages at the same time."""

import subprocess
import sys

# Each type is new, so that all threads create its decoder at once.
SCRIPT = """
import sys, threading
import msgspec
from lightning_sm._structs import Struct
from lightning_sm.data.protocol.message_codec import decode

sys.setswitchinterval(1e-6)
for number in range(100):
    inner = msgspec.defstruct("Inner", [("texts", dict[str, list[int]], {})], frozen=True)
    middle = msgspec.defstruct("Middle", [("all", list[inner], []), ("one", inner | None, None)], frozen=True)
    fields = [(f"field{number}", dict[str, middle], {}) for number in range(20)]
    outer = msgspec.defstruct("Outer", fields, bases=(Struct,), frozen=True)
    data = msgspec.json.encode({name: {"key": {"all": [{}]}} for name, *_ in fields})
    together = threading.Barrier(4)

    def decode_one():
        together.wait()
        decode(outer, data, "message")

    threads = [threading.Thread(target=decode_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_decode_the_first_message_of_a_type():
    """Threads can decode the first message of a type at the same time; with msgspec alone, the process crashes."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
