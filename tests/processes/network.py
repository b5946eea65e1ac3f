"""Hosts on one switch, on this machine: network namespaces without a name, whose links can be cut, slowed and black-holed.

Everything that is made here belongs to namespaces that end with the process that holds them, however that ends.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import pytest

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
NOWHERE = "02:00:00:00:de:ad"


class Network:
    """`count` hosts, 10.77.0.1 and up, in a `with` block. Skips the test where that cannot be made."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._fds: list[int] = []  # of the switch, then of the hosts

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> "Network":
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        try:
            for _ in range(self.count + 1):
                self._fds.append(apart(_new_namespace))
            self._switch("link add switch type bridge")
            self._switch("link set switch up")
            for host in range(self.count):
                self._plug_in(host)
        except (OSError, RuntimeError) as error:
            self.__exit__(None, None, None)
            pytest.skip(f"hosts on a switch cannot be made here: {error}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _plug_in(self, host: int) -> None:
        self._switch(f"link add port{host} type veth peer name eth0 netns {self._path(host + 1)}")
        self._switch(f"link set port{host} master switch up")
        self.ip(host, "link set lo up")
        self.ip(host, f"addr add {self.address(host)}/24 dev eth0")
        self.ip(host, "link set eth0 up")

    # --- running things -----------------------------------------------------------------------------------------

    def on(self, host: int, *command: str) -> list[str]:
        """The command line that runs `command` on a host. It dies with us."""
        return ["nsenter", f"--net={self._path(host + 1)}", "setpriv", "--pdeathsig", "KILL", *command]

    def ip(self, host: int, words: str) -> None:
        _run(self.on(host, "ip", *words.split()))

    def within(self, host: int, work: Callable[[], T]) -> T:
        """Calls `work` in a thread of that host. Sockets that it makes stay there."""

        def inside() -> T:
            _checked(_libc.setns(self._fds[host + 1], CLONE_NEWNET))
            return work()

        return apart(inside)

    # --- faults -------------------------------------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """The cable is pulled: the host sees that, nobody else does."""
        self._switch(f"link set port{host} down")

    def black_hole(self, host: int) -> None:
        """The switch forgets the port: all lights stay green."""
        self._switch(f"link set port{host} nomaster")

    def mend(self, host: int) -> None:
        self._switch(f"link set port{host} up")
        self._switch(f"link set port{host} master switch")

    def lose_way(self, host: int, to: int) -> None:
        """What `host` sends to that other host goes nowhere; the other way is good."""
        self.ip(host, f"neigh replace {self.address(to)} lladdr {NOWHERE} dev eth0 nud permanent")

    def find_way(self, host: int, to: int) -> None:
        self.ip(host, f"neigh del {self.address(to)} dev eth0")

    def slow_down(self, host: int, kbit_per_s: int) -> None:
        """In both directions."""
        words = ("root", "tbf", "rate", f"{kbit_per_s}kbit", "burst", "16kb", "latency", "2s")
        _run([*self._on_switch, "tc", "qdisc", "add", "dev", f"port{host}", *words])
        _run(self.on(host, "tc", "qdisc", "add", "dev", "eth0", *words))

    # --- the kernel's side --------------------------------------------------------------------------------------

    @property
    def _on_switch(self) -> list[str]:
        return ["nsenter", f"--net={self._path(0)}"]

    def _switch(self, words: str) -> None:
        _run([*self._on_switch, "ip", *words.split()])

    def _path(self, index: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fds[index]}"


_libc = ctypes.CDLL(None, use_errno=True)


def apart(work: Callable[[], T]) -> T:
    """Calls it in a thread that ends then, and takes the namespace with it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _new_namespace() -> int:
    _checked(_libc.unshare(CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
