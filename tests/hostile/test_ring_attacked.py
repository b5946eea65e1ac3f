"""The ring's listeners under attack, while honest members form rings and exchange: right bits, bounded cost, few words."""

import contextlib
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from attackers import KINDS, attacked
from bounds import measured
from test_engine import KINDS as SETTINGS
from test_engine import Member, check, configure, exchange, numbers

from keepstep.protocol.errors import StaleQuorum
from keepstep.protocol.ids import QuorumId
from keepstep.runtime import listener
from keepstep.runtime.engine_events import StepDone
from keepstep.runtime.handshake import connect_hello, greet
from keepstep.runtime.links import LinkSettings, shut
from keepstep.runtime.shared_memory import address

STEPS = 4


@pytest.fixture
def members() -> Iterator[list[Member]]:
    usual = LinkSettings(
        shared_memory=False
    )  # whoever still connects is silent, and strangers take their share of cores
    made = [Member(r, replace(SETTINGS["tcp"], link=usual)) for r in range(3)]
    yield made
    for member in made:
        member.engine.close()


def train(members: list[Member], first: int = 1, steps: int = STEPS) -> None:
    """Rings whose links are all new (no order comes twice in a row), and a step on each."""
    for quorum in range(first, first + steps):
        order = members if quorum % 2 else members[::-1]
        configure(order, quorum)
        arrays = numbers(len(order), quorum)
        buffers = exchange(order, quorum, quorum, arrays)
        for member in order:
            member.next(StepDone)
        check(buffers, arrays)


def port(member: Member) -> str:
    return f"{member.host}:{member.engine.port}"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("long headers", "half open")])
