"""The part in C: that it is there, that it does not come back to Python for every chunk, and that it must fit."""

import gc
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jobs import wait_until
from test_engine import KINDS, Buffer, Member, check, configure, kept, numbers

from keepstep.protocol.ids import QuorumId, Seq
from keepstep.runtime import native
from keepstep.runtime.engine_events import StepDone
from keepstep.runtime.native import NativeThread


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Member]]:
    made = [Member(r, replace(KINDS[request.param], chunk_bytes=1 << 16)) for r in range(2)]
    configure(made, 1)
    kept(made)
    yield made
    for member in made:
        member.engine.close()


def test_it_is_built_and_used(pair: list[Member]) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler, so nothing was built")
    assert native.library() is not None
    assert all(isinstance(m.engine._ring._movement, NativeThread) for m in pair)  # type: ignore[union-attr]


def test_python_is_asked_a_few_times_a_sum_not_once_a_chunk(pair: list[Member]) -> None:
    if native.library() is None:
        pytest.skip("nothing was built")
    arrays = numbers(2, sizes=(4_000_000,))
    buffers = [Buffer(mine[0]) for mine in arrays]
    calls = [0, 0]
    for i, member in enumerate(pair):
        movement = movement_of(member)

        def counted(i: int = i, step: Callable[[], None] = movement._step) -> None:
            calls[i] += 1
            step()

        movement._step = counted  # type: ignore[method-assign]
    for member, buffer in zip(pair, buffers, strict=True):
        member.engine.begin(Seq(1), QuorumId(1), 1)
        member.engine.submit(Seq(1), 0, buffer)
    for member in pair:
        assert member.next(StepDone) == StepDone(Seq(1))
        assert movement_of(member).chunks_sent > 200
    assert max(calls) < 20
    check([[buffer] for buffer in buffers], arrays)


def test_a_buffer_is_let_go_once_it_is_summed(pair: list[Member]) -> None:
    """Not at the next garbage collection: it may be as large as a model."""
    gc.collect()
    gc.disable()
    try:
        buffers = [Buffer(np.ones(100_000, np.float32), plain=plain) for plain in (True, False)]
        alive = [weakref.ref(buffer) for buffer in buffers]
        for member, buffer in zip(pair, buffers, strict=True):
            member.engine.begin(Seq(1), QuorumId(1), 1)
            member.engine.submit(Seq(1), 0, buffer)
        del buffer, buffers
        for member in pair:
            assert member.next(StepDone) == StepDone(Seq(1))
        wait_until(lambda: not any(ref() for ref in alive), 20)
    finally:
        gc.enable()


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("long pump_sizes(int which) { return which; }")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", other, source], check=True)
    for path in (other, tmp_path / "missing.so"):
        monkeypatch.setattr(native, "LIBRARY", path)
        native.library.cache_clear()
        assert native.library() is None
    monkeypatch.undo()
    native.library.cache_clear()


def movement_of(member: Member) -> NativeThread:
    ring = member.engine._ring
    assert ring is not None
    assert isinstance(ring._movement, NativeThread)
    return ring._movement
