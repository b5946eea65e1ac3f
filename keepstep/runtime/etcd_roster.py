"""What the agents of a job say to each other through the store: who is there, who keeps what, what became of it.

    keepstep/JOB/roster/plan               what is to be run; written once
    keepstep/JOB/roster/hosts/NAME         a host in the pool; under its agent's lease
    keepstep/JOB/roster/seats              which host keeps which replica; replaced by compare-and-swap only
    keepstep/JOB/roster/claims/REPLICA     its newest life; by compare-and-swap, and before that life is started
    keepstep/JOB/roster/outcomes/REPLICA   why it does not go on where it was
    keepstep/JOB/roster/drained/NAME       somebody wants this host to keep nothing

`protocol/roster.py` says what is made of it. Reading and watching: `EtcdStore`. Fails as that does.
"""

from collections.abc import Callable

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Request
from keepstep.protocol.roster import Claim, Outcome, Plan, PoolHost, Seats
from keepstep.runtime.etcd import EtcdStore, stored
from keepstep.runtime.etcd_view import StoreView
from keepstep.runtime.wire import encode


class RosterStore(EtcdStore):
    """The store, as agents and operators use it."""

    host = ""  # whose agent this is

    async def offer_plan(self, plan: Plan) -> Plan:
        """The job's plan: this one, unless there was another before. Raises ConfigError if the job is run without agents."""
        key = self._key("plan")
        while True:
            got = await self.call(self.client.get(key))
            if got is not None:
                return stored(got, Plan)
            for name in (b"launcher", b"decision"):
                if await self.call(self.client.get(self._root + name)) is not None:
                    raise ConfigError(
                        f"job {self.job} is run, or was run, without agents: choose another --job, or delete the keys under "
                        f"keepstep/{self.job}/"
                    )
            await self._swap(key, encode(plan), 0)

    async def enter(self, host: PoolHost) -> str | None:
        """Into the pool. If somebody has this name already: what is known of that one."""
        held = await self._lease.create(self._key(f"hosts/{host.name}"), encode(host))
        self.host = host.name
        return None if held is None else held.decode(errors="replace")

    async def publish_seats(self, seats: Seats, revision: int) -> bool:
        """Makes these the seats iff the ones of `revision` still are; True if it did."""
        return await self._swap(self._key("seats"), encode(seats), revision)

    async def claim(self, replica: ReplicaId, claim: Claim) -> bool:
        """Makes this the replica's newest life: the one before is dead from now on, whatever becomes of it, and its outcome is
        forgotten. False if another place of the replica is newer than ours: it must not be started."""
        key, client = self._key(f"claims/{replica}"), self.client
        while True:
            got = await self.call(client.get(key))
            before = None if got is None else stored(got, Claim)
            if before is not None and before.number > claim.number:
                return False
            if before == claim:  # by a try whose answer was lost
                return True
            put, transactions = client.transactions.put, client.transactions
            dead = [] if before is None else [put(self._root + f"dead/{before.incarnation}".encode(), b"{}")]
            done, _ = await self.call(
                client.transaction(
                    compare=[transactions.mod(key) == (0 if got is None else got.mod_revision)],
                    success=[put(key, encode(claim)), *dead, transactions.delete(self._key(f"outcomes/{replica}"))],
                    failure=[],
                )
            )
            if done:
                return True

    async def put_outcome(self, replica: ReplicaId, outcome: Outcome) -> bool:
        """False: a life has been claimed for a newer place of it, and nobody asks what became of this one."""
        key, client = self._key(f"claims/{replica}"), self.client
        while True:
            got = await self.call(client.get(key))
            if got is not None and stored(got, Claim).number > outcome.number:
                return False
            done, _ = await self.call(
                client.transaction(
                    compare=[client.transactions.mod(key) == (0 if got is None else got.mod_revision)],
                    success=[client.transactions.put(self._key(f"outcomes/{replica}"), encode(outcome))],
                    failure=[],
                )
            )
            if done:
                return True

    async def drain_host(self, name: str, request: Request | None) -> None:
        """It is to keep no replica; None: it may again."""
        key = self._key(f"drained/{name}")
        await self.call(self.client.delete(key) if request is None else self.client.put(key, encode(request)))

    async def watch_roster(self, on_change: Callable[[StoreView], None]) -> None:
        """Requests and roster only, not what leaders say in every step. Nothing else lies between the two."""
        await self.watch(on_change, only="requests/", to="roster/")

    def _announcement(self, replica_id: ReplicaId) -> bytes:
        return self._root + f"announced/{replica_id}/{self.host}".encode()  # not over another host's

    def _key(self, name: str) -> bytes:
        return self._root + f"roster/{name}".encode()