def test_strangers_do_not_disturb_an_exchange(
    members: list[Member], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(members, steps=2)
    with measured(caplog) as cost:
        with attacked(kind, port(members[0]), port(members[1]), hello=recorded(members, quorum=2)) as tried:
            train(members, first=3)
        assert min(tried) >= 20
    busy = 2 * listener.MAX_HANDSHAKES  # at the two that are attacked
    assert cost.descriptors <= 2 * busy + 40, cost
    assert cost.threads <= 2 * busy + 20, cost
    assert cost.rss_mib < 60, cost
    refusals = [line for line in cost.lines if line.startswith("refused a ring connection")]
    assert refusals, "nobody was told"
    assert len(refusals) <= 12, refusals
    assert not [line for line in cost.lines if "Traceback" in line or "thread failed" in line]


class Recorder:
    """Between an honest member and another: passes everything on, and keeps what the first one said."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.said = b""
        self._listen = socket.create_server(("127.0.0.1", 0))
        self.port = self._listen.getsockname()[1]
        self._to = to
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        theirs, _ = self._listen.accept()
        with self._listen, theirs, socket.create_connection(self._to) as ours:
            back = threading.Thread(target=self._copy, args=(ours, theirs))
            back.start()
            while piece := theirs.recv(4096):
                self.said += piece
                ours.sendall(piece)
            ours.shutdown(socket.SHUT_WR)
            back.join()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other end is through
            while piece := source.recv(4096):
                target.sendall(piece)

    def end(self) -> bytes:
        self._thread.join(10)
        return self.said


def recorded(members: list[Member], quorum: int) -> bytes:
    """The whole of what member 2 says to member 0 when it connects for the ring of now, with a valid proof in it."""
    to, me = members[0], members[2].identity
    recorder = Recorder((to.host, to.engine.port))
    hello = connect_hello(me, QuorumId(quorum), to.identity.replica_id, to.identity.incarnation)
    with socket.create_connection(("127.0.0.1", recorder.port)) as sock:
        greet(sock, hello, me.token)
    return recorder.end()


def test_a_recorded_handshake_is_of_no_use(members: list[Member]) -> None:
    """The listener's nonce is another one each time, so the proof does not fit. The ring goes on, and the member gets in."""
    train(members, steps=1)
    said = recorded(members, quorum=1)
    with socket.create_connection((members[0].host, members[0].engine.port)) as sock:
        sock.sendall(said)
        (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
        assert len(sock.recv(length, socket.MSG_WAITALL)) == length, "its nonce and proof"
        answer = sock.recv(4096)
        assert b"tokens differ" in answer
    train(members, first=2, steps=2)


def test_half_a_handshake_and_a_late_proof_harm_nobody(members: list[Member]) -> None:
    """A member that stops in the middle, and another life of it that then takes the place."""
    to, me = members[0], members[2].identity
    train(members, steps=1)
    with socket.create_connection((to.host, to.engine.port)) as sock:
        hello = connect_hello(me, QuorumId(1), to.identity.replica_id, to.identity.incarnation)
        said = recorded(members, quorum=1)
        sock.sendall(said[:-36])  # all but the proof
        train(members, first=2, steps=2)
        sock.sendall(said[-36:])
        assert b"tokens differ" in sock.recv(8192, socket.MSG_WAITALL)
    with socket.create_connection((to.host, to.engine.port)) as sock, pytest.raises(StaleQuorum):
        greet(sock, hello, me.token)


class Overrun:
    """In front of a member's port: the first connections have to make room, as in a flood, the later ones get through."""

    def __init__(self, member: Member, lost: int) -> None:
        self._listen = socket.create_server((member.host, 0))
        self.port = self._listen.getsockname()[1]
        self._to, self._lost = (member.host, member.engine.port), lost
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listen.accept()
                if self._lost > 0:
                    self._lost -= 1
                    sock.close()
                    continue
                other = socket.create_connection(self._to)
                for pair in ((sock, other), (other, sock)):
                    self._threads.append(threading.Thread(target=self._copy, args=pair))
                    self._threads[-1].start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        shut(target)

    def close(self) -> None:
        shut(self._listen)
        self._listen.close()
        for thread in self._threads:
            thread.join(10)


def test_a_member_that_had_to_make_room_tries_again(members: list[Member]) -> None:
    a, b = members[:2]
    front = Overrun(b, lost=3)
    try:
        there = replace(b.peer, endpoint=replace(b.peer.endpoint, ftar_port=front.port))
        a.engine.configure(QuorumId(1), [a.peer, there], 0)
        b.engine.configure(QuorumId(1), [a.peer, b.peer], 1)
        arrays = numbers(2)
        buffers = exchange([a, b], 1, 1, arrays)
        for member in (a, b):
            member.next(StepDone)
        check(buffers, arrays)
        assert front._lost == 0
    finally:
        for member in (a, b):
            member.engine.close()
        front.close()


def test_without_descriptors_the_listener_waits_and_says_so_once(
    members: list[Member], caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    refusals = members[0].engine._listener._refusals
    with attacked("half open", port(members[0])), caplog.at_level(logging.WARNING, "keepstep"):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir("/proc/self/fd")) + 2, hard))
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.open("/dev/null", os.O_RDONLY))
            deadline = time.monotonic() + 20
            while not any("Too many open files" in line for line in caplog.messages):
                assert time.monotonic() < deadline, "the listener never ran out of descriptors"
                threading.Event().wait(0.01)
            before = refusals.count
            threading.Event().wait(0.5)
            assert refusals.count - before <= 40, "it tries again and again"
        finally:
            for fd in fillers:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len([line for line in caplog.messages if "Too many open files" in line]) == 1
    train(members, steps=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_unix_socket_that_somebody_else_has_taken_costs_shared_memory_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another user may have the name first. It is not greeted, gets no memory, and the ring uses TCP."""
    a, b = Member(0, SETTINGS["tcp"]), Member(1)
    squatter = socket.socket(socket.AF_UNIX)
    squatter.bind(address(a.host, a.engine.port))
    squatter.settimeout(10)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)  # `listen` is what makes it that user's
        squatter.listen()
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with caplog.at_level(logging.WARNING, "keepstep"):
            train([a, b], steps=2)
        theirs, _ = squatter.accept()
        with theirs:
            assert theirs.recv(100) == b"", "the squatter was spoken to"
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(child, 0)
        squatter.close()
        for fd in (*ready, *go_on):
            os.close(fd)
        a.engine.close()
        b.engine.close()
