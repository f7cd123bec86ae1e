"""What the training process tells its feeder without waiting: slots that are free again, steps that were taken."""

from __future__ import annotations

import struct
from enum import IntEnum

# Kind, number of the ring or of the pass, slot or step. Far below PIPE_BUF, so that writes are atomic.
RELEASE = struct.Struct("<IIQ")


class Released(IntEnum):
    """What a record is about."""

    SLOT = 1  # number: the ring; value: the slot, which nothing aliases any more
    STEP = 2  # number: the pass; value: every step below was taken
    PASS = 3  # number: the pass, which is over
