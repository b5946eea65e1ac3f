"""How long the quorum takes with many ranks: `keepstep scale quorum`.

Each replica is a process (`shadow_ranks`) with the real leader, the real control tree over sockets, and light ranks; the store is
the embedded etcd. A round begins when every rank says that its sums are complete, and is over when every rank has the next
decision. Measured is from the last rank's request to the last rank's answer, over all processes:

    last vote ──> verdict at the last rank        commit
    last vote ──> decision at the last rank       steady, change (a replica was killed), rejoin (it is back)

When a replica was killed, every rank of the others votes no; it is measured from the first no of the last replica. Every round is
checked: each rank of each survivor has the decision that is in the store, with its own neighbours' addresses.
"""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keepstep.protocol.errors import ConfigError, StoreError
from keepstep.protocol.ids import Incarnation
from keepstep.runtime.etcd import EtcdStore
from keepstep.runtime.etcd_server import EmbeddedEtcd
from keepstep.scale.shadow_ranks import ShadowSettings

ANSWER_S = 900.0  # for any single thing that is waited for; a big job comes up slowly on two cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured. `sockets`: each rank has its own, not each host; `machines`: each runs a rank's state machine."""

    replicas: int
    ranks: int  # of a replica
    ranks_per_host: int = 8
    fan_out: int = 32
    rounds: int = 20
    sockets: bool = False
    machines: bool = False

    def __post_init__(self) -> None:
        if min(self.replicas, self.ranks, self.ranks_per_host, self.fan_out, self.rounds) < 1:
            raise ConfigError("--replicas, --ranks, --ranks-per-host, --fan-out and --rounds must be at least 1")
        if self.ranks % self.ranks_per_host:
            down = self.ranks // self.ranks_per_host * self.ranks_per_host
            fits = f"{down} or {down + self.ranks_per_host}" if down else str(self.ranks_per_host)
            raise ConfigError(
                f"--ranks {self.ranks} is not a multiple of --ranks-per-host {self.ranks_per_host}: a replica has whole hosts; "
                f"{fits} would fit"
            )
        most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], self.descriptors
        if most not in (resource.RLIM_INFINITY,) and needed > most:
            less = "leave out --sockets" if self.sockets else "have more --ranks-per-host, or fewer --ranks"
            raise ConfigError(
                f"a replica of {self.ranks:,} ranks needs {needed:,} open files in its process, and `ulimit -Hn` allows {most:,} "
                f"here: {less}, or raise the limit"
            )

    @property
    def descriptors(self) -> int:
        """Of a replica's process, at most: both ends of every link are in it, and every host listens."""
        hosts = self.ranks // self.ranks_per_host
        return 2 * (self.ranks if self.sockets else hosts) + hosts + 100


@dataclass(slots=True)
class Round:
    """One round, in seconds from the last vote."""

    commit: float
    decided: float
    cpu: float  # of all processes, with the votes before the last
    cpu_window: float  # from the last vote on
    sent: int


