"""What a log shows of processes that fail: an exception once and in full, what repeats it in a line."""

from __future__ import annotations

import pickle

import pytest

from lightning_sm.launcher.log_dedup import Condensed, CondensedBytes

_CAUSE = """\
Traceback (most recent call last):
  File "/code/train.py", line 30, in <module>
    main()
    ^^^^^^
  File "/code/model.py", line 12, in forward
    raise ValueError("bad shape")
ValueError: bad shape
"""
_USAGE = """\
usage: train.py [-h] [--config CONFIG]
                {fit,test} ...
tip: For details of accepted options run: train.py --help
error: Parser key "config":

  - Expected a path but nix.yaml is not accessible
"""
_CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"


def _by_rank(text, rank):
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def _shown(*pieces):
    """What a launcher shows of its script's stderr, with the notes at its end."""
    condensed = CondensedBytes()
    return "".join(condensed.feed(piece.encode()).decode() for piece in pieces) + condensed.flush().decode()


def test_what_is_no_failure_passes_unchanged():
    """Lines, progress bars, bytes that are no UTF-8 and lines without an end come out as they came in."""
    condensed = CondensedBytes()
    data = b"Epoch 0\n\r 50%|## |\r100%|###|\n\xff\xfe\nusage of memory: 3 GB\n  indented\n\nno end"
    assert condensed.feed(data) == data
    assert condensed.flush() == b""
    assert condensed.feed(b"Trace") == b""  # it may become a traceback
    assert condensed.feed(b"s of copper\n") == b"Traces of copper\n"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_cause_is_shown_whole_however_its_bytes_arrive(size):
    """Also a chain of exceptions, and a progress bar before it."""
    text = f"Epoch 0: 50%|### {_CAUSE}{_CHAIN}{_CAUSE.replace('bad', 'worse')}bye\n"
    assert _shown(*(text[start : start + size] for start in range(0, len(text), size))) == text


def test_the_same_traceback_of_other_ranks_is_counted():
    """One rank's is shown in full, those of all others are one line, also where the ranks write in turn."""
    turns = "".join(f"[rank{rank}]: {line}\n" for line in _CAUSE.splitlines() for rank in (1, 2, 3))
    text = _shown(_by_rank(_CAUSE, 0), turns)
    assert (
        text
        == _by_rank(_CAUSE, 0) + "ValueError: bad shape (repeated 3 times, by rank1, rank2, rank3; not shown again)\n"
    )


def test_a_progress_bar_before_a_rank_mark_changes_no_order():
    """The lines come out as they came in."""
    text = "Epoch 0: 50%|### " + _by_rank(_CAUSE, 0)
    assert _shown(text) == text


def test_what_differs_is_shown():
    """Another message or another line of code is another failure."""
    others = _CAUSE.replace("bad shape", "no shape") + _CAUSE.replace("line 12", "line 13")
    assert _shown(_CAUSE, others) == _CAUSE + others


def test_lines_behind_a_repeated_block_are_left_out_as_far_as_they_are_the_same():
    """The rest of a message, such as a table; what is new is shown."""
    table = "host    role\n------  ----\n\nalgo-1  data\n"
    text = _shown(_CAUSE + table, _CAUSE + table + "new\n")
    assert text == _CAUSE + table + "new\nValueError: bad shape (repeated once; not shown again)\n"


def test_usage_texts_of_several_hosts_are_shown_once():
    """With the error and its explanation; the others are counted, with the names of their hosts."""
    condensed = Condensed(only_across_sources=True)
    lines = [f"{line}\n".encode() for line in _USAGE.splitlines()]
    shown = {host: [out for line in lines for out in condensed.feed(line, host)] for host in ("a", "b", "c")}
    assert shown == {"a": lines, "b": [], "c": []}
    assert condensed.take_repeats() == ['error: Parser key "config": (repeated 2 times, by b, c; not shown again)']
    assert condensed.take_repeats() == []


def test_across_hosts_nothing_else_is_left_out():
    """What a host repeats itself was condensed on that host already."""
    condensed = Condensed(only_across_sources=True)
    lines = [f"{line}\n".encode() for line in (_CAUSE + _CAUSE).splitlines()]
    assert [out for line in lines for out in condensed.feed(line, "a")] == lines


@pytest.mark.parametrize("text", ["Traceback (most recent call last):\nno frame\n", "usage: x\n  y\nno error\n"])
def test_what_only_begins_like_a_block_is_shown(text):
    """As soon as that is known, and what is incomplete when the process pauses."""
    condensed = CondensedBytes()
    assert condensed.feed(text.encode()).decode() == text
    first = text.splitlines(keepends=True)[0]
    assert condensed.feed(first.encode()) == b""
    assert condensed.flush().decode() == first


def test_old_blocks_are_forgotten():
    """A script that logs exceptions for days does not fill the memory."""
    condensed = CondensedBytes()
    for number in range(300):
        condensed.feed(_CAUSE.replace("bad shape", f"bad {number}").encode())
    assert condensed.feed(_CAUSE.replace("bad shape", "bad 299").encode()) == b""
    assert condensed.feed(_CAUSE.replace("bad shape", "bad 0").encode()) != b""


_WARNING = '/code/train.py:7: UserWarning: small batch\n  warnings.warn("small batch")\n'


@pytest.mark.parametrize(
    "warning", [_WARNING, "/lib/pytorch_lightning/utilities/_pytree.py:21: `isinstance()` is old.\n"]
)
def test_the_same_warning_of_several_ranks_is_shown_once(warning):
    """With its line of code, and then the ranks that gave it, too; what they print besides is shown."""
    pieces = (_by_rank(warning, 0), "step 1\n", _by_rank(warning, 1), "step 1\n", _by_rank(warning, 3))
    text = _shown(*pieces)
    note = f"{warning.splitlines()[0]} (repeated 2 times, by rank1, rank3; not shown again)\n"
    assert text == _by_rank(warning, 0) + "step 1\nstep 1\n" + note


def test_lines_of_a_log_are_shown_each_time():
    """Also those that begin with a place in the code."""
    lines = 3 * "/code/train.py:7: step done\n"
    assert _shown(lines) == lines


def test_warnings_that_differ_are_shown():
    """Another text, or another place; also one without its line of code, and one behind a progress bar."""
    others = [_WARNING.replace("small", "large"), _WARNING.replace(":7:", ":8:"), "/x.py:1: FutureWarning: soon\n"]
    text = "".join([_WARNING, *others, "Epoch 0: 50%|## " + _WARNING])
    assert _shown(text) == text


def test_a_warning_that_never_ends_takes_no_memory():
    """A script may give one in each step for days, and print so much that no pause comes."""
    condensed = Condensed()
    for _ in range(20_000):
        for line in _WARNING.splitlines(keepends=True):
            condensed.feed(line.encode())
    assert len(pickle.dumps(vars(condensed))) < 10_000
    assert condensed.take_repeats() == [
        "/code/train.py:7: UserWarning: small batch (repeated 19999 times; not shown again)"
    ]


def test_the_same_warning_of_several_hosts_is_shown_once():
    """Each host's own launcher has condensed those of its ranks."""
    condensed = Condensed(only_across_sources=True)
    lines = [line.encode() for line in _WARNING.splitlines(keepends=True)]
    shown = {host: [out for line in lines for out in condensed.feed(line, host)] for host in ("a", "b")}
    assert shown == {"a": lines, "b": []}
    assert condensed.take_repeats() == [
        "/code/train.py:7: UserWarning: small batch (repeated once, by b; not shown again)"
    ]
