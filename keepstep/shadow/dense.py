"""Makes a forked rank copy fewer of the pages that it shares with the process it was forked from.

What a rank makes would go to where there is room on pages that are in use, and each of those would be copied for it. So the
room is taken before the fork, and what a rank makes goes to fresh pages, side by side. Not thread-safe.
"""

import ctypes
import gc
import sys
from collections.abc import Callable

POOL_BYTES, SMALL_MAX, STEP = 16 << 10, 512, 16  # of Python's own allocator (Objects/obmalloc.c)
PER_SIZE_MAX = 4 << 20  # bytes that may be taken for one size of object
HEAP_MAX, HEAP_STEP = 64 << 10, 2 << 10  # of malloc's free pieces: larger ones fill whole pages anyway

_taken: list[object] = []  # never freed


def fill() -> None:
    """Takes what is free on pages that are in use."""
    gc.collect()
    for size in range(STEP, SMALL_MAX + 1, STEP):
        _taken.append(_fill_pools(size, _maker(size)))
    _fill_heap()


def _maker(size: int) -> Callable[[], object]:
    """Makes objects that take exactly `size` bytes."""
    if size == 16:
        return object
    if size == 32:
        return lambda: int.from_bytes(b"keeps", "little")  # two digits
    return lambda: bytes(size - sys.getsizeof(b""))


def _fill_pools(size: int, make: Callable[[], object]) -> list[object]:
    """Until objects come one after the other, from a pool that was empty."""
    taken: list[object] = []
    needed, run, last = POOL_BYTES // size // 4, 0, 0
    while run < needed and len(taken) * size < PER_SIZE_MAX:
        taken.append(make())
        at = id(taken[-1])
        run = run + 1 if 0 < at - last <= 8 * size else 0  # our own counters are such objects, too
        last = at
    return taken


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _fill_heap() -> None:
    """Takes malloc's free pieces, large ones first, until it gives what lies behind all of them."""
    libc = ctypes.CDLL(None)
    try:
        info, end = libc.mallinfo2, libc.sbrk
    except AttributeError:  # another C library: then its holes stay
        return
    info.restype, end.restype = _MallInfo, ctypes.c_void_p
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    top = end(0) - info().keepcost
    size = HEAP_MAX
    while size >= STEP:
        at = libc.malloc(size)
        if at is None or at + size >= top:
            libc.free(at)
            size -= HEAP_STEP if size > 2 * HEAP_STEP else STEP
