"""The ring schedule against a dumb simulation: every member ends with the same, complete sums."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.protocol.errors import ConfigError, LocalProtocolError
from keepstep.protocol.exchange import Deadline, Exchange
from keepstep.protocol.ring import Shape, reduction_order, rounds, schedule, segment


def simulate(elements: int, itemsize: int, size: int, shape: Shape) -> list[list[tuple[int, ...]]]:
    """Runs all members on wires of tokens; an element's value is the tuple of members added up, in order."""
    nbytes = elements * itemsize
    members = [Exchange(nbytes=nbytes, itemsize=itemsize, size=size, position=p, shape=shape) for p in range(size)]
    outputs: list[list[tuple[int, ...]]] = [[()] * elements for _ in range(size)]
    wires: list[deque[list[tuple[int, ...]]]] = [deque() for _ in range(size)]
    credits = [0] * size  # of the link that ends at member p
    moved = True
    while moved:
        moved = False
        for p, me in enumerate(members):
            credits[p] += me.grant()
            assert credits[p] + len(wires[p]) <= shape.window, "more than a window in flight"
            following = (p + 1) % size
            while not me.sent_all and credits[following] and (send := me.next_send()) is not None:
                a, b = send.lo // itemsize, send.hi // itemsize
                data = [(p,)] * (b - a) if send.after is None else outputs[p][a:b]
                wires[following].append(list(data))
                credits[following] -= 1
                me.on_sent()
                moved = True
            while wires[p]:
                data, expected = wires[p].popleft(), me.next_receive()
                a, b = expected.lo // itemsize, expected.hi // itemsize
                assert len(data) == b - a
                outputs[p][a:b] = [(*x, p) for x in data] if expected.reduce else data
                me.on_received()
                moved = True
    assert all(m.sent_all and m.received_all for m in members), "the ring is stuck"
    return outputs


@settings(max_examples=150, deadline=None)
@given(
    elements=st.integers(0, 200),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    size=st.integers(2, 7),
    chunk=st.sampled_from([16, 32, 64]),
    window=st.integers(1, 4),
)
def test_every_member_gets_every_sum_once(elements: int, itemsize: int, size: int, chunk: int, window: int) -> None:
    shape = Shape(chunk, window)
    outputs = simulate(elements, itemsize, size, shape)
    assert all(out == outputs[0] for out in outputs)
    expected: list[tuple[int, ...]] = []
    for lo, hi in rounds(elements * itemsize, itemsize, size, shape):
        for index in range(size):
            a, b = segment(lo, hi, itemsize, size, index)
            expected += [reduction_order(size, index)] * ((b - a) // itemsize)
    assert outputs[0] == expected


def test_bytes_on_the_wire_are_optimal() -> None:
    sends, receives = schedule(1 << 20, 4, 4, 1, Shape(1 << 14, 4))
    assert sum(s.hi - s.lo for s in sends) == 2 * 3 * (1 << 20) // 4
    assert sum(r.hi - r.lo for r in receives) == 2 * 3 * (1 << 20) // 4


def test_a_bad_shape_is_refused() -> None:
    for chunk, window in ((8, 1), (24, 1), (16, 0)):
        with pytest.raises(ConfigError, match="chunk_bytes"):
            Shape(chunk, window)


def test_more_chunks_than_there_are_is_a_bug() -> None:
    exchange = Exchange(nbytes=0, itemsize=4, size=2, position=0, shape=Shape(16, 1))
    with pytest.raises(LocalProtocolError):
        exchange.on_sent()
    with pytest.raises(LocalProtocolError):
        exchange.on_received()


def test_the_deadline_follows_experience() -> None:
    deadline = Deadline(floor=2.0, ceiling=60.0, multiple=10.0, history=2)
    assert deadline.seconds == 60.0
    deadline.observe(0.01)
    assert deadline.seconds == 2.0
    deadline.observe(1.0)
    assert deadline.seconds == 10.0
    deadline.observe(20.0)
    assert deadline.seconds == 60.0
