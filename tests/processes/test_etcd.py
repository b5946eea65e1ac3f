"""The store on a real etcd: compare-and-swap, leases of the living and the dead, watches that outlive the server."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import aetcd
import pytest

from keepstep.protocol.errors import ConfigError, JobMismatch, StoreError
from keepstep.protocol.ids import FIRST_UNIT, Incarnation, QuorumId, ReplicaId, Seq, Step
from keepstep.protocol.messages import Decision, Endpoint, Kind, LedgerState, Report
from keepstep.runtime.etcd import EtcdStore, JobRecord, StoreView
from keepstep.runtime.etcd_server import EmbeddedEtcd

RECORD = JobRecord(
    version="1", num_replicas=2, ranks_per_replica=1, data_fingerprint="d", layout_digest="m", token_check="t"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedEtcd, str]]:
    folder = tmp_path_factory.mktemp("etcd")
    etcd = EmbeddedEtcd(folder / "data", folder / "log")
    url = etcd.start()
    yield etcd, url
    etcd.stop()
    assert etcd.poll() is not None


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", "-").replace("]", "").replace("/", "-")


def with_stores(url: str, job: str, body: Callable[..., Awaitable[None]], count: int = 1, **options: float) -> None:
    async def run() -> None:
        stores = [await EtcdStore.open(url, job, b"token", **options) for _ in range(count)]
        try:
            await asyncio.wait_for(body(*stores), 60)
        finally:
            for store in stores:
                await store.close()

    asyncio.run(run())


def report(replica: int = 0, answers: int = 0) -> Report:
    return Report(
        replica_id=ReplicaId(replica), incarnation=Incarnation(f"life-{replica}"), answers=Seq(answers), state=None,
        materialized=False, ledger=LedgerState(),
    )  # fmt: skip


def decision(seq: int) -> Decision:
    return Decision(
        seq=Seq(seq), quorum_id=QuorumId(seq), kind=Kind.TRAIN, step=Step(0), base=Seq(seq), ancestry=(), members=(),
        ledger=LedgerState(next_unit=FIRST_UNIT), num_replicas=2, reason="because",
    )  # fmt: skip


class Watcher:
    """The views of one store as they come."""

    def __init__(self) -> None:
        self.views: list[StoreView] = []
        self._changed = asyncio.Event()

    def __call__(self, view: StoreView) -> None:
        self.views.append(view)
        self._changed.set()

    async def until(self, condition: Callable[[StoreView], bool]) -> StoreView:
        async with asyncio.timeout(30):
            while not self.views or not condition(self.views[-1]):
                self._changed.clear()
                await self._changed.wait()
        return self.views[-1]


def test_one_publisher_wins(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: EtcdStore, b: EtcdStore) -> None:
        first = await asyncio.gather(a.publish(decision(1), 0), b.publish(decision(1), 0))
        assert sorted(first) == [False, True]
        view = await a.read()
        assert view.last == decision(1)
        assert await b.publish(decision(2), view.revision)
        assert not await a.publish(decision(2), view.revision)

    with_stores(server[1], job, body, 2)


def test_a_watch_sees_everything(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: EtcdStore, b: EtcdStore) -> None:
        watcher = Watcher()
        await a.watch(watcher)
        assert watcher.views[0].last is None
        await b.put_report(report())
        await b.publish(decision(1), 0)
        await b.mark_dead([Incarnation("gone")])
        await b.announce(ReplicaId(1))
        view = await watcher.until(lambda v: v.announced == {1} and v.last is not None)
        assert view.reports[ReplicaId(0)][0] == report()
        assert view.dead == {"gone"}
        assert view.connected
        seen = view.reports[ReplicaId(0)][1]
        await b.put_report(report(1))
        view = await watcher.until(lambda v: ReplicaId(1) in v.reports)
        assert view.reports[ReplicaId(0)][1] == seen, "an unchanged report keeps its age"
        await b.withdraw()
        await watcher.until(lambda v: not v.reports)

    with_stores(server[1], job, body, 2)


HOLDER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_etcd import EtcdStore, report
async def main():
    store = await EtcdStore.open({url!r}, {job!r}, b"token", lease_s=1.0)
    await store.put_report(report())
    print("written", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_lease_of_a_dead_or_frozen_process_runs_out(
    server: tuple[EmbeddedEtcd, str], job: str, how: signal.Signals
) -> None:
    code = HOLDER.format(url=server[1], job=job, tests=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"

        async def body(store: EtcdStore) -> None:
            watcher = Watcher()
            await store.watch(watcher)
            assert watcher.views[0].reports
            os.kill(process.pid, how)
            await watcher.until(lambda v: not v.reports)
            if how is signal.SIGSTOP:
                os.kill(process.pid, signal.SIGCONT)
                await watcher.until(lambda v: bool(v.reports))  # it reports again by itself

        with_stores(server[1], job, body)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_watch_outlives_the_server(tmp_path: Path) -> None:
    etcd = EmbeddedEtcd(tmp_path / "data", tmp_path / "log")
    url = etcd.start()
    try:

        async def body(store: EtcdStore) -> None:
            watcher = Watcher()
            await store.watch(watcher)
            await store.put_report(report())
            await watcher.until(lambda v: bool(v.reports))
            os.kill(etcd.pid, signal.SIGKILL)
            view = await watcher.until(lambda v: not v.connected)
            assert view.reports, "the last view stays"
            assert await asyncio.to_thread(etcd.start) == url
            await watcher.until(lambda v: v.connected)
            await store.put_report(report(answers=1))
            await watcher.until(lambda v: v.reports[ReplicaId(0)][0].answers == 1)

        with_stores(url, "j", body)
    finally:
        etcd.stop()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", "2", "keepstep version"), ("num_replicas", 3, "number of replicas"), ("ranks_per_replica", 2, "ranks"),
        ("data_fingerprint", "e", "data set"), ("layout_digest", "n", "model"), ("token_check", "u", "token"),
    ],
)  # fmt: skip
def test_whoever_does_not_fit_the_job_is_told_why(
    server: tuple[EmbeddedEtcd, str], job: str, field: str, value: object, words: str
) -> None:
    async def body(store: EtcdStore) -> None:
        await store.claim_job(replace(RECORD, data_fingerprint="", layout_digest=""))  # a launcher knows less
        await store.claim_job(RECORD)
        await store.claim_job(RECORD)
        with pytest.raises(JobMismatch, match=words):
            await store.claim_job(replace(RECORD, **{field: value}))  # type: ignore[arg-type]

    with_stores(server[1], job, body)


def test_two_launchers_and_a_used_name(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: EtcdStore, b: EtcdStore) -> None:
        await a.claim_launcher("pid 1")
        with pytest.raises(ConfigError, match="run already by pid 1"):
            await b.claim_launcher("pid 2")
        await a.publish(decision(1), 0)
        await a.withdraw()
        with pytest.raises(ConfigError, match="has run on this store before"):
            await b.claim_launcher("pid 2")

    with_stores(server[1], job, body, 2)


def test_endpoints(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        mine = (Endpoint(host="127.0.0.1", ftar_port=1, state_port=2),)
        await store.put_endpoints(ReplicaId(0), Incarnation("a"), mine)
        assert await store.get_endpoints(ReplicaId(0), Incarnation("a")) == mine
        with pytest.raises(StoreError, match="replica 1"):
            await store.get_endpoints(ReplicaId(1), Incarnation("a"))

    with_stores(server[1], job, body)


def test_malformed_values_are_ignored(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        client = store.client
        assert isinstance(client, aetcd.Client)
        root = f"keepstep/{job}/".encode()
        for key in (b"decision", b"reports/0", b"reports/x", b"announced/x", b"what"):
            await client.put(root + key, b"\xff not json")
        view = await store.read()
        assert (view.last, view.reports, view.announced) == (None, {}, frozenset())
        assert view.revision > 0

    with_stores(server[1], job, body)


@pytest.mark.parametrize("url", ["", "127.0.0.1:2379", "etcd://127.0.0.1", "etcd://:1", "etcd://h:port", "http://h:1"])
def test_a_bad_address_is_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="etcd://HOST:2379"):
        asyncio.run(EtcdStore.open(url, "j", b"t"))


def test_nobody_there_is_a_sentence() -> None:
    with pytest.raises(StoreError, match=r"no etcd answers at 127\.0\.0\.1:9"):
        asyncio.run(EtcdStore.open("etcd://127.0.0.1:9", "j", b"t", timeout=0.5))


def test_an_etcd_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    with pytest.raises(StoreError, match="did not start"):
        EmbeddedEtcd(tmp_path / "data", tmp_path / "log").start()
