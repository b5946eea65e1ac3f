"""Where the ranks of one life listen, as one value: a host and how many ranks are on it, and two lists of ports.

With 8,192 ranks it is 100 KB of JSON in the store (an object for each rank would be 500). A leader cuts out of it what its ranks
need, as bytes of one length, without making an object for each of them.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

import msgspec

from keepstep.protocol.messages import Endpoint

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_PORTS = struct.Struct("<HH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """By rank."""

    hosts: tuple[tuple[str, Count], ...]  # with so many ranks each, in order
    ftar_ports: tuple[Port, ...]
    state_ports: tuple[Port, ...]

    def __post_init__(self) -> None:
        if not len(self.ftar_ports) == len(self.state_ports) == sum(count for _, count in self.hosts):
            raise ValueError("hosts and ports are not of equally many ranks")
        for host in {host for host, _ in self.hosts}:
            Endpoint(host=host, ftar_port=0, state_port=0)  # a ValueError, if it is none

    @staticmethod
    def of(ranks: Iterable[Endpoint]) -> "Endpoints":
        ranks = tuple(ranks)
        return Endpoints(
            hosts=tuple((host, len(list(run))) for host, run in groupby(e.host for e in ranks)),
            ftar_ports=tuple(e.ftar_port for e in ranks),
            state_ports=tuple(e.state_port for e in ranks),
        )

    def __len__(self) -> int:
        return len(self.ftar_ports)

    @property
    def host_length(self) -> int:
        return max((len(host) for host, _ in self.hosts), default=0)

    def records(self, length: int) -> list[bytes]:
        """Each rank's as `length` + 4 bytes; `length` is at least `host_length`."""
        hosts = [name for host, count in self.hosts for name in [host.encode().ljust(length, b"\0")] * count]
        ports = zip(hosts, self.ftar_ports, self.state_ports, strict=True)
        return [host + _PORTS.pack(ftar, state) for host, ftar, state in ports]


def endpoint_in(record: bytes) -> Endpoint:
    """What `records` has written. Raises ValueError."""
    ftar, state = _PORTS.unpack_from(record, len(record) - _PORTS.size)
    return Endpoint(host=record[: -_PORTS.size].rstrip(b"\0").decode("ascii"), ftar_port=ftar, state_port=state)
