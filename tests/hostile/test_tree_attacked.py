"""The control tree under attack, while ranks join it and talk: everybody gets in, the cost is bounded, few words are said."""

import asyncio
import contextlib
import socket
import struct

import msgspec
import pytest
from attackers import KINDS, attacked
from bounds import measured
from test_tree import Node, free_port, grow

from keepstep.runtime import tree_joining
from keepstep.runtime.tree_joining import AT_ONCE, MAX_STRANGERS, _Call

SIZE = 7


async def talk(nodes: list[Node], word: bytes) -> None:
    """Something to everybody, and an answer from each."""
    nodes[0].tree.broadcast(word)
    for node in nodes:
        await node.until(lambda node=node: node.down[-1:] == [(word, b"")])  # type: ignore[misc]
    for node in nodes:
        node.tree.send_up(word)
    await nodes[0].until(lambda: [w for _, w in nodes[0].up].count(word) == len(nodes))


async def close(nodes: list[Node]) -> None:
    await asyncio.gather(*(node.tree.close() for node in nodes))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("long headers", "truncated", "scan")])
def test_ranks_join_and_talk_whoever_knocks(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run(hello: bytes) -> None:
        port = free_port()
        root = Node(0, SIZE, port)
        nodes = [root]
        await root.tree.start(20)
        try:
            attack = attacked(kind, f"127.0.0.1:{port}", hello=hello)
            tried = await asyncio.to_thread(attack.__enter__)
            try:
                nodes += [Node(rank, SIZE, port) for rank in range(1, SIZE)]
                await asyncio.gather(*(node.tree.start(20) for node in nodes[1:]))
                for n in range(20):
                    await talk(nodes, b"word %d" % n)
            finally:
                await asyncio.to_thread(attack.__exit__, None, None, None)
            assert tried[0] >= 20
            assert not [lost for node in nodes for lost in node.lost]
        finally:
            await close(nodes)

    hello = asyncio.run(recorded())
    with measured(caplog) as cost:
        asyncio.run(run(hello))
    assert cost.descriptors <= MAX_STRANGERS + 6 * AT_ONCE, cost
    assert cost.rss_mib < 60, cost
    assert len(cost.lines) <= 8, cost.lines
    assert any(line.startswith("refused a control connection from 127.0.0.1") for line in cost.lines), cost.lines


async def recorded() -> bytes:
    """The whole of what a rank says when it joins, with a valid proof in it (of another tree of the same job)."""
    said = bytearray()
    over = asyncio.Event()

    async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)

        async def back() -> None:
            with contextlib.suppress(OSError):
                while piece := await theirs.read(4096):
                    writer.write(piece)

        task = asyncio.create_task(back())
        while piece := await reader.read(4096):
            said.extend(piece)
            ours.write(piece)
        task.cancel()
        ours.close()
        writer.close()
        over.set()

    port = free_port()
    root = Node(0, 2, port)
    await root.tree.start(20)
    relay = await asyncio.start_server(between, "127.0.0.1", 0)
    child = Node(1, 2, relay.sockets[0].getsockname()[1])
    await child.tree.start(20)
    await child.tree.close()
    await over.wait()
    relay.close()
    await root.tree.close()
    return bytes(said)


def test_a_recorded_greeting_takes_no_ranks_place() -> None:
    async def run() -> None:
        said = await recorded()
        port = free_port()
        root, child = Node(0, 2, port), Node(1, 2, port)
        try:
            await root.tree.start(20)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            await reader.read(500)
            assert await reader.read(500) == b"", "it is hung up on"
            assert root.tree._children[1].wire is None
            writer.close()
            await child.tree.start(20)
            await talk([root, child], b"word")
        finally:
            await close([root, child])

    asyncio.run(run())


def test_a_rank_that_had_to_make_room_tries_again() -> None:
    """Two connections are one too many here, and one says nothing: whoever comes first gets thrown out, and comes again."""

    async def run() -> None:
        port = free_port()
        nodes = [Node(rank, SIZE, port) for rank in range(SIZE)]
        await nodes[0].tree.start(20)
        assert nodes[0].tree._doorkeeper is not None
        nodes[0].tree._doorkeeper.strangers_max = 2
        silent = [socket.create_connection(("127.0.0.1", port))]
        try:
            await asyncio.gather(*(node.tree.start(20) for node in nodes[1:]))
            await talk(nodes, b"word")
        finally:
            silent[0].close()
            await close(nodes)

    asyncio.run(run())


@pytest.mark.parametrize("port", [-1, 65536, 1 << 40])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(_Call("j", "i", 1, port, "n", 1, 32)), type=_Call)


@pytest.mark.parametrize(
    "frame",
    [b"\xff" * 9, b"", b"u\x01", b"u\x02\0\0\0", b"o\x01\0\0", b"t", b"t\x01\x01\x07", b"t" + b"\x01" * 11, b"d"],
)
def test_a_child_that_sends_nonsense_is_lost_at_once(frame: bytes) -> None:
    async def run() -> None:
        nodes = await grow(2)
        try:
            wire = nodes[1].tree._parent.wire
            assert wire is not None
            wire.send(frame)
            await nodes[0].until(lambda: bool(nodes[0].lost))
            assert "malformed frame" in nodes[0].lost[0][1]
        finally:
            await close(nodes)

    asyncio.run(run())


@pytest.mark.parametrize(
    "frame", [b"", b"t\x01\x01" + bytes(8), b"d", b"d\0\0\xff\xff\xff\xff", b"d\x01\0\0\0\0\0", b"d\0\0\0\0\0\0more"]
)
def test_a_parent_that_sends_nonsense_is_lost_at_once(frame: bytes) -> None:
    """Too short, what only goes up, more common bytes than there are, no record where one is announced, and one where none is."""

    async def run() -> None:
        nodes = await grow(2)
        try:
            wire = nodes[0].tree._children[1].wire
            assert wire is not None
            wire.send(frame)
            await nodes[1].until(lambda: bool(nodes[1].lost))
            assert "malformed frame" in nodes[1].lost[0][1]
            assert not nodes[1].down
        finally:
            await close(nodes)

    asyncio.run(run())


def test_nobody_speaks_for_a_rank_of_another_child() -> None:
    """A child with the token can say what it likes of those below it, as often as it likes; the others are still waited for."""

    async def run() -> None:
        nodes = await grow(SIZE)
        try:
            wire = nodes[1].tree._parent.wire
            assert wire is not None
            for number in (5, 5, 5, 1 << 63, 5):
                wire.send(b"t" + struct.pack("<?BQ", True, 1, number))
            nodes[1].tree.send_up(b"end")
            await nodes[0].until(lambda: (1, b"end") in nodes[0].up)
            nodes[0].tree.say_together(1, 5, True)
            assert not nodes[0].together
        finally:
            await close(nodes)

    asyncio.run(run())


def test_half_open_callers_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_joining, "GREET_S", 0.1)

    async def run() -> None:
        nodes = await grow(2)
        try:
            doorkeeper = nodes[0].tree._doorkeeper
            assert doorkeeper is not None
            reader, writer = await asyncio.open_connection("127.0.0.1", doorkeeper.port)
            writer.write(b"\x10\x00")
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(100), 10) == b""
            assert not doorkeeper.strangers
            writer.close()
        finally:
            await close(nodes)

    asyncio.run(run())
