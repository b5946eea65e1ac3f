"""Large buffers: real, writable, used again."""

import numpy as np

from keepstep.runtime.memory import SMALL, Spares, big_buffer, touch


def test_buffers_are_writable_and_as_large_as_asked() -> None:
    for size in (0, 1, SMALL - 1, SMALL, SMALL + 5):
        buffer = big_buffer(size)
        assert len(buffer) == size
        if size:
            np.frombuffer(buffer, np.uint8)[:] = 7
            assert buffer[size - 1] == 7
            touch(buffer)
            assert buffer[0] == 0


def test_a_spare_buffer_is_prepared_once_and_used_again() -> None:
    spares = Spares()
    spares.prepare(SMALL)
    spares.prepare(SMALL)
    first = spares.take(SMALL)
    first[0] = 1
    other = spares.take(SMALL)
    other[0] = 2
    assert first[0] == 1, "two takers never share"
    spares.give(first)
    again = spares.take(100)
    assert again[0] == 1, "the same memory"
    assert len(spares.take(SMALL)) == SMALL


def test_a_spare_that_is_too_small_is_no_use() -> None:
    spares = Spares()
    spares.give(big_buffer(10))
    assert len(spares.take(20)) == 20
    assert len(spares.take(5)) == 10
