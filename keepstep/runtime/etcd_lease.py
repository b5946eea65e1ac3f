"""A lease in etcd and the keys under it: what this process says for as long as it lives.

The newest value of every key is kept here, so that a lease that ran out while the process was stopped or cut off is replaced by
another with everything under it. Writes are serialized: an old value must not overtake a new one. One asyncio loop.
Fails: StoreError from `call`; what was not written then is written by the next keep-alive.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from keepstep.protocol.errors import StoreError

log = logging.getLogger("keepstep")
T = TypeVar("T")

CALL_S = 5.0


class Call(Protocol):
    """Awaits an etcd call; whatever goes wrong becomes a StoreError."""

    async def __call__(self, work: Coroutine[Any, Any, T], *, timeout: float | None = None) -> T: ...


class Lease:
    """A lease that is kept alive. If it was lost, another is granted, and everything is written again under it."""

    def __init__(self, client: Callable[[], Any], call: Call, seconds: float) -> None:
        """`client`: aetcd's, of the member that is talked to now."""
        self._client, self._call, self._seconds = client, call, seconds
        self._wanted: dict[bytes, bytes | None] = {}  # the newest value of each key; None: it must not be there
        self._written: dict[bytes, bytes] = {}  # what is there for certain, under the lease of now
        self._exclusive: set[bytes] = set()  # never written over another process's value
        self._id: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # an old value must not overtake a new one, nor a second lease the first

    async def put(self, key: bytes, value: bytes) -> None:
        self._wanted[key] = value
        self._written.pop(key, None)
        await self._call(self._flush())

    async def create(self, key: bytes, value: bytes) -> bytes | None:
        """Writes the key if nobody else holds it; else returns what it holds."""
        self._exclusive.add(key)
        self._wanted[key] = value
        return (await self._call(self._flush())).get(key)

    async def drop(self, key: bytes) -> None:
        self._wanted[key] = None
        self._written.pop(key, None)
        await self._call(self._flush())

    async def revoke(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._wanted.clear()
        async with self._lock:
            lease = self._id
            self._lost()
            if lease is not None:
                await self._call(self._client().revoke_lease(lease))

    async def _flush(self) -> dict[bytes, bytes]:
        """Writes what is not written yet. Returns the exclusive keys that another process holds, with its values."""
        async with self._lock:
            for attempt in (1, 2):
                lease = await self._granted()
                try:
                    return await self._write_all(lease)
                except StoreError as error:
                    if attempt == 2 or "lease not found" not in str(error):
                        raise
                    self._lost()  # it ran out while we were stopped
        raise AssertionError("unreachable")

    async def _write_all(self, lease: int) -> dict[bytes, bytes]:
        client, refused = self._client(), {}
        for key, value in list(self._wanted.items()):
            if value is None:
                await self._call(client.delete(key))
                if self._wanted.get(key) is None:
                    self._wanted.pop(key, None)
            elif self._written.get(key) != value:
                holder = None
                if key in self._exclusive:
                    holder = await self._create(key, value, lease)
                else:
                    await self._call(client.put(key, value, lease=lease))
                if holder is None:
                    self._written[key] = value
                else:
                    refused[key] = holder
                    self._wanted.pop(key, None)
        return refused

    async def _create(self, key: bytes, value: bytes, lease: int) -> bytes | None:
        client = self._client()
        done, got = await self._call(
            client.transaction(
                compare=[client.transactions.version(key) == 0],
                success=[client.transactions.put(key, value, lease=lease)],
                failure=[client.transactions.get(key)],
            )
        )
        if done or got[0][0][1].lease == lease:  # ours from a try whose answer was lost
            return None
        return bytes(got[0][0][0])

    async def _granted(self) -> int:
        if self._id is None:
            lease = await self._call(self._client().lease(max(1, round(self._seconds))))
            self._id = int(lease.id)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._keep_alive())
        return self._id

    def _lost(self) -> None:
        self._id = None
        self._written.clear()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 3)
            try:
                async with self._lock:
                    await self._refresh()
                for key, holder in (await self._call(self._flush())).items():
                    who = holder.decode(errors="replace")
                    log.error("while this process was away, %s was taken by %s", key.decode(errors="replace"), who)
            except StoreError as error:
                log.debug("lease not renewed: %s", error)

    async def _refresh(self) -> None:
        if self._id is None:
            return
        reply = await self._call(self._client().refresh_lease(self._id), timeout=min(self._seconds, CALL_S))
        if reply is None or reply.TTL <= 0:
            log.warning("the store had given up on this process for a while; it reports again")
            self._lost()
