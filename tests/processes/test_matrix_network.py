"""Links that are cut, black-holed or slow, between hosts: network namespaces on a bridge, one replica on each, and one for etcd.

No launcher: every rank is started with its own variables, as an agent of several hosts would, and nobody restarts anything.
"""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import SCRIPTS, TINY, Result, read_events, wait_until
from matrix import same_as_reference
from network import Network
from test_training import check

from keepstep.runtime.etcd_server import find_etcd
from keepstep.runtime.links import LinkSettings, tune

sys.path.insert(0, str(SCRIPTS))

import train_tiny

REPLICAS = 3
STORE = REPLICAS  # the host where etcd runs
PORT, PEER, TREE = 2379, 2380, 7000

pytestmark = pytest.mark.faults


class Hosts:
    """A job of three replicas on three hosts."""

    def __init__(self, folder: Path, network: Network, args: tuple[str, ...]) -> None:
        self.folder, self.network, self.args = folder, network, args
        self.run_dir = folder / "run"
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        (self.run_dir / "events").mkdir(parents=True)
        at = self.network.address(STORE)
        client, peer = f"http://{at}:{PORT}", f"http://{at}:{PEER}"
        self._start(
            "etcd", STORE, os.environ,
            find_etcd(), "--data-dir", str(self.folder / "etcd"), "--name", "m", "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"m={peer}", "--unsafe-no-fsync", "--log-level", "error",
        )  # fmt: skip
        for replica in range(REPLICAS):
            self._start(
                f"replica {replica}", replica, self._environment(replica), sys.executable, str(TINY), *self.args
            )

    def _environment(self, replica: int) -> dict[str, str]:
        host = self.network.address(replica)
        return {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "REPLICA_ID": str(replica),
            "NUM_REPLICAS": str(REPLICAS),
            "KEEPSTEP_STORE": f"etcd://{self.network.address(STORE)}:{PORT}",
            "KEEPSTEP_TOKEN": "secret",
            "KEEPSTEP_RUN_DIR": str(self.run_dir),
            "KEEPSTEP_HOST": host,
            "KEEPSTEP_LEADER": f"{host}:{TREE}",
            "KEEPSTEP_INCARNATION": f"life-of-{replica}",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _start(self, name: str, host: int, env: Any, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started[name] = subprocess.Popen(
                self.network.on(host, *command), env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def end(self) -> None:
        for process in self.started.values():
            process.kill()
            process.wait()

    def log(self, replica: int) -> str:
        return (self.folder / f"replica {replica}.log").read_text(errors="replace")

    def commits(self, replica: int, role: str = "worker") -> list[dict[str, Any]]:
        return [
            e for e in read_events(self.run_dir)
            if e["event"] == "commit" and e["replica"] == replica and e["role"] == role
        ]  # fmt: skip

    def step(self, replica: int) -> int:
        """The newest that it has committed as WORKER."""
        return max((e["step"] for e in self.commits(replica)), default=-1)

    def until(self, replica: int, step: int, seconds: float = 60.0) -> None:
        def reached() -> bool:
            assert all(self.started[name].poll() in (None, 0) for name in self.started), "a process has ended"
            return self.step(replica) >= step

        wait_until(reached, seconds)

    def stays(self, seconds: float) -> None:
        until = time.monotonic() + seconds

        def over() -> bool:
            assert all(process.poll() is None for process in self.started.values()), "a process has ended"
            return time.monotonic() >= until

        wait_until(over, seconds + 30)

    def finish(self, seconds: float = 120.0) -> Result:
        """All replicas end well, with the same bits, which are those of one process."""
        replicas = [self.started[f"replica {r}"] for r in range(REPLICAS)]
        wait_until(lambda: all(process.poll() is not None for process in replicas), seconds)
        assert [process.returncode for process in replicas] == [0] * REPLICAS
        result = Result(0, "".join(self.log(r) for r in range(REPLICAS)), self.run_dir, read_events(self.run_dir))
        check(result, REPLICAS)
        same_as_reference(result, train_tiny.arguments().parse_args(self.args))
        return result


@contextmanager
def hosts(folder: Path, *args: str) -> Iterator[Hosts]:
    with Network(REPLICAS + 1) as network:
        job = Hosts(folder, network, args)
        try:
            job.start()
            yield job
        except BaseException as error:
            for path in folder.glob("*.log"):
                error.add_note(f"{path.name}: {path.read_text(errors='replace')[-3000:]}")
            raise
        finally:
            job.end()


def standstill(job: Hosts, replica: int, since: float) -> float:
    """The longest time between two commits of a replica after `since`."""
    times = [since, *(e["mono"] for e in job.commits(replica) if e["mono"] > since)]
    return max(b - a for a, b in pairwise(times))


@pytest.mark.parametrize("how", ["cut", "black_hole"])
def test_a_host_that_is_cut_off_is_left_out_and_comes_back(tmp_path: Path, how: str) -> None:
    """No end of a connection tells it. In an exchange, silence does: 5 s at most; then the quorum waits for its lease."""
    with hosts(tmp_path, "--steps", "400", "--step-seconds", "0.05") as job:
        job.until(0, 10)
        since = time.monotonic()
        getattr(job.network, how)(1)
        job.until(0, job.step(0) + 20)
        job.until(2, job.step(0))
        assert standstill(job, 0, since) < 12.0
        alone = job.step(1)
        job.stays(12.0)
        assert job.step(1) == alone, "it trained without the others"
        job.network.mend(1)
        job.until(1, job.step(0))
        result = job.finish()
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3


def test_a_host_that_loses_only_the_store_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """Its lease runs out, while all its links are good."""
    with hosts(tmp_path, "--steps", "400", "--step-seconds", "0.05") as job:
        job.until(0, 10)
        since = time.monotonic()
        job.network.lose_way(1, STORE)
        wait_until(lambda: [d for d in Result(0, "", tmp_path, read_events(job.run_dir)).decisions
                            if d["mono"] > since and len(d["members"]) == 2])  # fmt: skip
        job.until(0, job.step(0) + 20)
        assert standstill(job, 0, since) < 12.0
        job.network.find_way(1, STORE)
        job.until(1, job.step(0))
        result = job.finish()
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3


def test_of_two_hosts_that_cannot_reach_each_other_one_stands_aside_until_they_can(tmp_path: Path) -> None:
    """Both reach the store, so both live, and a ring of all three needs what is lost. It fails twice, then one is left out."""
    with hosts(tmp_path, "--steps", "400", "--step-seconds", "0.05") as job:
        job.until(0, 10)
        since = time.monotonic()
        job.network.lose_way(1, to=2)
        job.until(0, job.step(0) + 10, seconds=40)
        assert standstill(job, 0, since) < 25.0
        assert standstill(job, 1, since) < 25.0
        job.network.find_way(1, to=2)
        job.until(2, job.step(0), seconds=60)
        result = job.finish()
    assert any("replica 2 stands aside for now: it and replica 1" in d["reason"] for d in result.decisions)
    assert [m["role"] for m in result.committed()[-1]["members"]] == ["worker"] * 3


def test_a_slow_link_makes_the_job_slow_and_nothing_else(tmp_path: Path) -> None:
    with hosts(tmp_path, "--steps", "60", "--step-seconds", "0.02") as job:
        job.until(0, 10)
        job.network.slow_down(1, kbit_per_s=400)
        result = job.finish()
    assert len(result.committed()) == 60
    assert not result.of("retry")
    assert {len(d["members"]) for d in result.committed()} == {REPLICAS}


@pytest.mark.parametrize("sending", [False, True], ids=["idle", "sending"])
def test_what_the_kernel_notices_of_a_cut_cable(sending: bool) -> None:
    """Where nobody waits for bytes, only TCP can tell: after `user_timeout_s`, by unanswered probes or unacknowledged data."""
    settings = LinkSettings()

    def listen() -> socket.socket:
        sock = socket.socket()
        tune(sock, settings)
        sock.bind((Network.address(0), PORT))
        sock.listen()
        return sock

    def dial() -> socket.socket:
        sock = socket.socket()
        tune(sock, settings)
        sock.connect((Network.address(0), PORT))
        return sock

    with Network(2) as network, network.within(0, listen) as listening, network.within(1, dial) as ours:
        theirs, _ = listening.accept()
        with theirs:
            theirs.sendall(b"hello")
            assert ours.recv(5, socket.MSG_WAITALL) == b"hello"
            network.black_hole(0)
            since = time.monotonic()
            if sending:
                ours.sendall(b"is anybody there?")
            assert select.select([ours], [], [], 30)[0], "it was never noticed"
            took = time.monotonic() - since
            with pytest.raises(OSError, match=r"timed out|No route to host"):
                ours.recv(1)
    assert settings.user_timeout_s - 1.5 <= took <= settings.user_timeout_s + 3, f"noticed after {took:.1f} s"
