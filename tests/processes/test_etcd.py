"""The store on a real etcd: compare-and-swap, leases of the living and the dead, watches that outlive the server."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aetcd
import pytest

from keepstep.protocol.errors import ConfigError, JobMismatch, NoStateLeft, StoreError
from keepstep.protocol.ids import FIRST_UNIT, Incarnation, QuorumId, ReplicaId, Seq, Step
from keepstep.protocol.messages import Decision, Endpoint, Kind, LedgerState, Report
from keepstep.runtime import etcd as etcd_module
from keepstep.runtime.endpoints import Endpoints
from keepstep.runtime.etcd import EtcdStore, JobRecord
from keepstep.runtime.etcd_members import parse_url
from keepstep.runtime.etcd_server import EmbeddedEtcd
from keepstep.runtime.etcd_view import Reading, StoreView

RECORD = JobRecord(
    version="1", num_replicas=2, ranks_per_replica=1, data_fingerprint="d", layout_digest="m", token_check="t"
)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace("[", "-").replace("]", "").replace("/", "-")


def with_stores(url: str, job: str, body: Callable[..., Awaitable[None]], count: int = 1, **options: float) -> None:
    async def run() -> None:
        stores = [await EtcdStore.open(url, job, **options) for _ in range(count)]
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
        await b.close()
        await watcher.until(lambda v: not v.reports)

    with_stores(server[1], job, body, 2)


HOLDER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from test_etcd import EtcdStore, report
async def main():
    store = await EtcdStore.open({url!r}, {job!r}, lease_s=1.0)
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


async def outlives(
    store: EtcdStore, url: str, end: Callable[[], None], again: Callable[[], str | None], *, kept: bool = True
) -> None:
    """The watch of `store` survives `end` and `again`; `kept`: so do the values."""
    watcher = Watcher()
    await store.watch(watcher)
    await store.put_report(report())
    before = await watcher.until(lambda v: bool(v.reports))
    await asyncio.to_thread(end)
    view = await watcher.until(lambda v: not v.connected)
    assert view.reports == before.reports, "the last view stays"
    assert await asyncio.to_thread(again) in (url, None)
    view = await watcher.until(lambda v: v.connected and bool(v.reports))
    assert view.reports[ReplicaId(0)][0] == report()
    if kept:
        assert view.reports == before.reports, "an unchanged report keeps its age"
    await store.put_report(report(answers=1))
    await watcher.until(lambda v: v.connected and v.reports[ReplicaId(0)][0].answers == 1)


@pytest.mark.parametrize("how", ["killed", "terminated", "emptied"])
def test_the_watch_outlives_the_server(tmp_path: Path, how: str) -> None:
    server = EmbeddedEtcd(tmp_path / "data", tmp_path / "log")
    url = server.start()

    def end() -> None:
        if how == "killed":
            os.kill(server.pid, signal.SIGKILL)
        else:
            server.stop()
        if how == "emptied":  # the revisions begin anew, and the lease is unknown
            (tmp_path / "data").rename(tmp_path / "old")

    kept = how != "emptied"
    try:
        with_stores(
            url, "j", lambda store: outlives(store, url, end, server.start, kept=kept), lease_s=30.0 if kept else 1.0
        )
    finally:
        server.stop()


def test_the_watch_notices_a_frozen_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "QUIET_S", 0.3)
    monkeypatch.setattr(etcd_module, "ANSWER_S", 0.5)
    server = EmbeddedEtcd(tmp_path / "data", tmp_path / "log")
    url = server.start()
    try:
        freeze = lambda: os.kill(server.pid, signal.SIGSTOP)  # noqa: E731
        thaw = lambda: os.kill(server.pid, signal.SIGCONT)  # noqa: E731
        with_stores(url, "j", lambda store: outlives(store, url, freeze, thaw), lease_s=30.0)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.stop()


def test_a_quiet_watch_is_not_lost(server: tuple[EmbeddedEtcd, str], job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "QUIET_S", 0.1)

    async def body(store: EtcdStore) -> None:
        watcher = Watcher()
        await store.watch(watcher)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await watcher.until(lambda v: not v.connected)
        assert len(watcher.views) == 1

    with_stores(server[1], job, body)


def test_events_that_come_together_are_one_change(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: EtcdStore, b: EtcdStore) -> None:
        watcher = Watcher()
        await a.watch(watcher)
        await asyncio.gather(*(b.announce(ReplicaId(n)) for n in range(20)))
        await watcher.until(lambda v: len(v.announced) == 20)
        before = len(watcher.views)
        await b.close()  # one revision deletes all
        await watcher.until(lambda v: not v.announced)
        assert len(watcher.views) == before + 1

    with_stores(server[1], job, body, 2)


def test_no_event_takes_a_full_reading_back() -> None:
    def pair(value: bytes, revision: int) -> object:
        return aetcd.rpc.KeyValue(key=b"j/reports/0", value=value, mod_revision=revision)

    def event(value: bytes, revision: int) -> object:
        return aetcd.rpc.Event(type=aetcd.rpc.Event.PUT, kv=pair(value, revision))

    new, old = etcd_module.encode(report(answers=2)), etcd_module.encode(report(answers=1))
    reading = Reading(b"j/")
    reading.replace_all([pair(new, 12)], 12)
    reading.change(event(old, 11))
    assert reading.view().reports[ReplicaId(0)][0].answers == 2
    reading.change(event(old, 13))
    assert reading.view().reports[ReplicaId(0)][0].answers == 1


# --- leases ------------------------------------------------------------------------------------------------------


async def stays(watcher: Watcher, condition: Callable[[StoreView], bool], seconds: float = 2.5) -> None:
    await watcher.until(condition)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(seconds):
            await watcher.until(lambda v: not condition(v))


def test_first_writes_at_the_same_time_share_a_lease(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        watcher = Watcher()
        await store.watch(watcher)
        await asyncio.gather(
            store.put_report(report()), store.announce(ReplicaId(1)), store.announce(ReplicaId(2)),
            store.claim_launcher("pid 1"),
        )  # fmt: skip
        await stays(watcher, lambda v: v.announced == {1, 2} and bool(v.reports))

    with_stores(server[1], job, body, lease_s=1.0)


def test_a_lost_lease_is_replaced_and_the_newest_values_written(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        watcher = Watcher()
        await store.watch(watcher)
        await store.put_report(report(answers=1))
        await store.announce(ReplicaId(3))
        await store.announce(ReplicaId(4))
        await store.unannounce(ReplicaId(4))
        await watcher.until(lambda v: v.announced == {3} and bool(v.reports))
        await store.client.revoke_lease(store._lease._id)
        await watcher.until(lambda v: not v.reports and not v.announced)
        await store.put_report(report(answers=2))  # at once, before the keepalive noticed
        view = await watcher.until(lambda v: v.announced == {3} and bool(v.reports))
        assert view.reports[ReplicaId(0)][0].answers == 2
        await store.client.revoke_lease(store._lease._id)
        await watcher.until(lambda v: not v.reports and not v.announced)
        view = await watcher.until(lambda v: v.announced == {3} and bool(v.reports))  # the keepalive did it
        assert view.reports[ReplicaId(0)][0].answers == 2

    with_stores(server[1], job, body, lease_s=1.0)


def test_a_launcher_that_was_away_takes_nothing_back(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: EtcdStore, b: EtcdStore) -> None:
        await a.claim_launcher("pid 1")
        await a.client.revoke_lease(a._lease._id)
        await b.claim_launcher("pid 2")
        await a.announce(ReplicaId(1))  # under a new lease
        got = await a.client.get(f"keepstep/{job}/launcher".encode())
        assert got.value == b"pid 2"

    with_stores(server[1], job, body, 2)


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


def test_a_job_that_must_be_known_is_not_begun_anew(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        with pytest.raises(NoStateLeft, match="lost the job's history"):
            await store.claim_job(RECORD, known=True)
        await store.claim_job(RECORD)
        await store.claim_job(RECORD, known=True)

    with_stores(server[1], job, body)


def test_two_launchers_and_a_used_name(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(a: EtcdStore, b: EtcdStore) -> None:
        await a.claim_launcher("pid 1")
        with pytest.raises(ConfigError, match="run already by pid 1"):
            await b.claim_launcher("pid 2")
        await a.publish(decision(1), 0)
        await a.close()
        with pytest.raises(ConfigError, match="has run on this store before"):
            await b.claim_launcher("pid 2")

    with_stores(server[1], job, body, 2)


def test_endpoints(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        mine = (Endpoint(host="127.0.0.1", ftar_port=1, state_port=2),)
        await store.put_endpoints(ReplicaId(0), Incarnation("a"), mine)
        assert await store.get_endpoints(ReplicaId(0), Incarnation("a"), 1) == Endpoints.of(mine)
        with pytest.raises(StoreError, match="replica 1"):
            await store.get_endpoints(ReplicaId(1), Incarnation("a"), 1)

    with_stores(server[1], job, body)


def test_endpoints_that_were_watched_need_no_store(tmp_path: Path) -> None:
    server = EmbeddedEtcd(tmp_path / "data", tmp_path / "log")
    url = server.start()

    async def body(store: EtcdStore) -> None:
        mine = (Endpoint(host="127.0.0.1", ftar_port=1, state_port=2),)
        await store.put_endpoints(ReplicaId(0), Incarnation("a"), mine)
        watcher = Watcher()
        await store.watch(watcher)
        server.stop()
        assert await store.get_endpoints(ReplicaId(0), Incarnation("a"), 1) == Endpoints.of(mine)
        with pytest.raises(StoreError):
            await store.get_endpoints(ReplicaId(1), Incarnation("a"), 1)

    try:
        with_stores(url, "j", body)
    finally:
        server.stop()


def test_malformed_values_are_ignored(
    server: tuple[EmbeddedEtcd, str], job: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(store: EtcdStore) -> None:
        root = f"keepstep/{job}/"
        for key in (
            "decision",
            "reports/0",
            "reports/x",
            "announced/x",
            "announced/\u00b2",
            "what",
            "announced/" + "1" * 5000,
        ):
            await store.client.put((root + key).encode(), b"\xff not json")
        await store.client.put(f"{root}reports/7".encode(), etcd_module.encode(report()))  # of another replica
        await store.client.put(f"{root}reports/8".encode(), json.dumps({"replica_id": 8}).encode())
        for _ in range(2):
            view = await store.read()
            assert (view.last, view.reports, view.announced) == (None, {}, frozenset())
            assert view.revision > 0
        assert len([r for r in caplog.records if "refused a value in the store" in r.message]) == 5, "each once"
        for key in ("job", "endpoints/0/a"):
            await store.client.put((root + key).encode(), b"{")
        with pytest.raises(JobMismatch, match="another version"):
            await store.claim_job(RECORD)
        with pytest.raises(StoreError, match="cannot be used"):
            await store.get_endpoints(ReplicaId(0), Incarnation("a"), 1)
        one = (Endpoint(host="127.0.0.1", ftar_port=1, state_port=2),)
        await store.put_endpoints(ReplicaId(0), Incarnation("a"), one)
        with pytest.raises(StoreError, match="where 1 ranks listen, not 2"):
            await store.get_endpoints(ReplicaId(0), Incarnation("a"), 2)

    with caplog.at_level(logging.WARNING, "keepstep"):
        with_stores(server[1], job, body)


def test_a_malformed_value_does_not_undo_the_good_one(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        watcher = Watcher()
        await store.watch(watcher)
        await store.publish(decision(1), 0)
        await store.put_report(report())
        first = await watcher.until(lambda v: v.last is not None and bool(v.reports))
        for key in ("decision", "reports/0"):
            await store.client.put(f"keepstep/{job}/{key}".encode(), b"junk")
        await store.announce(ReplicaId(1))
        view = await watcher.until(lambda v: bool(v.announced))
        assert (view.last, view.reports) == (first.last, first.reports)
        assert await store.publish(decision(2), view.revision), "and the key heals"

    with_stores(server[1], job, body)


def test_equal_tokens_can_be_told_and_jobs_do_not_share_them() -> None:
    assert len(EtcdStore.token_check("j", b"token")) == 32
    assert len({EtcdStore.token_check(*of) for of in (("j", b"token"), ("j", b"another"), ("other", b"token"))}) == 3


def test_a_closed_store_says_so(server: tuple[EmbeddedEtcd, str], job: str) -> None:
    async def body(store: EtcdStore) -> None:
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await store.read()

    with_stores(server[1], job, body)


@pytest.mark.parametrize("url", ["", "127.0.0.1:2379", "etcd://127.0.0.1", "etcd://:1", "etcd://h:port", "http://h:1"])
def test_a_bad_address_is_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="etcd://HOST:2379"):
        asyncio.run(EtcdStore.open(url, "j"))


def test_nobody_there_is_a_sentence() -> None:
    with pytest.raises(StoreError, match=r"no etcd answers at 127\.0\.0\.1:9"):
        asyncio.run(EtcdStore.open("etcd://127.0.0.1:9", "j", timeout=0.5))


def test_addresses() -> None:
    assert parse_url("etcd://10.0.0.1:2379/") == (("10.0.0.1", 2379),)
    assert parse_url("etcd://[::1]:2379") == (("::1", 2379),)
    assert parse_url("etcd://a:1,[::1]:2,c:3") == (("a", 1), ("::1", 2), ("c", 3))


# --- the embedded server -----------------------------------------------------------------------------------------
