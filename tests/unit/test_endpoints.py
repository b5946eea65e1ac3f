"""Where the ranks of a replica listen, in few bytes."""

import pytest

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.messages import Endpoint
from keepstep.runtime.endpoints import Endpoints, endpoint_in
from keepstep.runtime.wire import decode, encode

RANKS = tuple(Endpoint(host=f"10.0.0.{n // 8}", ftar_port=n, state_port=65535 - n) for n in range(80))


def test_nothing_is_lost() -> None:
    table = Endpoints.of(RANKS)
    assert decode(encode(table), Endpoints) == table
    for length in (table.host_length, 30):
        records = table.records(length)
        assert {len(record) for record in records} == {length + 4}
        assert tuple(endpoint_in(record) for record in records) == RANKS


def test_it_is_a_few_bytes_a_rank() -> None:
    assert len(encode(Endpoints.of(RANKS))) < 16 * len(RANKS)


@pytest.mark.parametrize(
    "data",
    [
        b'{"hosts":[["a",2]],"ftar_ports":[1],"state_ports":[1]}',
        b'{"hosts":[["a b",1]],"ftar_ports":[1],"state_ports":[1]}',
        b'{"hosts":[["a",1]],"ftar_ports":[65536],"state_ports":[1]}',
        b'{"hosts":[["a",-1]],"ftar_ports":[1],"state_ports":[1]}',
    ],
)
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data, Endpoints)
