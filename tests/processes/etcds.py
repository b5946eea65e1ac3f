"""An etcd cluster whose members can be killed, frozen and brought back one by one."""

import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from jobs import wait_until

from keepstep.runtime.etcd_server import HOST, _members, find_etcd

DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")


class Etcds:
    """`count` members on loopback, in a `with` block."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        with ExitStack() as taken:
            socks = [taken.enter_context(socket.create_server((HOST, 0))) for _ in range(2 * count)]
            ports = [sock.getsockname()[1] for sock in socks]
        self.clients, self.peers = ports[:count], ports[count:]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"{HOST}:{port}" for port in self.clients)

    def __enter__(self) -> "Etcds":
        for member in range(self.count):
            self.start(member)
        for member in range(self.count):
            self.wait(member)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in list(self.processes):
            self.kill(member)

    def start(self, member: int) -> None:
        """Starts it, or starts it again with the data that it has."""
        client, peer = (f"http://{HOST}:{ports[member]}" for ports in (self.clients, self.peers))
        cluster = ",".join(f"m{i}=http://{HOST}:{port}" for i, port in enumerate(self.peers))
        command = [
            *DIES_WITH_US, find_etcd(), "--name", f"m{member}", "--data-dir", str(self.data(member)),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
            "--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync", "--log-level", "error",
        ]  # fmt: skip
        with (self.folder / f"etcd-{member}.log").open("ab") as log:
            self.processes[member] = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self, member: int) -> None:
        """Until it answers."""
        wait_until(lambda: f"m{member}" in _members(self.clients[member]), 30)

    def data(self, member: int) -> Path:
        return self.folder / f"etcd-{member}"

    def freeze(self, member: int) -> None:
        self.processes[member].send_signal(signal.SIGSTOP)

    def thaw(self, member: int) -> None:
        self.processes[member].send_signal(signal.SIGCONT)

    def kill(self, member: int) -> None:
        process = self.processes.pop(member)
        process.kill()
        process.wait()
