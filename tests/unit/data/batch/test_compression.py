"""Pieces come back as they were, and anything else is refused without allocating what it claims."""

import random
import sys

import pytest

from lightning_sm.data.batch.compression import codec_of
from lightning_sm.errors import DataSettingsError, WireError

PIECES = [b"", b"a", b"abc" * 1000, bytes(random.Random(1).randbytes(5000))]


@pytest.fixture
def codec():
    """The only one."""
    return codec_of("zstd")


@pytest.mark.parametrize("piece", PIECES, ids=len)
def test_a_piece_comes_back(codec, piece):
    """Empty, tiny, repetitive and random pieces."""
    assert codec.decompress(codec.compress(piece), len(piece)) == piece


@pytest.mark.parametrize("size", [0, 1, 2999, 3001, 1 << 20])
def test_another_size_is_refused(codec, size):
    """A piece that is shorter or longer than announced."""
    with pytest.raises(WireError, match=f"a compressed piece claims to have 3000 bytes instead of {size}"):
        codec.decompress(codec.compress(PIECES[2]), size)


def test_a_piece_without_its_size_is_refused(codec):
    """A frame may leave out how large its content is; nothing is allocated for it."""
    packed = codec._zstd.ZstdCompressor(write_content_size=False).compress(PIECES[2])
    with pytest.raises(WireError, match="instead of 3000"):
        codec.decompress(packed, 3000)


def test_mutated_pieces_are_refused_or_have_the_announced_size(codec):
    """Whatever comes from the network, there is an error or a piece of the right size."""
    chance = random.Random(1)
    refused = 0
    for _ in range(3000):
        piece = PIECES[chance.randrange(1, len(PIECES))]
        packed = bytearray(codec.compress(piece))
        for _ in range(chance.randint(1, 4)):
            packed[chance.randrange(len(packed))] = chance.randrange(256)
        try:
            assert len(codec.decompress(bytes(packed), len(piece))) == len(piece)
        except WireError:
            refused += 1
    assert refused > 100


def test_an_unknown_codec_is_an_error():
    """It names the codec that there is."""
    with pytest.raises(DataSettingsError, match=r"data_service\.compression='gzip' is not zstd\."):
        codec_of("gzip")


def test_a_missing_package_is_named(monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataSettingsError, match=r"needs the package zstandard on all hosts: pip install zstandard"):
        codec_of("zstd")
