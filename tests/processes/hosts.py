"""A job on several hosts: an agent on each, and an etcd beside them. On loopback, or each in a network of its own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from jobs import TINY, Result, kill_all, read_events, wait_until
from matrix import same_as_reference
from network import Network
from test_training import check

from keepstep.runtime.etcd_server import EmbeddedEtcd, find_etcd

sys.path.insert(0, str(Path(__file__).parent / "scripts"))

import train_tiny

SECRET = "the secret of the job"
PORT, PEER = 2379, 2380


class Hosts:
    """`count` hosts, h0 and up, in a `with` block. Nothing is left of them afterwards."""

    def __init__(
        self, folder: Path, count: int, *options: str, slots: int = 1, apart: bool = False, args: tuple[str, ...] = ()
    ) -> None:
        """`options`: of every agent. `apart`: each in a network of its own."""
        self.folder, self.count, self.options, self.slots, self.args = folder, count, options, slots, args
        self.run_dir = folder / "run"
        self.network = Network(count + 1) if apart else None
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self.url = ""

    def __enter__(self) -> "Hosts":
        self.run_dir.mkdir()
        if self.network is None:
            self._start_store()
        else:
            self._stack.enter_context(self.network)
            self._start_etcd(self.network)
        self._stack.callback(kill_all, self.run_dir)
        for host in range(self.count):
            self.start(host)
        return self

    def _start_store(self) -> None:
        self._etcd = EmbeddedEtcd(self.folder / "etcd", self.folder / "etcd.log")
        self._stack.callback(self._etcd.stop)
        self.url = self._etcd.start()

    def lose_store(self) -> None:
        """A new etcd without any data."""
        self._etcd.stop()
        shutil.rmtree(self.folder / "etcd")
        self._start_store()

    def _start_etcd(self, network: Network) -> None:
        at = network.address(self.count)
        client, peer = f"http://{at}:{PORT}", f"http://{at}:{PEER}"
        command = network.on(
            self.count, find_etcd(), "--data-dir", str(self.folder / "etcd"), "--name", "m", "--log-level", "error",
            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", f"m={peer}", "--unsafe-no-fsync",
        )  # fmt: skip
        with (self.folder / "etcd.log").open("wb") as log:
            etcd = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._stack.callback(etcd.wait)
        self._stack.callback(etcd.kill)
        self.url = f"etcd://{at}:{PORT}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        self._stack.close()
        for path in self.folder.glob("*.log") if error is not None else ():
            error.add_note(f"{path.name}: {path.read_text(errors='replace')[-4000:]}")  # type: ignore[union-attr]

    # --- hosts --------------------------------------------------------------------------------------------------

    def start(self, host: int) -> None:
        """The agent of a host begins, or begins again."""
        with (self.folder / f"h{host}.log").open("ab") as log:
            self.agents[host] = subprocess.Popen(
                self.on(host, self.command(host)),
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment(),
            )  # fmt: skip

    def command(self, host: int, *more: str) -> list[str]:
        """Of its agent; `more` options win."""
        return [
            sys.executable, "-m", "keepstep", "agent", "--store", self.url, "--job", "test", "--slots", str(self.slots),
            "--host", f"h{host}", "--labels", f"building=b{host % 2},rack=r{host}", "--run-dir", str(self.run_dir),
            *self.options, *more, str(TINY), "--", *self.args,
        ]  # fmt: skip

    def on(self, host: int, command: list[str]) -> list[str]:
        return command if self.network is None else self.network.on(host, *command)

    def environment(self) -> dict[str, str]:
        """Of everything about this job."""
        return {
            **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "KEEPSTEP_TOKEN": SECRET
        }  # fmt: skip

    def lose(self, host: int) -> None:
        """kill -9 of its agent, and nothing that it has started outlives it."""
        agent = self.agents.pop(host)
        agent.kill()
        agent.wait()
        wait_until(lambda: not self.ranks(host), 30)

    def ranks(self, host: int, replica: int | None = None) -> list[psutil.Process]:
        """The living ranks that its agents have started, in whatever life; without `replica`, spares too."""
        told = (e for path in self.run_dir.glob(f"h{host}-*") for e in read_events(path))
        started = [e for e in told if e["event"] in ("spawn", "spare") and replica in (None, e.get("replica"))]
        pids = [pid for e in started for pid in e.get("pids", ())]
        living = []
        for pid in pids:
            try:
                process = psutil.Process(pid)
                if process.environ().get("KEEPSTEP_AGENT") == f"h{host}" and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return living

    def warm(self, host: int) -> list[int]:
        """Waits for a spare of this host's newest agent that is ready: its processes, by rank."""
        life = max(self.run_dir.glob(f"h{host}-*"), key=lambda path: int(path.name.rpartition("-")[2]))

        def ready() -> list[int] | None:
            told = [e for e in read_events(life) if e["event"] == "spare"]
            numbers = [e["number"] for e in told if e["state"] == "ready"]
            return next((e["pids"] for e in told if numbers and e["number"] == numbers[-1] and "pids" in e), None)

        found: list[int] = self.until(ready)
        return found

    def log(self, host: int) -> str:
        return (self.folder / f"h{host}.log").read_text(errors="replace")

    # --- the job ------------------------------------------------------------------------------------------------

    def keepstep(self, *args: object) -> tuple[int, str]:
        """A command about this job, from the first host."""
        command = [sys.executable, "-m", "keepstep", *map(str, args), "--store", self.url, "--job", "test"]
        done = subprocess.run(
            self.on(0, command), capture_output=True, text=True, timeout=120, check=False, env=self.environment()
        )
        return done.returncode, done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        code, said = self.keepstep("status", "--json")
        assert code == 0, said
        found: dict[str, Any] = json.loads(said)
        return found

    def places(self) -> dict[int, int]:
        """Which host keeps which replica."""
        return {r: int(host["host"][1:]) for host in self.status()["hosts"] for r in host["replicas"]}

    @property
    def events(self) -> list[dict[str, Any]]:
        found = [e for path in self.run_dir.glob("h*-*") for e in read_events(path)]
        return sorted(found, key=lambda e: e["mono"])

    def of(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def step(self, replica: int | None = None) -> int:
        """The newest that this replica, or any, has committed as WORKER."""
        commits = (e for e in self.of("commit", role="worker") if replica in (None, e["replica"]))
        return max((e["step"] for e in commits), default=-1)

    def until(self, condition: Callable[[], Any], seconds: float = 120.0) -> Any:
        """The condition's first true value. No agent ends before."""

        def checked() -> Any:
            found = condition()
            ended = {f"h{host}": agent.poll() for host, agent in self.agents.items() if agent.poll() is not None}
            assert found or not ended, f"agents have ended: {ended}"
            return found

        return wait_until(checked, seconds)

    def trains(self, replica: int, steps: int = 5, seconds: float = 120.0) -> None:
        """It commits so many steps more than any has now."""
        goal = self.step() + steps
        self.until(lambda: self.step(replica) >= goal, seconds)

    def finish(self, replicas: int, *, seconds: float = 120.0) -> Result:
        """Every agent ends well; all replicas have the same bits, and they are those of one process."""
        wait_until(lambda: all(agent.poll() is not None for agent in self.agents.values()), seconds)
        assert {agent.returncode for agent in self.agents.values()} == {0}
        result = Result(0, "".join(self.log(h) for h in range(self.count)), self.folder, self.events)
        for path in self.run_dir.glob("h*-*/parameters-*"):
            shutil.copy(path, self.folder / path.name)
        check(result, replicas)
        same_as_reference(result, train_tiny.arguments().parse_args(self.args))
        return result
