"""The store: what leaders and launchers of one job tell each other through etcd (FT-HSDP section 5.1).

    keepstep/JOB/job                    JobRecord: what every replica must agree on; written once
    keepstep/JOB/launcher               who runs the job; under a lease
    keepstep/JOB/decision               the last Decision; replaced by compare-and-swap only
    keepstep/JOB/reports/REPLICA        the replica's newest Report; under the leader's lease
    keepstep/JOB/endpoints/REPLICA/LIFE where its ranks listen
    keepstep/JOB/dead/LIFE              a launcher saw this incarnation exit
    keepstep/JOB/announced/REPLICA      a launcher has started it; under the launcher's lease

Values are JSON. What cannot be read is logged once and ignored. Liveness is the store's own: leases, never clocks of two
hosts. When the store goes away the last view stays, and everything is read again when it is back.

One asyncio loop. Fails: StoreError (unreachable, refused), ConfigError and JobMismatch with one sentence.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import aetcd
import msgspec

from keepstep.protocol.errors import ConfigError, JobMismatch, RemoteProtocolError, StoreError
from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Decision, Endpoint, Report
from keepstep.runtime.wire import decode, encode

log = logging.getLogger("keepstep")
T = TypeVar("T")

CALL_S = 5.0
BACK_OFF_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What all replicas of a job must agree on. An empty field is not known yet."""

    version: str
    num_replicas: int
    ranks_per_replica: int
    data_fingerprint: str
    layout_digest: str
    token_check: str


