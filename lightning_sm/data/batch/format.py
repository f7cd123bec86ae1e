"""The format of a batch, as far as encoding and decoding share it.

The header is JSON, ``["lsm-batch", version, bytes used, tree]``. In the tree null, booleans, strings and ordinary
numbers stand for themselves; everything else is a list whose first item says what it is (see ``encoding._Encoder`` and
``decoding._Decoder``). Tensors and arrays are a dtype, a shape and an offset into the slot. Nothing is pickled, and
decoding checks every number before it is used, because a message comes from another host.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 64
"""How deep containers may be nested in a batch."""

FORMAT, VERSION = "lsm-batch", 1
MAX_DIMENSIONS = 64
MAX_DTYPE_LEVELS = 8
INT64 = 2**63

# What torch has depends on its version. Quantized dtypes are missing on purpose: their scale is elsewhere.
_DTYPE = re.compile(r"bool|bfloat16|b?complex\d+|float\d+(_\w+)?|u?int\d+|bits\w+")
DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype) and _DTYPE.fullmatch(name)}
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUV]\d{1,9}|[<>|=][mM]8(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_KEYS = frozenset({str, bytes, int, float, bool, complex, type(None)})


def is_key(key: Any, level: int = 0) -> bool:
    """Return whether an object may be the key of a dictionary or a member of a set.

    Args:
        key: The object.
        level: How many tuples it is in.
    """
    if type(key) is tuple:
        return level < MAX_DEPTH and all(is_key(item, level + 1) for item in key)
    return type(key) in _KEYS or isinstance(key, Enum) or (isinstance(key, np.generic) and not isinstance(key, np.void))
