"""Messages between processes carry structs, bytes and descriptors, complete and in order."""

import os
import signal
import socket
import threading

import pytest
from msgspec import field

from lightning_sm._structs import Struct
from lightning_sm.data.ipc.messages import Message, MessageSocket, NothingReceivedError


class Place(Struct, frozen=True, tag=True):
    """A part of a message."""

    slot: int
    name: str


class Region(Struct, frozen=True, tag=True):
    """Another part, with the same fields."""

    slot: int
    name: str


class Full(Message, frozen=True):
    """A message with everything that a message may have."""

    place: Place
    content: bytes
    fds: tuple[int, ...] = ()
    places: list[Place] = field(default_factory=list)
    by_name: dict[str, Place] = field(default_factory=dict)
    either: Place | Region | None = None


class Number(Message, frozen=True):
    """A message with a number."""

    number: int = 0


@pytest.fixture
def ends():
    """Two connected message sockets."""
    own, there = map(MessageSocket, socket.socketpair())
    yield own, there
    own.close()
    there.close()


@pytest.fixture
def alarm():
    """A function that makes a signal handler raise TimeoutError after some seconds."""

    def expire(*_):
        raise TimeoutError("the user's")

    before = signal.signal(signal.SIGALRM, expire)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_messages_arrive_as_they_were_sent(ends):
    """Messages arrive complete and in order, with structs and bytes in them."""
    messages = [Full(Place(3, "\N{SNOWMAN}"), b"\x00\xff"), Number(1), Full(Place(0, ""), b"", places=[Place(1, "a")])]
    for message in messages:
        ends[0].send(message)
    assert [ends[1].receive(1.0) for _ in messages] == messages


def test_text_that_is_not_unicode_arrives_with_escapes(ends):
    """Text that is not Unicode arrives escaped, while bytes beside it arrive unchanged."""
    ends[0].send(Full(Place(3, "caf\udce9"), b"\x00\xff"))
    assert ends[1].receive(1.0) == Full(Place(3, r"caf\udce9"), b"\x00\xff")


@pytest.mark.parametrize("either", [Place(1, "a"), Region(1, "a"), None])
def test_a_part_of_a_message_keeps_its_class(ends, either):
    """A part keeps its class, even in a union or a dict."""
    message = Full(Place(0, ""), b"", by_name={"x": Place(2, "b")}, either=either)
    ends[0].send(message)
    assert ends[1].receive(1.0) == message


def test_two_kinds_of_one_name_are_refused():
    """Two kinds of message with one name are refused, because the receiver would rebuild the wrong one."""
    with pytest.raises(TypeError, match="two kinds of message are called Number"):
        type("Number", (Message,), {})


def test_a_message_larger_than_the_buffers_arrives(ends):
    """Messages larger than the buffers arrive complete, even while several threads send."""
    contents = [bytes([number]) * (3 << 20) for number in range(3)]
    threads = [threading.Thread(target=ends[0].send, args=(Full(Place(0, ""), content),)) for content in contents]
    for thread in threads:
        thread.start()
    received = [ends[1].receive(5.0).content for _ in contents]
    for thread in threads:
        thread.join()
    assert sorted(received) == contents


def test_descriptors_go_with_their_message(ends):
    """Each message has the descriptors that were sent with it, even if several messages are read at once."""
    pipes = [os.pipe() for _ in range(3)]
    for number, (readable, writable) in enumerate(pipes):
        os.write(writable, bytes([number]))
        ends[0].send(Full(Place(number, ""), b"", (readable,)))
        ends[0].send(Full(Place(number, ""), b""))
        os.close(readable)
    for number in range(3):
        message = ends[1].receive(1.0)
        assert message.place.slot == number
        assert os.read(message.fds[0], 1) == bytes([number])
        os.close(message.fds[0])
        assert ends[1].receive(1.0).fds == ()
    for _, writable in pipes:
        os.close(writable)


def test_pending_returns_what_is_complete(ends):
    """One read returns all complete messages."""
    for number in range(3):
        ends[0].send(Number(number))
    assert [message.number for message in ends[1].pending()] == [0, 1, 2]
    assert ends[1].buffered() == []


def test_silence_is_a_timeout(ends):
    """Waiting with a deadline raises NothingReceivedError if no message arrives."""
    with pytest.raises(NothingReceivedError):
        ends[1].receive(0.0)


def test_a_timeout_of_a_signal_handler_is_not_the_deadline_of_the_wait(ends, alarm):
    """A TimeoutError raised by a signal handler is not mistaken for the deadline."""

    def receive_until_alarm():
        alarm(0.01)
        ends[1].receive(60.0)

    with pytest.raises(TimeoutError, match="the user's"):
        receive_until_alarm()


def test_the_end_comes_after_the_last_message(ends):
    """Messages that were sent before the other end closed are received first; sending to a closed end fails."""
    ends[0].send(Number(7))
    ends[0].close()
    assert ends[1].receive(1.0) == Number(7)
    assert ends[1].receive(1.0) is None
    assert ends[1].is_at_end
    with pytest.raises(BrokenPipeError):
        ends[1].send(Number())
