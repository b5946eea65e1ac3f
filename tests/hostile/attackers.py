"""Strangers at a port, in a process of their own: `python attackers.py KIND PLACE` until its standard input ends.

PLACE is HOST:PORT, or @NAME of an abstract Unix socket. The first line of the input is in hexadecimal: a message that was
recorded from an honest member, or the like. At the end it prints how many connections were tried. Standard library only: it has
to start at once.
"""

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

OPEN_MAX = 800  # connections that an attacker keeps open at once
KINDS = ("garbage", "truncated", "oversized", "half open", "slow", "flood", "scan", "reset", "replay", "long headers")
HTTP_HEAD = b"GET /state/3/7/manifest HTTP/1.1\r\nHost: x\r\n"


def connect(place: str) -> socket.socket:
    if place.startswith("@"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(2)
        sock.connect("\0" + place[1:])
        return sock
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=2)


@dataclass
class Attack:
    """What one attacker has done so far."""

    place: str
    hello: bytes
    tried: int = 0
    held: list[socket.socket] = field(default_factory=list)

    def once(self, kind: str) -> None:
        """One connection of `kind`."""
        sock = connect(self.place)
        self.tried += 1
        hello = self.hello or os.urandom(64)
        message = struct.pack("<I", len(hello)) + hello
        if kind == "garbage":
            sock.sendall(os.urandom(1 + self.tried % 3000))
        elif kind == "truncated":
            sock.sendall(message[: self.tried % len(message)])
        elif kind == "oversized":
            sock.sendall(struct.pack("<I", 0xFFFFFFFF - self.tried % 3) + b"x" * 10_000)
        elif kind == "reset":
            sock.sendall(message)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif kind == "replay":
            sock.sendall(self.hello)  # all that was recorded, whatever the other end says this time
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while sock.recv(4096):
                    pass
        elif kind == "long headers":
            with contextlib.suppress(OSError):
                for n in range(2000):
                    sock.sendall((HTTP_HEAD if n == 0 else b"") + b"X-%d: " % n + b"y" * 8000 + b"\r\n")
        elif kind in ("half open", "slow"):
            self.held.append(sock)
            return
        elif kind == "flood":
            self.held.append(sock)
            if len(self.held) > OPEN_MAX:
                self.held.pop(0).close()
            return
        sock.close()

    def run(self, kind: str, over: Callable[[], bool]) -> None:
        while not over():
            if len(self.held) >= OPEN_MAX and kind != "flood":
                self.trickle(kind)
                continue
            try:
                self.once(kind)
            except OSError:
                time.sleep(0.01)

    def trickle(self, kind: str) -> None:
        """Another byte of every connection; those that were closed make room for new ones."""
        time.sleep(0.1)
        alive = []
        for n, sock in enumerate(self.held):
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                if kind == "slow":
                    sock.send(b"\x20" if n % 2 else HTTP_HEAD[:1])
                elif sock.recv(1, socket.MSG_PEEK) == b"":
                    raise OSError("closed")
                alive.append(sock)
                continue
            if sock.fileno() >= 0 and select.select([sock], [], [], 0)[0]:
                sock.close()
            else:
                alive.append(sock)
        self.held = alive


@contextlib.contextmanager
def attacked(kind: str, *places: str, hello: bytes = b"") -> Iterator[list[int]]:
    """Attackers at these places; the list has how many connections they tried, once they are over."""
    tried: list[int] = []
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__)), kind, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for place in places
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(hello.hex().encode() + b"\n")
            process.stdin.flush()
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield tried
    finally:
        for process in processes:
            out, _ = process.communicate(timeout=30)
            tried.append(int(out))


def main() -> None:
    kind, place = sys.argv[1:]
    hello = sys.stdin.readline()
    over = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=watch, daemon=True).start()
    attack = Attack(place, bytes.fromhex(hello.strip()))
    attack.run(kind, lambda: attack.tried > 0 and first(attack) and over.is_set())
    print(attack.tried, flush=True)


said = False


def first(attack: Attack) -> bool:
    """The victim's part of the test begins once the attack is under way."""
    global said
    if not said and attack.tried >= 20:
        said = True
        print("ready", flush=True)
    return said


if __name__ == "__main__":
    main()
