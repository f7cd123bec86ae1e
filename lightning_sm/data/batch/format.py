"""The format of a batch: what encoding and decoding share.

The header is JSON, ``["lsm-batch", version, bytes used, tree]``. In the tree null, booleans, strings and ordinary
numbers are themselves; everything else is a list whose first item names its kind (see ``encode._Encoder`` and
``decode._Decoder``). Tensors and arrays are a dtype, a shape and an offset into the slot. Nothing is pickled, and
decoding checks every number before using it, because messages come from other hosts.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 64
"""Levels of nested containers that a batch may have."""

MAX_LISTS = 2**22
"""Brackets that a header may have: a list takes 5 bytes in the header, but more than 100 as nodes and objects."""

FORMAT = "lsm-batch"
VERSION = 1
REQUIRES_GRAD = 1  # flags of a tensor
IS_PARAMETER = 2
MAX_DIMENSIONS = 64
MAX_DTYPE_LEVELS = 8
INT64 = 2**63

# All dtypes of this version of torch but the quantized ones, whose tensors also have a scale.
_DTYPE = re.compile(r"bool|bfloat16|b?complex\d+|float\d+(_\w+)?|u?int\d+|bits\w+")
DTYPES = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype) and _DTYPE.fullmatch(name)
}
NAMES_OF_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUV]\d{1,9}|[<>|=][mM]8(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
# Default factories that a defaultdict keeps. Others are the user's code, which no message may call.
FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)},
}
_KEYS = frozenset({str, bytes, int, float, bool, complex, type(None)})


def is_key(key: Any, level: int = 0) -> bool:
    """Return whether an object, nested in ``level`` tuples, may be a dictionary's key or a set's member."""
    if type(key) is tuple:
        return level < MAX_DEPTH and all(is_key(item, level + 1) for item in key)
    return type(key) in _KEYS or isinstance(key, Enum) or (isinstance(key, np.generic) and not isinstance(key, np.void))
