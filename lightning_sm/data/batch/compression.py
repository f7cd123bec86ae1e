"""Compression of batches in transit, piece by piece. The package for it is imported only where it is used."""

from __future__ import annotations

import importlib
from typing import Any, get_args

from lightning_sm.data.settings import Compression
from lightning_sm.errors import DataSettingsError, WireError


class ZstdCodec:
    """Compresses and decompresses pieces of a batch by Zstandard.

    Raises:
        ImportError: The package zstandard is not installed.
    """

    def __init__(self) -> None:
        self._zstd = importlib.import_module("zstandard")
        self._compressor = self._zstd.ZstdCompressor(level=1)
        self._decompressor = self._zstd.ZstdDecompressor()

    def compress(self, piece: Any) -> bytes:
        """Return the compressed piece."""
        return bytes(self._compressor.compress(piece))

    def decompress(self, payload: Any, size: int) -> bytes:
        """Return the piece, without allocating more than ``size`` bytes, whatever the payload claims.

        Raises:
            WireError: The payload is malformed, or is not a piece of exactly ``size`` bytes.
        """
        try:
            # Zstandard allocates the size that the frame claims, and then fails if the content has another one.
            claimed = self._zstd.get_frame_parameters(payload).content_size
            if claimed != size:
                raise WireError(f"a compressed piece claims to have {claimed} bytes instead of {size}")
            return bytes(self._decompressor.decompress(payload))
        except self._zstd.ZstdError as error:
            raise WireError(f"a compressed piece is malformed: {error}") from error


def codec_of(name: str) -> ZstdCodec:
    """Return the codec of a name.

    Raises:
        DataSettingsError: There is no such codec, or its package is not installed.
    """
    if name not in get_args(Compression):
        raise DataSettingsError(f"data_service.compression={name!r} is not {' or '.join(get_args(Compression))}.")
    try:
        return ZstdCodec()
    except ImportError as error:
        raise DataSettingsError(
            f"data_service.compression={name!r} needs the package zstandard on all hosts: pip install zstandard."
        ) from error
