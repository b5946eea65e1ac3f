"""The store: what leaders and launchers of one job tell each other through etcd (FT-HSDP section 5.1).

    keepstep/JOB/job                    JobRecord: what every replica must agree on; written once
    keepstep/JOB/launcher               who runs the job; under a lease
    keepstep/JOB/decision               the last Decision; replaced by compare-and-swap only
    keepstep/JOB/reports/REPLICA        the replica's newest Report; under the leader's lease
    keepstep/JOB/endpoints/REPLICA/LIFE where its ranks listen
    keepstep/JOB/dead/LIFE              a launcher saw this incarnation exit
    keepstep/JOB/announced/REPLICA      a launcher has started it; under the launcher's lease. An agent: REPLICA/HOST
    keepstep/JOB/requests/REPLICA       somebody wants it to leave, or to come back; requests/job: the job to stop
    keepstep/JOB/roster/...             the hosts of a job that agents run (`etcd_roster`)

Values are JSON. What cannot be read is refused (`etcd_view`). Liveness is the store's own: leases, never clocks of two
hosts. When the store goes away (its end is seen at once, its silence within QUIET_S + ANSWER_S) the last view stays, and
everything is read again when it is back. The watch stream is our own: aetcd's neither sees a silent server nor gives batches.

One asyncio loop. Fails: StoreError (unreachable, refused), ConfigError and JobMismatch with one sentence.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

import aetcd
import msgspec
from aetcd import rpc

from keepstep.protocol.errors import ConfigError, JobMismatch, NoStateLeft, RemoteProtocolError, StoreError
from keepstep.protocol.ids import Incarnation, ReplicaId
from keepstep.protocol.messages import Decision, Endpoint, Report, Request
from keepstep.runtime.endpoints import Endpoints
from keepstep.runtime.etcd_lease import CALL_S, Lease
from keepstep.runtime.etcd_members import WITH_A_LEADER, Members, is_away
from keepstep.runtime.etcd_view import Reading, StoreView
from keepstep.runtime.wire import decode, encode

log = logging.getLogger("keepstep")
T = TypeVar("T")

BACK_OFF_S = 0.1
QUIET_S = 2.0  # a watch that brought nothing for so long is asked for a sign of life ...
ANSWER_S = 3.0  # ... and given up without one after this


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
    "layout_digest": "model, bucket size, wire_dtype or engine settings",
}


class EtcdStore:
    """One process's connection to the store of one job. Use `open`."""

    def __init__(self, members: Members, job: str, lease_s: float) -> None:
        self._members, self.job = members, job
        self._root = f"keepstep/{job}/".encode()
        self._watched = _below(self._root)
        self._lease = Lease(lambda: self.client, self.call, lease_s)
        self._endpoints: dict[tuple[ReplicaId, Incarnation], Endpoints] = {}
        self._watch: asyncio.Task[None] | None = None
        self._reading = Reading(self._root)
        self._closed = False

    @classmethod
    async def open(cls, url: str, job: str, *, lease_s: float = 2.0, timeout: float = 10.0) -> Self:
        """Connects. Raises ConfigError for a bad address, StoreError if nobody answers within `timeout` seconds."""
        members = Members(url)
        if not job or "/" in job:
            raise ConfigError(f"a job's name must be one word without a slash, got {job!r}")
        store = cls(members, job, lease_s)
        try:
            await store._reach(members.names, timeout)
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def client(self) -> Any:
        """aetcd's, of the member that is talked to now."""
        return self._members.client

    async def _reach(self, address: str, timeout: float) -> None:
        deadline, said = time.monotonic() + timeout, False
        while True:
            try:
                await self.call(self.client.get(self._root + b"job"), timeout=min(CALL_S, timeout))
                return
            except StoreError as error:
                if not said:
                    log.warning("no etcd answers at %s yet: %s", address, error)
                    said = True
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"no etcd answers at {address} ({error}): start it, or leave --store out to use the embedded one"
                    ) from None
                await asyncio.sleep(BACK_OFF_S)

    async def close(self) -> None:
        """Withdraws, and ends every task and connection; bounded in time."""
        if self._closed:
            return
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        try:
            async with asyncio.timeout(2.0):
                await self._lease.revoke()
        except (StoreError, TimeoutError) as error:
            log.debug("the lease runs out by itself: %s", error)
        self._closed = True
        await self._members.close()

    async def call(self, work: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T:
        """Awaits an etcd call; whatever goes wrong becomes a StoreError."""
        if self._closed:
            work.close()
            raise StoreError("the connection to the store is closed")
        client, timeout = self.client, CALL_S if timeout is None else timeout
        try:
            async with asyncio.timeout(timeout):  # not wait_for: that of Python 3.11 can swallow a cancellation
                return await work
        except TimeoutError:
            self._members.leave(client)
            raise StoreError(f"etcd did not answer within {timeout:g} s") from None
        except (aetcd.ClientError, rpc.RpcError, rpc.BaseError) as error:
            if is_away(error):
                self._members.leave(client)
            raise StoreError(f"etcd: {error}") from None

    # --- the job as a whole -----------------------------------------------------------------------------------

    @staticmethod
    def token_check(job: str, token: bytes) -> str:
        """Tells equal tokens without telling the token."""
        return hmac.new(token, f"keepstep job {job}".encode(), "sha256").hexdigest()[:32]

    async def claim_job(self, record: JobRecord, *, known: bool = False) -> None:
        """Writes the job's record, or compares with it. Raises JobMismatch; NoStateLeft if it is `known`, but not there."""
        key = self._root + b"job"
        while True:
            got = await self.call(self.client.get(key))
            if got is None and known:  # to write it would begin the job anew
                raise NoStateLeft(f"the store has lost the job's history: it does not know job {self.job} any more")
            revision = 0 if got is None else got.mod_revision
            merged = record if got is None else _merge(self._record(got), record, self.job)
            if got is not None and encode(merged) == got.value:
                return
            if await self._swap(key, encode(merged), revision):
                return

    async def job_record(self) -> JobRecord | None:
        """What the replicas agree on; None: the store does not know this job."""
        got = await self.call(self.client.get(self._root + b"job"))
        return None if got is None else self._record(got)

    def _record(self, got: Any) -> JobRecord:
        try:
            return decode(got.value, JobRecord)
        except RemoteProtocolError as error:
            raise JobMismatch(
                f"what the store holds about job {self.job} cannot be read ({error}): was it written by another version of "
                "keepstep? Choose another --job, or install the same version everywhere"
            ) from None

    async def claim_launcher(self, text: str) -> None:
        """Makes this process the job's launcher. Raises ConfigError if another one lives, or if the job has a history."""
        holder = await self._lease.create(self._root + b"launcher", text.encode())
        if holder is not None:
            raise ConfigError(
                f"job {self.job} is run already by {holder.decode(errors='replace')}: choose another --job, or stop that one"
            )
        found = [await self.call(self.client.get(self._root + name)) for name in (b"decision", b"roster/plan")]
        if any(got is not None for got in found):
            raise ConfigError(
                f"job {self.job} has run on this store before, and its history is kept: choose another --job, or delete the "
                f"keys under keepstep/{self.job}/"
            )

    async def announce(self, replica_id: ReplicaId) -> None:
        """This replica has been started and will report."""
        await self._lease.put(self._announcement(replica_id), b"{}")

    async def unannounce(self, replica_id: ReplicaId) -> None:
        """It will not come (back)."""
        await self._lease.drop(self._announcement(replica_id))

    def _announcement(self, replica_id: ReplicaId) -> bytes:
        return self._root + b"announced/%d" % replica_id

    async def mark_dead(self, incarnations: Iterable[Incarnation]) -> None:
        """These lives have ended for certain, whatever their leases say."""
        for life in incarnations:
            await self.call(self.client.put(self._root + f"dead/{life}".encode(), b"{}"))

    # --- what operators want ----------------------------------------------------------------------------------

    async def ask(self, replica_id: ReplicaId | None, request: Request) -> None:
        """Of one replica, or (None) of the whole job. It stands, whoever is alive to hear it."""
        name = "job" if replica_id is None else f"{replica_id}"
        await self.call(self.client.put(self._root + f"requests/{name}".encode(), encode(request)))

    async def forget_requests(self) -> None:
        """A new run begins: what was asked of an earlier one does not count."""
        await self.call(self.client.delete_prefix(self._root + b"requests/"))

    # --- one replica ------------------------------------------------------------------------------------------

    async def put_report(self, report: Report) -> None:
        """Replaces the replica's report."""
        await self._lease.put(self._root + b"reports/%d" % report.replica_id, encode(report))

    async def put_endpoints(self, replica: ReplicaId, life: Incarnation, endpoints: tuple[Endpoint, ...]) -> None:
        await self.call(
            self.client.put(self._root + f"endpoints/{replica}/{life}".encode(), encode(Endpoints.of(endpoints)))
        )

    async def get_endpoints(self, replica: ReplicaId, life: Incarnation, ranks: int) -> Endpoints:
        """By rank. They never change in one life, so they are read once."""
        known = self._endpoints.get((replica, life))
        if known is None:
            key = self._root + f"endpoints/{replica}/{life}".encode()
            # Whoever watches has them already, for they are written before the first report: no call that could fail.
            got = self._reading.raw(key) or await self.call(self.client.get(key))
            if got is None:
                raise StoreError(f"replica {replica} has not said where its ranks listen")
            known = stored(got, Endpoints)
            if len(known) != ranks:
                raise StoreError(f"{key.decode()} in the store tells where {len(known)} ranks listen, not {ranks}")
            self._endpoints[replica, life] = known
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

    async def watch(self, on_change: Callable[[StoreView], None], *, only: str = "", to: str = "") -> None:
        """Reads everything, calls `on_change` at once, and again after every change, for as long as the store is open.

        `only`: of the keys below this one, without the rest of the job; up to those below `to` in the order of the alphabet.
        """
        first, last = self._root + only.encode(), self._root + (to or only).encode()
        self._watched = first, _below(last)[1]
        revision = await self._read_all()
        on_change(self._reading.view())
        self._watch = asyncio.get_running_loop().create_task(self._follow(on_change, revision))

    async def read(self) -> StoreView:
        """Everything, now."""
        await self._read_all()
        return self._reading.view()

    async def _read_all(self, *, anew: bool = False) -> int:
        got = await self.call(self.client.get_range(*self._watched))
        revision = int(got.header.revision)
        if anew or self._watch is None or revision >= self._reading.newest:  # else the watch knows more already
            self._reading.replace_all(list(got), revision)
        if anew or self._watch is None:
            self._reading.connected = True
        return revision

    async def _follow(self, on_change: Callable[[StoreView], None], revision: int) -> None:
        loop = asyncio.get_running_loop()
        pending: asyncio.Handle | None = None

        def run() -> None:
            nonlocal pending
            pending = None
            if not self._closed:
                on_change(self._reading.view())

        def tell() -> None:  # from the loop: an error of `on_change` is the loop's to report and does not end the watch
            nonlocal pending
            pending = pending or loop.call_soon(run)

        try:
            while True:
                try:
                    if not self._reading.connected:
                        revision = await self._read_all(anew=True)
                        tell()
                    await self._stream(revision, tell)
                except (StoreError, aetcd.ClientError, rpc.RpcError, rpc.BaseError) as error:
                    log.debug("the watch ended: %s", error)
                except Exception as error:  # top of a task: whatever ended the watch, it must begin again
                    log.exception("the watch ended: %s", error)
                if self._reading.connected:
                    self._reading.connected = False
                    tell()
                await asyncio.sleep(BACK_OFF_S)
        finally:
            if pending is not None:
                pending.cancel()

    async def _stream(self, revision: int, tell: Callable[[], None]) -> None:
        """Follows what happens after `revision`; one `tell` for all events that come together. Returns by an error only."""
        client = self.client
        await self.call(client.connect())
        stream = rpc.WatchStub(client.channel).Watch(metadata=WITH_A_LEADER)
        reading: asyncio.Future[Any] | None = None
        start, end = self._watched
        try:
            request = rpc.WatchCreateRequest(key=start, range_end=end, start_revision=revision + 1)
            await self.call(stream.write(rpc.WatchRequest(create_request=request)))
            while True:
                reading = asyncio.ensure_future(stream.read())
                if not (await asyncio.wait({reading}, timeout=QUIET_S))[0]:
                    sign = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
                    await self.call(stream.write(sign), timeout=ANSWER_S)
                    if not (await asyncio.wait({reading}, timeout=ANSWER_S))[0]:
                        self._members.leave(client)
                        raise StoreError("the watch is silent")
                response = reading.result()
                if not isinstance(response, rpc.WatchResponse) or response.canceled:
                    raise StoreError(f"etcd ended the watch: {getattr(response, 'cancel_reason', 'end of stream')}")
                for event in response.events:
                    self._reading.change(event)
                if response.events:
                    tell()
        finally:
            stream.cancel()
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


def _below(prefix: bytes) -> tuple[bytes, bytes]:
    """The range of the keys that begin with it."""
    return prefix, prefix[:-1] + bytes([prefix[-1] + 1])


def stored(got: Any, kind: type[T]) -> T:
    """What a key holds. Raises StoreError if it cannot be read."""
    try:
        return decode(got.value, kind)
    except RemoteProtocolError as error:
        raise StoreError(
            f"the value of {got.key.decode(errors='replace')} in the store cannot be used: {error}"
        ) from None


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