_FIELDS = {
    "token_check": "job token",
    "version": "keepstep version",
    "num_replicas": "number of replicas",
    "ranks_per_replica": "number of ranks per replica",
    "data_fingerprint": "data set or unit size",
    "layout_digest": "model or bucket size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """What one process sees of the job. Times are this process's monotonic nanoseconds."""

    last: Decision | None
    revision: int  # of the decision's key; 0: there is none
    last_seen_at: int
    reports: dict[ReplicaId, tuple[Report, int]]
    dead: frozenset[Incarnation]
    announced: frozenset[ReplicaId]
    connected: bool


def parse_url(url: str) -> tuple[str, int]:
    """(host, port) of etcd://HOST:PORT. Raises ConfigError."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if scheme != "etcd" or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"the store's address must look like etcd://HOST:2379, got {url!r}")
    return host.strip("[]"), int(port)


class _Lease:
    """A lease that is kept alive, and granted anew with everything under it if it was lost."""

    def __init__(self, store: "EtcdStore", seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._values: dict[bytes, bytes] = {}
        self._id: int | None = None
        self._task: asyncio.Task[None] | None = None

    async def put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        await self._put(key, value)

    async def create(self, key: bytes, value: bytes) -> bytes | None:
        """Writes the key if there is none; else returns what it holds."""
        client = self._store.client
        done, got = await self._store.call(
            client.transaction(
                compare=[client.transactions.version(key) == 0],
                success=[client.transactions.put(key, value, lease=await self._granted())],
                failure=[client.transactions.get(key)],
            )
        )
        if done:
            self._values[key] = value
            return None
        return bytes(got[0][0][0]) if got[0] else b""

    async def drop(self, key: bytes) -> None:
        self._values.pop(key, None)
        await self._store.call(self._store.client.delete(key))

    async def _put(self, key: bytes, value: bytes) -> None:
        for attempt in (1, 2):
            lease = await self._granted()
            try:
                await self._store.call(self._store.client.put(key, value, lease=lease))
                return
            except StoreError as error:
                if attempt == 2 or "lease not found" not in str(error):
                    raise
                self._id = None  # it ran out while we were stopped

    async def _granted(self) -> int:
        if self._id is None:
            lease = await self._store.call(self._store.client.lease(max(1, round(self._seconds))))
            self._id = int(lease.id)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._keep_alive())
        return self._id

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 3)
            try:
                reply = await self._store.call(self._store.client.refresh_lease(await self._granted()))
                if reply is None or reply.TTL <= 0:
                    log.warning("the store had given up on this process for a while; it reports again")
                    self._id = None
                    for key, value in list(self._values.items()):
                        await self._put(key, value)
            except StoreError as error:
                log.debug("lease not renewed: %s", error)

    async def revoke(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        lease, self._id = self._id, None
        self._values.clear()
        if lease is not None:
            await self._store.call(self._store.client.revoke_lease(lease))


class EtcdStore:
    """One process's connection to the store of one job. Use `open`."""

    def __init__(self, client: Any, job: str, token: bytes, lease_s: float) -> None:
        self.client, self.job, self._token = client, job, token
        self._root = f"keepstep/{job}/".encode()
        self._lease = _Lease(self, lease_s)
        self._endpoints: dict[tuple[ReplicaId, Incarnation], tuple[Endpoint, ...]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._reading = _Reading(self._root)

    @staticmethod
    async def open(url: str, job: str, token: bytes, *, lease_s: float = 2.0, timeout: float = 10.0) -> "EtcdStore":
        """Connects. Raises ConfigError for a bad address, StoreError if nobody answers within `timeout` seconds."""
        host, port = parse_url(url)
        if not job or "/" in job:
            raise ConfigError(f"a job's name must be one word without a slash, got {job!r}")
        options = {"grpc.max_receive_message_length": 64 << 20, "grpc.max_reconnect_backoff_ms": 200}
        client = aetcd.Client(host=host, port=port, options=options)
        store = EtcdStore(client, job, token, lease_s)
        deadline = time.monotonic() + timeout
        while True:
            try:
                await store.call(client.get(store._root + b"job"), timeout=min(CALL_S, timeout))
                return store
            except StoreError as error:
                if time.monotonic() > deadline:
                    await client.close()
                    raise StoreError(
                        f"no etcd answers at {host}:{port} ({error}): start it, or leave --store out to use the embedded one"
                    ) from None
                await asyncio.sleep(BACK_OFF_S)

    async def close(self) -> None:
        """Withdraws, and ends every task and connection; bounded in time."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        try:
            await asyncio.wait_for(self._lease.revoke(), 2.0)
        except (StoreError, TimeoutError) as error:
            log.debug("the lease runs out by itself: %s", error)
        await self.client.close()

    async def call(self, work: Awaitable[T], *, timeout: float = CALL_S) -> T:
        """Awaits an etcd call; whatever goes wrong becomes a StoreError."""
        try:
            return await asyncio.wait_for(work, timeout)
        except TimeoutError:
            raise StoreError(f"etcd did not answer within {timeout:g} s") from None
        except aetcd.ClientError as error:
            raise StoreError(f"etcd: {error}") from None

    # --- the job as a whole -----------------------------------------------------------------------------------

    @staticmethod
    def token_check(job: str, token: bytes) -> str:
        """Tells equal tokens without telling the token."""
        return hmac.new(token, f"keepstep job {job}".encode(), "sha256").hexdigest()[:32]

    async def claim_job(self, record: JobRecord) -> None:
        """Writes the job's record, or compares with it. Raises JobMismatch."""
        key = self._root + b"job"
        while True:
            got = await self.call(self.client.get(key))
            revision = 0 if got is None else got.mod_revision
            merged = record if got is None else _merge(decode(got.value, JobRecord), record, self.job)
            if got is not None and encode(merged) == got.value:
                return
            if await self._swap(key, encode(merged), revision):
                return

    async def check_token(self) -> None:
        """Raises JobMismatch if the job on this store has another token."""
        got = await self.call(self.client.get(self._root + b"job"))
        if got is not None:
            known = decode(got.value, JobRecord)
            _merge(known, replace(known, token_check=self.token_check(self.job, self._token)), self.job)

    async def claim_launcher(self, text: str) -> None:
        """Makes this process the job's launcher. Raises ConfigError if another one lives, or if the job has a history."""
        holder = await self._lease.create(self._root + b"launcher", text.encode())
        if holder is not None:
            raise ConfigError(
                f"job {self.job} is run already by {holder.decode(errors='replace')}: choose another --job, or stop that one"
            )
        got = await self.call(self.client.get(self._root + b"decision"))
        if got is not None:
            raise ConfigError(
                f"job {self.job} has run on this store before, and its history is kept: choose another --job, or delete the "
                f"keys under keepstep/{self.job}/"
            )

    async def announce(self, replica_id: ReplicaId) -> None:
        """This replica has been started and will report."""
        await self._lease.put(self._root + b"announced/%d" % replica_id, b"{}")

    async def unannounce(self, replica_id: ReplicaId) -> None:
        """It will not come (back)."""
        await self._lease.drop(self._root + b"announced/%d" % replica_id)

    async def mark_dead(self, incarnations: Iterable[Incarnation]) -> None:
        """These lives have ended for certain, whatever their leases say."""
        for life in incarnations:
            await self.call(self.client.put(self._root + f"dead/{life}".encode(), b"{}"))

    # --- one replica ------------------------------------------------------------------------------------------

    async def put_report(self, report: Report) -> None:
        """Replaces the replica's report."""
        await self._lease.put(self._root + b"reports/%d" % report.replica_id, encode(report))

    async def withdraw(self) -> None:
        """Takes back everything that is under our lease."""
        await self._lease.revoke()

    async def put_endpoints(self, replica: ReplicaId, life: Incarnation, endpoints: tuple[Endpoint, ...]) -> None:
        await self.call(self.client.put(self._root + f"endpoints/{replica}/{life}".encode(), encode(endpoints)))

    async def get_endpoints(self, replica: ReplicaId, life: Incarnation) -> tuple[Endpoint, ...]:
        """By rank. They never change in one life, so they are read once."""
        known = self._endpoints.get((replica, life))
        if known is None:
            got = await self.call(self.client.get(self._root + f"endpoints/{replica}/{life}".encode()))
            if got is None:
                raise StoreError(f"replica {replica} has not said where its ranks listen")
            known = self._endpoints[replica, life] = decode(got.value, tuple[Endpoint, ...])
        return known

    async def publish(self, decision: Decision, revision: int) -> bool:
        """Makes `decision` the last one iff the one of `revision` still is; True if it did."""
        return await self._swap(self._root + b"decision", encode(decision), revision)

    async def _swap(self, key: bytes, value: bytes, revision: int) -> bool:
        client = self.client
        done, _ = await self.call(
            client.transaction(
                compare=[client.transactions.mod(key) == revision],
                success=[client.transactions.put(key, value)],
                failure=[],
            )
        )
        return bool(done)

    # --- watching ---------------------------------------------------------------------------------------------

    async def watch(self, on_change: Callable[[StoreView], None]) -> None:
        """Reads everything, calls `on_change` at once, and again after every change, for as long as the store is open."""
        await self._read_all()
        on_change(self._reading.view())
        self._watch = asyncio.get_running_loop().create_task(self._follow(on_change))

    async def read(self) -> StoreView:
        """Everything, now."""
        await self._read_all()
        return self._reading.view()

    async def _read_all(self) -> int:
        got = await self.call(self.client.get_prefix(self._root))
        self._reading.replace_all({kv.key: (kv.value, kv.mod_revision) for kv in got})
        return int(got.header.revision)

    async def _follow(self, on_change: Callable[[StoreView], None]) -> None:
        loop, pending = asyncio.get_running_loop(), False

        def tell() -> None:
            nonlocal pending
            pending = False
            on_change(self._reading.view())

        while True:
            try:
                revision = await self._read_all()
                tell()
                watch = await self.call(self.client.watch_prefix(self._root, start_revision=revision + 1))
                async for event in watch:
                    self._reading.change(event.kv.key, event.kv.value, event.kv.mod_revision, event.kind)
                    if not pending:  # one call for all events that came together
                        pending = True
                        loop.call_soon(tell)
            except (StoreError, aetcd.ClientError, RuntimeError) as error:
                log.debug("the watch ended: %s", error)
            self._reading.connected = False
            tell()
            await asyncio.sleep(BACK_OFF_S)


class _Reading:
    """The keys of one job, decoded as they change."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._raw: dict[bytes, bytes] = {}
        self._values: dict[
            bytes, tuple[Any, int]
        ] = {}  # decoded report or decision, and when this version was first seen
        self._revision = 0
        self.connected = False

    def replace_all(self, found: dict[bytes, tuple[bytes, int]]) -> None:
        for key in self._raw.keys() - found.keys():
            self._drop(key)
        for key, (value, revision) in found.items():
            self._put(key, value, revision)
        self.connected = True

    def change(self, key: bytes, value: bytes, revision: int, kind: Any) -> None:
        if kind == aetcd.rtypes.EventKind.DELETE:
            self._drop(key)
        else:
            self._put(key, value, revision)

    def _put(self, key: bytes, value: bytes, revision: int) -> None:
        name = key.removeprefix(self._root)
        if name == b"decision":
            self._revision = revision
        if self._raw.get(key) == value:
            return
        self._raw[key] = value
        kind = Decision if name == b"decision" else Report if name.startswith(b"reports/") else None
        if kind is None:
            return
        try:
            self._values[name] = (decode(value, kind), time.monotonic_ns())
        except RemoteProtocolError as error:
            log.warning("ignored the value of %s in the store: %s", key.decode(errors="replace"), error)
            self._values.pop(name, None)

    def _drop(self, key: bytes) -> None:
        self._raw.pop(key, None)
        self._values.pop(key.removeprefix(self._root), None)
        if key.removeprefix(self._root) == b"decision":
            self._revision = 0

    def view(self) -> StoreView:
        last, seen = self._values.get(b"decision", (None, 0))
        reports = {
            value.replica_id: (value, at) for name, (value, at) in self._values.items() if name.startswith(b"reports/")
        }
        return StoreView(
            last=last,
            revision=self._revision,
            last_seen_at=seen,
            reports=reports,
            dead=frozenset(Incarnation(name) for name in self._names(b"dead/")),
            announced=frozenset(ReplicaId(int(name)) for name in self._names(b"announced/") if name.isdigit()),
            connected=self.connected,
        )

    def _names(self, folder: bytes) -> list[str]:
        prefix = self._root + folder
        return [key.removeprefix(prefix).decode(errors="replace") for key in self._raw if key.startswith(prefix)]


def _merge(known: JobRecord, mine: JobRecord, job: str) -> JobRecord:
    """The record with what was not known yet. Raises JobMismatch, naming what differs."""
    theirs, ours = asdict(known), asdict(mine)
    for name, words in _FIELDS.items():
        if theirs[name] and ours[name] and theirs[name] != ours[name]:
            shown = "" if name == "token_check" else f": {theirs[name]} there, {ours[name]} here"
            raise JobMismatch(
                f"this process does not fit job {job}, the {words} differs{shown}; start every replica with the same script, "
                "arguments, token and installation, or choose another --job"
            )
    return msgspec.convert({name: theirs[name] or ours[name] for name in ours}, JobRecord)
