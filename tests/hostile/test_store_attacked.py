"""A store to which somebody else writes: watchers go on, the last good values stay, little is said, nothing grows."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bounds import measured
from targets import DECISION, REPORT

from keepstep.protocol.errors import StoreError
from keepstep.protocol.ids import Seq
from keepstep.runtime.etcd import EtcdStore
from keepstep.runtime.etcd_server import EmbeddedEtcd
from keepstep.runtime.etcd_view import MAX_VALUE, StoreView
from keepstep.runtime.wire import encode

LARGE = b'{"replica_id": "' + b"x" * (MAX_VALUE + 1) + b'"}'
VALUES = {
    "several megabytes": LARGE,
    "another type": b'["decided"]',
    "another version": encode(REPORT).replace(b'"materialized"', b'"is_materialized"'),
    "not text": b"\xff\xfe" * 1000,
    "nested": b'{"x":' * 100_000,
    "empty": b"",
    "no sense": encode(replace(REPORT, answers=Seq(-5))),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("etcd")
    etcd = EmbeddedEtcd(folder / "data", folder / "log")
    yield etcd.start()
    etcd.stop()


def with_store(url: str, job: str, body: Callable[[EtcdStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = await EtcdStore.open(url, job)
        try:
            async with asyncio.timeout(50):
                await body(store)
        finally:
            await store.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_cannot_be_read_stops_no_watch(url: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(store: EtcdStore) -> None:
        views: asyncio.Queue[StoreView] = asyncio.Queue()
        await store.put_report(REPORT)
        await store.publish(DECISION, 0)
        await store.watch(views.put_nowait)
        for n in range(2 if kind == "several megabytes" else 20):
            for key in (b"reports/0", b"reports/1", b"decision", b"dead/%d" % n):
                await store.client.put(store._root + key, VALUES[kind] + b" " * n)
        newer = replace(REPORT, replica_id=REPORT.replica_id, answers=Seq(4))
        await store.put_report(newer)
        while (view := await views.get()).reports.get(REPORT.replica_id, (None, 0))[0] != newer:
            pass
        assert view.last == DECISION, "the last good one stays in force"
        assert view.connected
        assert await store.publish(replace(DECISION, seq=Seq(4)), view.revision), "and can be replaced"

    with measured(caplog) as cost:
        with_store(url, kind.replace(" ", "-"), body)
    assert 1 <= len([line for line in cost.lines if "refused a value in the store" in line]) <= 3, cost.lines
    assert cost.rss_mib < 10 * len(VALUES[kind]) / 2**20 + 40, cost


def test_more_than_can_be_read_at_once_is_a_sentence(url: str, tmp_path: Path) -> None:
    """Somebody fills the job's keys: what is read is bounded, and the error says what is wrong."""

    async def body(store: EtcdStore) -> None:
        for n in range(9):
            await store.client.put(store._root + b"junk/%d" % n, LARGE)
        with pytest.raises(StoreError, match="larger than max"):
            await store.read()

    with_store(url, "full", body)
