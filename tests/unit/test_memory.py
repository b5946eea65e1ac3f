"""Large buffers: real, writable, used again. Small ones: their pages are kept."""

import platform
import subprocess
import sys

import numpy as np
import pytest

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


STEPS = """
import resource
from keepstep.runtime.memory import keep_freed_memory
if {keep}:
    keep_freed_memory()
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x") * (1 << 20) for _ in range(20)]
    blocks.reverse()
    while blocks:
        blocks.pop()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc forgets")
def test_what_a_step_frees_is_there_for_the_next_one() -> None:
    def faults_of_a_step(keep: bool) -> int:
        told = subprocess.run(
            [sys.executable, "-c", STEPS.format(keep=keep)], capture_output=True, text=True, check=True
        )
        return int(told.stdout)

    assert faults_of_a_step(keep=True) < 100
    if faults_of_a_step(keep=False) < 1000:
        pytest.skip("this machine's malloc keeps it by itself (huge pages, or a setting in the environment)")