class Replica:
    """A replica's process, seen from here."""

    def __init__(self, settings: ShadowSettings) -> None:
        self.settings = settings
        self.events: list[dict[str, Any]] = []
        self.changed = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "keepstep.scale.shadow_ranks", json.dumps(asdict(self.settings)),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=(self.settings.listener,),
        )  # fmt: skip
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.events.append(json.loads(line))
            self.changed.set()
        self.events.append({"event": "ended"})
        self.changed.set()

    def say(self, order: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    async def expect(self, event: str) -> dict[str, Any]:
        """The next event of this kind; everything before it is forgotten."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    while self.events:
                        got = self.events.pop(0)
                        if got["event"] == event:
                            return got
                        if got["event"] in ("failed", "ended"):
                            raise StoreError(f"replica {self.settings.replica} ended: {got.get('reason', 'no reason')}")
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise StoreError(f"replica {self.settings.replica} has not said {event!r} in {ANSWER_S:.0f} s") from None

    async def end(self) -> None:
        """Kills it, as a machine that goes would."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
        if self._reading is not None:
            await self._reading


class Measurement:
    """One job of shadow replicas."""

    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], None]) -> None:
        self.settings, self._say = settings, say
        self._etcd = EmbeddedEtcd(folder / "etcd", folder / "etcd.log")
        self._job, self._token = "scale", secrets.token_hex(16)
        self._lives = 0
        self._url = ""
        self._port = 0
        self.replicas: dict[int, Replica] = {}
        self.rounds: dict[str, list[Round]] = {"steady": [], "change": [], "rejoin": []}
        self._store: EtcdStore | None = None
        self._decision: dict[str, Any] = {}
        self._used = (0.0, 0)
        self.rss = 0

    async def run(self) -> dict[str, Any]:
        settings = self.settings
        began = time.monotonic()
        self._url = await asyncio.to_thread(self._etcd.start)
        try:
            self._store = await EtcdStore.open(self._url, self._job)
            await asyncio.gather(*(self._start(r) for r in range(settings.replicas)))
            await self._decided(list(self.replicas.values()))
            self._say(f"{settings.replicas} x {settings.ranks} ranks are up after {time.monotonic() - began:.1f} s")
            await self._settle()
            for _ in range(settings.rounds):
                self.rounds["steady"].append(await self._round())
            self._say(f"steady: {statistics.median(r.decided for r in self.rounds['steady']):.3f} s (median)")
            if settings.replicas > 1:
                for n in range(settings.rounds):
                    await self._lose_and_return(n % settings.replicas)
            return self._results()
        finally:
            await asyncio.gather(*(replica.end() for replica in self.replicas.values()))
            if self._store is not None:
                await self._store.close()
            await asyncio.to_thread(self._etcd.stop)

    async def _start(self, number: int) -> Replica:
        settings = self.settings
        self._lives += 1
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        replica = Replica(
            ShadowSettings(
                store=self._url, job=self._job, token=self._token, replica=number, replicas=settings.replicas,
                ranks=settings.ranks, ranks_per_host=settings.ranks_per_host, fan_out=settings.fan_out,
                incarnation=secrets.token_hex(8), life=1 if self._lives <= settings.replicas else 2,
                listener=listener.fileno(), port=listener.getsockname()[1],
                sockets=settings.sockets, machines=settings.machines,
            )
        )  # fmt: skip
        self.replicas[number] = replica
        await replica.start()
        listener.close()
        return replica

    # --- rounds -----------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Until every replica is a WORKER."""
        while self._decision["workers"] < len(self.replicas):
            await self._round()

    async def _round(self, yes: bool = True, dead: Replica | None = None, back: Replica | None = None) -> Round:
        """Every rank votes; until every rank, those of the replica that is `back` too, has the next decision."""
        assert self._store is not None
        voters = list(self.replicas.values())
        everybody = voters if back is None else [*voters, back]
        before = await self._usage(everybody)
        for replica in voters:
            replica.say({"vote": yes})
        if dead is not None:
            await self._store.mark_dead([Incarnation(dead.settings.incarnation)])
        ended = [await replica.expect("verdict") for replica in voters]
        decided = await self._decided(everybody)
        after = await self._usage(everybody)
        begin = max(event["voted"] for event in ended)
        return Round(
            commit=(max(event["at"] for event in ended) - begin) / 1e9,
            decided=(max(event["at"] for event in decided) - begin) / 1e9,
            cpu=sum(event["cpu"][0] for event in decided) + after[0] - before[0],
            cpu_window=sum(event["cpu"][1] for event in decided),
            sent=after[1] - before[1],
        )

    async def _decided(self, replicas: list[Replica]) -> list[dict[str, Any]]:
        events = [await replica.expect("decided") for replica in replicas]
        for replica in replicas:  # not before: it takes longer than the round
            replica.say({"check": 1})
        checked = [await replica.expect("checked") for replica in replicas]
        first = checked[0]
        for replica, event in zip(replicas, checked, strict=True):
            if event["wrong"] or event["seq"] != first["seq"]:
                raise StoreError(f"ranks of replica {replica.settings.replica} heard something else: {event['wrong']}")
        self._decision = first
        return events

    async def _lose_and_return(self, number: int) -> None:
        """One replica is killed; then it comes back, and becomes a WORKER again."""
        gone = self.replicas.pop(number)
        await gone.end()
        self.rounds["change"].append(await self._round(yes=False, dead=gone))
        survivors = dict(self.replicas)
        back = await self._start(number)
        self.replicas = survivors
        await back.expect("reported")
        self.rounds["rejoin"].append(await self._round(back=back))
        self.replicas[number] = back
        await self._settle()
        lost, returned = self.rounds["change"][-1].decided, self.rounds["rejoin"][-1].decided
        self._say(f"replica {number} lost: {lost:.3f} s; back: {returned:.3f} s")

    async def _usage(self, replicas: list[Replica]) -> tuple[float, int]:
        for replica in replicas:
            replica.say({"usage": 1})
        events = [await replica.expect("usage") for replica in replicas]
        self.rss = max(self.rss, sum(event["rss"] for event in events))
        return _cpu_of(self._etcd.pid), sum(event["sent"] for event in events)

    # --- results ----------------------------------------------------------------------------------------------

    def _results(self) -> dict[str, Any]:
        settings = self.settings
        results: dict[str, Any] = {
            **asdict(settings), "ranks": settings.replicas * settings.ranks, "ranks_per_replica": settings.ranks
        }  # fmt: skip
        seconds = {kind: [r.decided for r in rounds] for kind, rounds in self.rounds.items()}
        seconds["commit"] = [r.commit for r in self.rounds["steady"]]
        for kind, values in seconds.items():
            results[f"{kind}_median_s"] = statistics.median(values) if values else None
            results[f"{kind}_s"] = _percentiles(values)
        for kind, rounds in self.rounds.items():
            if rounds:
                results[f"{kind}_cpu_s"] = statistics.median(r.cpu for r in rounds)
                results[f"{kind}_window_cpu_s"] = statistics.median(r.cpu_window for r in rounds)
                results[f"{kind}_bytes"] = statistics.median(r.sent for r in rounds)
        results["cpu_s"], results["bytes"] = results["steady_cpu_s"], results["steady_bytes"]
        results["rss_bytes"] = self.rss
        return results


def _percentiles(values: list[float]) -> dict[str, float]:
    """Of the values themselves: nothing is interpolated."""
    ordered, last = sorted(values), len(values) - 1
    return {f"p{p}": ordered[round(p / 100 * last)] for p in (0, 10, 50, 90, 99, 100) if ordered}


def _cpu_of(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Raises StoreError if a replica ends, or one of its ranks heard something else than the others."""
    with tempfile.TemporaryDirectory(prefix="keepstep-") as folder:
        return asyncio.run(Measurement(settings, Path(folder), say).run())
