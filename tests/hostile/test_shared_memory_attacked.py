"""What somebody on this host may pass over the Unix socket instead of the shared memory of a link."""

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable

import pytest

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.ring import Shape
from keepstep.runtime import shared_memory
from keepstep.runtime.handshake import welcome
from keepstep.runtime.listener import same_user
from keepstep.runtime.shared_memory import SLOTS, Segment

SHAPE = Shape(1 << 12, 2)
SIZE = SHAPE.chunk_bytes * SLOTS
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory(size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


OFFERS: dict[str, Callable[[], tuple[bytes, list[int]]]] = {
    "nothing": lambda: (b"m", []),
    "another message": lambda: (b"x", [memory(SIZE)]),
    "two": lambda: (b"m", [memory(SIZE), memory(SIZE)]),
    "many": lambda: (b"m", [memory(SIZE) for _ in range(40)]),
    "too small": lambda: (b"m", [memory(SIZE - 1)]),
    "absurdly large": lambda: (b"m", [memory(1 << 45)]),
    "not sealed": lambda: (b"m", [memory(SIZE, 0)]),
    "not writable": lambda: (b"m", [memory(SIZE, SEALS | fcntl.F_SEAL_WRITE)]),
    "a file": lambda: (b"m", [a_file()]),
    "a directory": lambda: (b"m", [os.open("/", os.O_RDONLY)]),
    "a pipe": lambda: (b"m", [os.dup(0)]),
    "the end": lambda: (b"", []),
}


@pytest.mark.parametrize("offer", OFFERS)
def test_what_is_not_a_segment_is_refused_and_nothing_stays_open(offer: str) -> None:
    message, fds = OFFERS[offer]()
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        if message:
            socket.send_fds(theirs, [message], fds)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((RemoteProtocolError, OSError)):
            shared_memory.accept(ours, SHAPE)
    for fd in fds:
        os.close(fd)
    assert set(os.listdir("/proc/self/fd")) <= before, "a descriptor that was passed is still open"


def test_a_segment_cannot_be_cut_off_under_its_receiver() -> None:
    fd = memory(SIZE)
    segment = Segment(os.dup(fd), SHAPE)
    try:
        for size in (0, SIZE + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        segment.slot(1, 10)[:] = b"0123456789"
        assert bytes(segment.slot(3, 10)) == b"0123456789"
    finally:
        os.close(fd)


def test_descriptors_that_come_with_a_handshake_are_not_kept() -> None:
    """A stranger sends some with each byte of its hello, to fill the table of the process that reads it."""
    from test_engine import Member

    member = Member(0)
    try:
        before = set(os.listdir("/proc/self/fd"))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(5)
            for _ in range(20):
                fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
                socket.send_fds(theirs, [b"\x10\0\0\0"], fds)
                for fd in fds:
                    os.close(fd)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises((RemoteProtocolError, OSError)):
                welcome(ours, member.identity, lambda hello: "")
            assert same_user(ours)
        assert set(os.listdir("/proc/self/fd")) <= before
    finally:
        member.engine.close()
