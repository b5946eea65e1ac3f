"""Sums over a slow line: the part `limited` of `allreduce.py`. Two ranks, each in a network namespace of its own.

`short`: a veth pair, tbf of 1 Gbit/s at both ends. `long`: TUN devices and a relay that adds 25 ms each way, at 500 Mbit/s: at 1
Gbit/s the bandwidth-delay product would be above the largest socket buffer that many kernels allow (4 MB).

With two ranks a ring sends the size of the buffer once in each direction, so

    part of the line = (bytes / time) / (rate / 8 * 1448 / 1514)

where an Ethernet frame of 1514 bytes carries 1448 bytes of payload (IP and TCP headers, timestamps). The time is that of a few
sums in a row, after a pause: slow start is in it.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allreduce_net import Namespace
from allreduce_relay import open_tun
from allreduce_table import join_all
from allreduce_world import World, soon

from keepstep.runtime.engine_events import EngineSettings

DEVICE, HOSTS = "bench0", ("10.9.0.1", "10.9.0.2")
PAYLOAD, FRAME = 1448, 1514
CHUNK = EngineSettings().chunk_bytes  # which the window is counted in
BUFFER_MAX = 4 << 20
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What the two ranks are connected by."""

    name: str
    bits_per_s: float
    one_way_s: float

    @property
    def product(self) -> int:
        """Bytes on their way when the line is full."""
        return int(self.bits_per_s / 8 * 2 * self.one_way_s)

    def settings(self) -> Json:
        """keepstep's, for a line with delay: gloo leaves its buffers to the kernel, which lets them grow."""
        if not self.one_way_s:
            return {}
        return {"socket_buffer": min(BUFFER_MAX, self.product), "window": 2 * -(-self.product // CHUNK)}


SHORT = Line(name="short", bits_per_s=1e9, one_way_s=0.0)
LONG = Line(name="long", bits_per_s=5e8, one_way_s=0.025)


@contextmanager
def connected(line: Line) -> Iterator[list[Namespace]]:
    """Two namespaces with the line between them; all of it is gone afterwards."""
    ends = [Namespace(), Namespace()]
    tuns: list[int] = []
    relay = None
    try:
        if line.one_way_s:
            for end in ends:
                with end.entered():
                    tuns.append(open_tun(DEVICE))
            relay = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("allreduce_relay.py")), str(line.bits_per_s / 8),
                 str(line.one_way_s), *map(str, tuns)],
                pass_fds=tuns, start_new_session=True,
            )  # fmt: skip
        else:
            ends[0].run(f"ip link add {DEVICE} type veth peer name {DEVICE} netns /proc/{os.getpid()}/fd/{ends[1].fd}")
        for end, host in zip(ends, HOSTS, strict=True):
            end.run(f"ip address add {host}/24 dev {DEVICE}")
            end.run(f"ip link set {DEVICE} up")
            if not line.one_way_s:
                end.run(f"tc qdisc add dev {DEVICE} root tbf rate {line.bits_per_s:.0f}bit burst 128kb latency 50ms")
        yield ends
    finally:
        if relay:
            relay.kill()
            relay.wait()
        for fd in tuns:
            os.close(fd)
        for end in ends:
            end.close()


def limited(
    line: Line, impls: Sequence[str], rounds: int, nbytes: int, sums: int, tell: Callable[[Json], None]
) -> list[Json]:
    """A row for each of `impls` (NAME@CONGESTION)."""
    seconds: dict[str, list[float]] = {impl: [] for impl in impls}
    with connected(line) as ends, World(2, ends, HOSTS, DEVICE) as world:
        join_all(world, impls, **line.settings())
        world.call("buffers", nbytes_max=nbytes)
        world.call("resize", nbytes=nbytes)
        warm = {impl: world.call("warm_up", impl=impl, check=[0, 1], timeout_s=120) for impl in impls}
        for turn in range(rounds):
            for place in range(len(impls)):
                impl = impls[(turn + place) % len(impls)]
                world.call("refill")
                replies = world.call("round", impl=impl, repeats=sums, at=soon(), timeout_s=300)
                seconds[impl].append(max(r["seconds"] for r in replies) / sums)
    rows = []
    for impl in impls:
        name, _, congestion = impl.partition("@")
        median = statistics.median(seconds[impl])
        row = {
            "line": line.name,
            "bits_per_s": line.bits_per_s,
            "one_way_delay_s": line.one_way_s,
            "impl": name,
            "congestion_control": congestion,
            "n": 2,
            "bytes": nbytes,
            "sums_in_a_row": sums,
            "rounds": rounds,
            "median_s": median,
            "payload_mb_s": nbytes / median / 1e6,
            "part_of_line": nbytes / median / (line.bits_per_s / 8 * PAYLOAD / FRAME),
            "right": all(r["right"] for r in warm[impl]),
            "settings": line.settings() if name.startswith("keepstep") else {},
        }
        rows.append(row)
        tell(row)
    return rows


def print_line(line: Line) -> None:
    settings = ", ".join(f"{k} {v}" for k, v in line.settings().items())
    print(
        f"{line.bits_per_s / 1e6:g} Mbit/s, {line.one_way_s * 1e3:g} ms each way, N=2"
        + (f" (keepstep: {settings})" if settings else "")
    )
    print(f"{'':14}{'congestion':>10} {'sum, ms':>9} {'MB/s':>7} {'part of the line':>17}")


def print_limited(row: Json) -> None:
    print(
        f"{row['impl']:14}{row['congestion_control']:>10} {row['median_s'] * 1e3:9.0f} {row['payload_mb_s']:7.1f} "
        f"{row['part_of_line']:17.3f}" + ("" if row["right"] else "  WRONG RESULT"),
        flush=True,
    )
