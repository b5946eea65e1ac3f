"""The file that `keepstep plan --topology` reads: which hosts there are, and how they are connected. TOML.

    oversubscription_zone = 2.8        # between zones of a building; what the paper has, by default
    oversubscription_building = 2.8    # between buildings
    nic_bytes_per_s = 50e9             # of a GPU

    [[zones]]                          # many alike: hosts are named b1-z1-r001-h01 and so on
    label = "b1/z1"                    # building/zone
    racks = 64
    hosts_per_rack = 16
    gpus_per_host = 8

    [[hosts]]                          # one by one
    name = "node17"
    label = "b1/z2/r7"                 # building/zone/rack
    gpus = 8

Fails: ConfigError with the place in the file.
"""

from pathlib import Path

import msgspec

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.placement import Host
from keepstep.scale import figures

HOSTS_MAX = 1_000_000


class _Zone(msgspec.Struct, forbid_unknown_fields=True):
    label: str
    racks: int
    hosts_per_rack: int
    gpus_per_host: int = int(figures.GPUS_PER_HOST.value)


class _Host(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    label: str = ""
    gpus: int = int(figures.GPUS_PER_HOST.value)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    zones: list[_Zone] = []
    hosts: list[_Host] = []
    oversubscription_zone: float = figures.OVERSUBSCRIPTION.value
    oversubscription_building: float = figures.OVERSUBSCRIPTION.value
    nic_bytes_per_s: float = figures.NIC.value


class Topology(msgspec.Struct, frozen=True):
    """What the file says."""

    hosts: tuple[Host, ...]
    oversubscription_zone: float
    oversubscription_building: float
    nic_bytes_per_s: float

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)


def read_topology(path: Path) -> Topology:
    """Reads and checks it."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ConfigError(f"cannot read the topology {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the topology {path} is not as it should be: {error}") from None
    count = len(found.hosts)
    for zone in found.zones:
        if min(zone.racks, zone.hosts_per_rack, zone.gpus_per_host) < 1:
            raise ConfigError(f"the topology {path}: zone {zone.label} needs racks, hosts and GPUs")
        count += zone.racks * zone.hosts_per_rack
    if not 0 < count <= HOSTS_MAX:
        raise ConfigError(f"the topology {path} names {count} hosts; 1 to {HOSTS_MAX:,} will do")
    if min(found.oversubscription_zone, found.oversubscription_building) < 1 or found.nic_bytes_per_s <= 0:
        raise ConfigError(f"the topology {path}: oversubscriptions are 1 or more, and a network has some speed")
    hosts = [Host(name=host.name, label=host.label, slots=host.gpus) for host in found.hosts]
    hosts += [host for zone in found.zones for host in _of_zone(zone)]
    return Topology(
        hosts=tuple(hosts),
        oversubscription_zone=found.oversubscription_zone,
        oversubscription_building=found.oversubscription_building,
        nic_bytes_per_s=found.nic_bytes_per_s,
    )


def _of_zone(zone: _Zone) -> list[Host]:
    prefix = zone.label.replace("/", "-")
    racks, hosts = len(str(zone.racks)), len(str(zone.hosts_per_rack))
    return [
        Host(
            name=f"{prefix}-r{rack:0{racks}}-h{host:0{hosts}}",
            label=f"{zone.label}/r{rack:0{racks}}",
            slots=zone.gpus_per_host,
        )
        for rack in range(1, zone.racks + 1)
        for host in range(1, zone.hosts_per_rack + 1)
    ]
