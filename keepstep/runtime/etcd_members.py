"""The members of an etcd cluster: one is talked to, the next when that one fails.

Any member serves everything, so all go to the same one for as long as it answers. One that is dead, frozen, or cut off from its
cluster (it says so: we ask for a leader with every call) is left for the next; calls that are under way there end by themselves.
One asyncio loop.
"""

from typing import Any

import aetcd
from aetcd import rpc

from keepstep.protocol.errors import ConfigError
from keepstep.runtime.environment import Address, host_and_port

CHANNEL = {
    "grpc.max_receive_message_length": 64 << 20,
    "grpc.max_reconnect_backoff_ms": 200,
    "grpc.keepalive_time_ms": 10_000,  # a host that vanished never closes its connection; etcd refuses less than 5 s
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.enable_http_proxy": 0,  # the store is a neighbour, whatever http_proxy says
}
WITH_A_LEADER = (("hasleader", "true"),)


def parse_url(url: str) -> tuple[Address, ...]:
    """The (host, port)s of etcd://HOST:PORT or etcd://HOST:PORT,HOST:PORT,... Raises ConfigError."""
    scheme, _, rest = url.partition("://")
    found = []
    for address in rest.rstrip("/").split(","):
        parts = host_and_port(address)
        if scheme != "etcd" or parts is None:
            raise ConfigError(
                f"the store's address must look like etcd://HOST:2379 or etcd://A:2379,B:2379,C:2379, got {url!r}"
            )
        found.append((parts[0].strip("[]"), parts[1]))
    return tuple(found)


class Members:
    """A client for each of them; nothing is connected before it is used."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError."""
        addresses = parse_url(url)
        self.names = ", ".join(f"{host}:{port}" for host, port in addresses)
        self._clients = [_client(*address) for address in addresses]
        self._at = 0

    @property
    def client(self) -> Any:
        """aetcd's, of the member of now."""
        return self._clients[self._at]

    def leave(self, client: Any) -> None:
        """A call by this client has failed. Does nothing if another one is in use already."""
        if client is self.client:
            self._at = (self._at + 1) % len(self._clients)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def _client(host: str, port: int) -> Any:
    client = aetcd.Client(host=f"[{host}]" if ":" in host else host, port=port, options=CHANNEL)
    client.metadata = WITH_A_LEADER
    return client


def is_away(error: BaseException) -> bool:
    """Whether this says that the member does not answer, or answers that it cannot serve anybody."""
    if isinstance(error, rpc.AioRpcError):
        return error.code() in (rpc.StatusCode.UNAVAILABLE, rpc.StatusCode.DEADLINE_EXCEEDED)
    return isinstance(error, TimeoutError | aetcd.ConnectionFailedError | aetcd.ConnectionTimeoutError)
