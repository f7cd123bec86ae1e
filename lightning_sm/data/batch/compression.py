"""Compression of batches on their way, piece by piece: zstd or lz4, from the libraries of these names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from lightning_sm.errors import DataSettingsError, WireError

_MODULES = {"zstd": "zstandard", "lz4": "lz4.block"}


class Codec(Protocol):
    """Compresses and decompresses pieces of a batch."""

    def compress(self, piece: Any) -> bytes:
        """Return the compressed piece."""

    def decompress(self, payload: Any, size: int) -> bytes:
        """Return the piece, of exactly ``size`` bytes; raises WireError if it is anything else."""


def codec_of(name: str) -> Codec:
    """Return a codec.

    Args:
        name: "zstd" or "lz4".

    Raises:
        DataSettingsError: There is no such codec, or its library is not installed.
    """
    if name not in _MODULES:
        raise DataSettingsError(f"data_service.compression={name!r} is not one of {', '.join(_MODULES)}.")
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        package = _MODULES[name].partition(".")[0]
        raise DataSettingsError(
            f"data_service.compression={name!r} needs the package {package} on all hosts: pip install {package}."
        ) from error
    return _Zstd(module) if name == "zstd" else _LZ4(module)


class _Zstd:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._compressor = module.ZstdCompressor(level=1)
        self._decompressor = module.ZstdDecompressor()

    def compress(self, piece: Any) -> bytes:
        return bytes(self._compressor.compress(piece))

    def decompress(self, payload: Any, size: int) -> bytes:
        # decompress() allocates whatever size the frame claims, so that the claim is checked first.
        def unpack() -> bytes:
            if self._module.get_frame_parameters(payload).content_size != size:
                raise WireError(f"a compressed piece does not claim {size} bytes")
            return bytes(self._decompressor.decompress(payload))

        return _checked(unpack, size, self._module.ZstdError)


class _LZ4:
    def __init__(self, module: Any) -> None:
        self._module = module

    def compress(self, piece: Any) -> bytes:
        return bytes(self._module.compress(piece, store_size=False))

    def decompress(self, payload: Any, size: int) -> bytes:
        return _checked(
            lambda: bytes(self._module.decompress(payload, uncompressed_size=size)), size, self._module.LZ4BlockError
        )


def _checked(unpack: Callable[[], bytes], size: int, error_type: type[Exception]) -> bytes:
    try:
        piece = unpack()
    except error_type as error:
        raise WireError(f"a compressed piece is malformed: {error}") from error
    if len(piece) != size:
        raise WireError(f"a compressed piece has {len(piece)} bytes instead of {size}")
    return piece
