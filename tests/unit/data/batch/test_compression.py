"""Pieces come back as they were, and anything else is refused without allocating what it claims."""

import random
import sys
from typing import get_args

import pytest

from lightning_sm.data.batch.compression import codec_of
from lightning_sm.data.settings import Compression
from lightning_sm.errors import DataSettingsError, WireError

NAMES = get_args(Compression)
PIECES = [b"", b"a", b"abc" * 1000, bytes(random.Random(1).randbytes(5000))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece", PIECES, ids=len)
def test_a_piece_comes_back(name, piece):
    """Empty, tiny, repetitive and random pieces."""
    codec = codec_of(name)
    assert codec.decompress(codec.compress(piece), len(piece)) == piece


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 1, 2999, 3001, 1 << 40])
def test_another_size_is_refused(name, size):
    """A piece that is shorter or longer than announced, or claims to be."""
    codec = codec_of(name)
    with pytest.raises(WireError, match="a compressed piece"):
        codec.decompress(codec.compress(PIECES[2]), min(size, 1 << 20))


@pytest.mark.parametrize("name", NAMES)
def test_mutated_pieces_are_refused_or_have_the_announced_size(name):
    """Whatever comes from the network, there is an error or a piece of the right size."""
    chance, codec = random.Random(name), codec_of(name)
    for _ in range(3000):
        piece = PIECES[chance.randrange(1, len(PIECES))]
        packed = bytearray(codec.compress(piece))
        for _ in range(chance.randint(1, 4)):
            packed[chance.randrange(len(packed))] = chance.randrange(256)
        try:
            assert len(codec.decompress(bytes(packed), len(piece))) == len(piece)
        except WireError:
            continue


def test_the_settings_and_the_codecs_have_the_same_names():
    """Every name that a user may set has a codec of its own, and the error for another name lists them all."""
    assert len({type(codec_of(name)) for name in NAMES}) == len(NAMES)
    with pytest.raises(DataSettingsError, match=rf"'gzip' is not one of {', '.join(NAMES)}\."):
        codec_of("gzip")


def test_a_missing_package_is_named(monkeypatch):
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DataSettingsError, match=r"needs the package zstandard on all hosts: pip install zstandard"):
        codec_of("zstd")
