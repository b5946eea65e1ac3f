"""A link with a rate and a delay, in user space, since not every kernel has netem: a relay between two TUN devices.

The devices hand over what TCP wants to send in pieces of up to 64 KB (segmentation offload), so that Python is fast enough. A
piece counts as the Ethernet frames it would be. What would wait longer than QUEUE_S is dropped, as by a router.

Run as a process by `allreduce_limited.py`: RATE (bytes a second), DELAY (seconds, one way), two inherited file descriptors.
"""

import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VNET_HEADER = struct.Struct("<BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
ETHERNET = 14
QUEUE_S = 0.1
PR_SET_PDEATHSIG = 1


def open_tun(name: str) -> int:
    """A TUN device in the namespace of the calling thread, which goes away when the descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return fd


def wire_bytes(piece: bytes) -> int:
    """What the piece is on an Ethernet: each of its segments has headers of its own."""
    _, gso_type, _, gso_size, _, _ = VNET_HEADER.unpack_from(piece)
    length = len(piece) - VNET_HEADER.size
    if not gso_type or not gso_size:
        return length + ETHERNET
    ip = (piece[VNET_HEADER.size] & 15) * 4
    headers = ip + (piece[VNET_HEADER.size + ip + 12] >> 4) * 4
    segments = -(-(length - headers) // gso_size)
    return length + (segments - 1) * headers + segments * ETHERNET


class Direction:
    """From one device to the other."""

    def __init__(self, source: int, target: int, rate: float, delay_s: float) -> None:
        self.source, self.target, self.rate, self.delay_s = source, target, rate, delay_s
        self.free_at = 0.0  # when the line has sent what it was given
        self.flying: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        while True:
            try:
                piece = os.read(self.source, 1 << 17)
            except BlockingIOError:
                return
            if self.free_at - now > QUEUE_S:
                continue
            self.free_at = max(now, self.free_at) + wire_bytes(piece) / self.rate
            self.flying.append((self.free_at + self.delay_s, piece))

    def deliver(self, now: float) -> None:
        while self.flying and self.flying[0][0] <= now:
            try:
                os.write(self.target, self.flying.popleft()[1])
            except OSError:
                pass  # the device takes no more, or is not up yet: lost, as on a real line


def main() -> None:
    rate, delay_s, a, b = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    directions = (Direction(a, b, rate, delay_s), Direction(b, a, rate, delay_s))
    while True:
        due = min((d.flying[0][0] for d in directions if d.flying), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready = select.select([a, b], [], [], wait)[0]
        now = time.monotonic()
        for direction in directions:
            if direction.source in ready:
                direction.take(now)
            direction.deliver(now)


if __name__ == "__main__":
    main()
