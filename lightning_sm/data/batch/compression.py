"""Compression of batches in transit, piece by piece. Each codec comes from a package that is imported only for it."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lightning_sm.errors import DataSettingsError, WireError


class Codec(ABC):
    """Compresses and decompresses pieces of a batch. Creating one raises ImportError without its package.

    Attributes:
        package: Name of the package to install.
        error: What the package raises for malformed data.
    """

    package: ClassVar[str]
    error: type[Exception]

    @abstractmethod
    def compress(self, piece: Any) -> bytes:
        """Return the compressed piece."""

    def decompress(self, payload: Any, size: int) -> bytes:
        """Return the piece.

        Raises:
            WireError: The payload is malformed, or is not a piece of exactly ``size`` bytes.
        """
        try:
            piece = self._unpack(payload, size)
        except self.error as error:
            raise WireError(f"a compressed piece is malformed: {error}") from error
        if len(piece) != size:
            raise WireError(f"a compressed piece has {len(piece)} bytes instead of {size}")
        return piece

    @abstractmethod
    def _unpack(self, payload: Any, size: int) -> bytes:
        """Decompress without allocating more than ``size`` bytes, whatever the payload claims."""


class _Zstd(Codec):
    package = "zstandard"

    def __init__(self) -> None:
        self._zstd = importlib.import_module("zstandard")
        self.error = self._zstd.ZstdError
        self._compressor = self._zstd.ZstdCompressor(level=1)
        self._decompressor = self._zstd.ZstdDecompressor()

    def compress(self, piece: Any) -> bytes:
        return bytes(self._compressor.compress(piece))

    def _unpack(self, payload: Any, size: int) -> bytes:
        # decompress() allocates the size that the frame claims.
        if self._zstd.get_frame_parameters(payload).content_size != size:
            raise WireError(f"a compressed piece does not claim to have {size} bytes")
        return bytes(self._decompressor.decompress(payload))


class _LZ4(Codec):
    package = "lz4"

    def __init__(self) -> None:
        self._block = importlib.import_module("lz4.block")
        self.error = self._block.LZ4BlockError

    def compress(self, piece: Any) -> bytes:
        return bytes(self._block.compress(piece, store_size=False))

    def _unpack(self, payload: Any, size: int) -> bytes:
        return bytes(self._block.decompress(payload, uncompressed_size=size))


# The names are those of ``settings.Compression``.
_CODECS: dict[str, type[Codec]] = {"zstd": _Zstd, "lz4": _LZ4}


def codec_of(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        DataSettingsError: There is no such codec, or its package is not installed.
    """
    if name not in _CODECS:
        raise DataSettingsError(f"data_service.compression={name!r} is not one of {', '.join(_CODECS)}.")
    codec = _CODECS[name]
    try:
        return codec()
    except ImportError as error:
        raise DataSettingsError(
            f"data_service.compression={name!r} needs the package {codec.package} on all hosts: pip install "
            f"{codec.package}."
        ) from error
