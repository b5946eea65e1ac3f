"""Network namespaces without a name, held open by a file descriptor of this process.

Whatever is set or made inside (sysctls, veth and TUN devices, queues) ends with the process that holds it, however that ends, and
the rest of the machine sees nothing of it. Needs root.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, SIOCGIFFLAGS, IFF_UP = 0x8914, 0x8913, 1
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")  # one list for all namespaces

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def why_not() -> str:
    """Why this process cannot make namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        Namespace().close()
    except OSError as error:
        return f"network namespaces do not work here ({error})"
    return ""


def default_congestion() -> str:
    return CONGESTION.read_text().strip()


def available_congestion() -> list[str]:
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


class Namespace:
    """Its loopback is up. Processes started inside `entered()` belong to it."""

    def __init__(self) -> None:
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _checked(_libc.unshare(CLONE_NEWNET), "unshare")
        try:
            self.fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            _up("lo")
        finally:
            _checked(_libc.setns(back, CLONE_NEWNET), "setns")
            os.close(back)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread, and what it starts, is inside."""
        back = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        _checked(_libc.setns(self.fd, CLONE_NEWNET), "setns")
        try:
            yield
        finally:
            _checked(_libc.setns(back, CLONE_NEWNET), "setns")
            os.close(back)

    def run(self, command: str) -> None:
        """An `ip` or `tc` command inside."""
        with self.entered():
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"`{command}` failed: {done.stderr.strip()}")

    def set_congestion(self, algorithm: str) -> None:
        """For every connection made from now on that does not choose its own.

        A namespace may only be given an algorithm that unprivileged processes may choose, so it is one for that moment.
        """
        allowed = ALLOWED.read_text()
        try:
            if algorithm not in allowed.split():
                ALLOWED.write_text(f"{allowed.strip()} {algorithm}")
            with self.entered():
                CONGESTION.write_text(algorithm)
        finally:
            if algorithm not in allowed.split():
                ALLOWED.write_text(allowed)

    def close(self) -> None:
        os.close(self.fd)


def _up(device: str) -> None:
    """`ip link set DEVICE up`, in the namespace of the calling thread."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", device.encode(), 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", device.encode(), flags | IFF_UP))
