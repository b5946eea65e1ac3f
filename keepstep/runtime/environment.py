"""What a rank is told by its environment: torchrun's variables, ours, and nothing else.

    RANK WORLD_SIZE MASTER_ADDR MASTER_PORT                torchrun's, for one replica
    REPLICA_ID NUM_REPLICAS KEEPSTEP_STORE                 ours, always needed
    KEEPSTEP_TOKEN or KEEPSTEP_TOKEN_FILE                  the job's secret, always needed
    KEEPSTEP_JOB KEEPSTEP_HOST KEEPSTEP_RUN_DIR KEEPSTEP_MIN_REPLICAS KEEPSTEP_LEASE_S
    KEEPSTEP_FAN_OUT KEEPSTEP_RANKS_PER_HOST (default: LOCAL_WORLD_SIZE, torchrun's)
    KEEPSTEP_STRAGGLER_S KEEPSTEP_START_WAIT_S KEEPSTEP_JOIN_WAIT_S
    KEEPSTEP_SLOW_FLOOR_S KEEPSTEP_SLOW_CEILING_S          optional
    KEEPSTEP_LABEL                                         optional: where this host stands, "building/zone/rack"
    KEEPSTEP_AGENT                                         set by `keepstep agent`: what this host is called
    KEEPSTEP_CHECKPOINT_DIR KEEPSTEP_CHECKPOINT_EVERY KEEPSTEP_KEEP_CHECKPOINTS    optional
    KEEPSTEP_INCARNATION KEEPSTEP_LIFE KEEPSTEP_LEADER KEEPSTEP_LEADER_FD KEEPSTEP_FAULTS KEEPSTEP_SCRIPT_AT
                                                           set by `keepstep run`

Fails: ConfigError, one sentence that names the variable. Reading files is its only I/O.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import Incarnation, Rank, ReplicaId
from keepstep.version import __version__

Address = tuple[str, int]

MAX_TOKEN = 4096
_PORT = re.compile("[1-9][0-9]{0,4}")


def host_and_port(text: str) -> Address | None:
    """HOST:PORT; None if it is not."""
    host, _, port = text.rpartition(":")
    if not host or not host.isprintable() or not _PORT.fullmatch(port) or not int(port) < 65536:
        return None
    return host, int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """This process's place in the job, and how to reach the rest of it."""

    rank: Rank
    world_size: int
    replica_id: ReplicaId
    num_replicas: int
    store: str
    job: str
    token: bytes
    incarnation: Incarnation | None  # None: under torchrun, where rank 0 makes one up
    life: int
    leader_address: Address | None  # None: under torchrun
    leader_fd: int | None  # rank 0 only: an inherited socket that listens on `leader_address`
    host: str
    agent: str  # the name of this host, if an agent keeps the replica; else empty
    label: str  # "building/zone/rack"
    run_dir: Path | None
    faults: str
    master_addr: str | None
    fan_out: int
    ranks_per_host: int
    min_replicas: int
    lease_s: float
    straggler_s: float
    start_wait_s: float
    join_wait_s: float
    slow_floor_s: float  # see protocol/pace.py
    slow_ceiling_s: float
    checkpoint_dir: Path | None
    checkpoint_every: int  # steps
    keep_checkpoints: int
    fetch_throttle: float | None  # bytes per second, for tests
    script_at: float | None  # when the script began, in monotonic seconds; None: not known
    version: str

    @staticmethod
    def from_env(env: Mapping[str, str]) -> "Environment":
        """Reads and checks the variables."""
        read = _Reader(env)
        size, replicas = read.integer("WORLD_SIZE", least=1), read.integer("NUM_REPLICAS", least=1)
        run_dir, checkpoint_dir = env.get("KEEPSTEP_RUN_DIR"), env.get("KEEPSTEP_CHECKPOINT_DIR")
        incarnation = env.get("KEEPSTEP_INCARNATION")
        throttle = read.number("KEEPSTEP_FETCH_BYTES_PER_S", 0.0)
        return Environment(
            rank=Rank(read.integer("RANK", least=0, below=size)),
            world_size=size,
            replica_id=ReplicaId(read.integer("REPLICA_ID", least=0, below=replicas)),
            num_replicas=replicas,
            store=read.text("KEEPSTEP_STORE"),
            job=read.word("KEEPSTEP_JOB", "job"),
            token=read_token(env),
            incarnation=Incarnation(incarnation) if incarnation else None,
            life=read.integer("KEEPSTEP_LIFE", 1, least=1),
            leader_address=read.address("KEEPSTEP_LEADER"),
            leader_fd=read.integer("KEEPSTEP_LEADER_FD", least=0) if env.get("KEEPSTEP_LEADER_FD") else None,
            host=read.word("KEEPSTEP_HOST", "127.0.0.1"),
            agent=env.get("KEEPSTEP_AGENT", ""),
            label=read.word("KEEPSTEP_LABEL", ""),
            run_dir=Path(run_dir) if run_dir else None,
            faults=env.get("KEEPSTEP_FAULTS", ""),
            master_addr=env.get("MASTER_ADDR"),
            fan_out=read.integer("KEEPSTEP_FAN_OUT", 32, least=1),
            ranks_per_host=read.integer(
                "KEEPSTEP_RANKS_PER_HOST", read.integer("LOCAL_WORLD_SIZE", 1, least=1), least=1
            ),
            min_replicas=read.integer("KEEPSTEP_MIN_REPLICAS", 1, least=1, below=replicas + 1),
            lease_s=read.number("KEEPSTEP_LEASE_S", 2.0, least=0.5),
            straggler_s=read.number("KEEPSTEP_STRAGGLER_S", 60.0),
            start_wait_s=read.number("KEEPSTEP_START_WAIT_S", 60.0),
            join_wait_s=read.number("KEEPSTEP_JOIN_WAIT_S", 0.0),
            slow_floor_s=(floor := read.number("KEEPSTEP_SLOW_FLOOR_S", 1.0, least=0.1)),
            slow_ceiling_s=read.number("KEEPSTEP_SLOW_CEILING_S", max(300.0, floor), least=floor),
            checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
            checkpoint_every=read.integer("KEEPSTEP_CHECKPOINT_EVERY", 100, least=1),
            keep_checkpoints=read.integer("KEEPSTEP_KEEP_CHECKPOINTS", 3, least=1),
            fetch_throttle=throttle or None,
            script_at=read.number("KEEPSTEP_SCRIPT_AT", 0.0) or None,
            version=__version__,
        )

    @property
    def waits_s(self) -> dict[str, float]:
        """How long who is waited for, to be kept with the run."""
        names = ("lease_s", "start_wait_s", "join_wait_s", "straggler_s", "slow_floor_s", "slow_ceiling_s")
        return {name: getattr(self, name) for name in names}


def read_token(env: Mapping[str, str]) -> bytes:
    """The job's secret, from KEEPSTEP_TOKEN or the file KEEPSTEP_TOKEN_FILE."""
    if env.get("KEEPSTEP_TOKEN"):
        return os.fsencode(env["KEEPSTEP_TOKEN"])  # its bytes, whatever they are
    path = env.get("KEEPSTEP_TOKEN_FILE")
    if not path:
        raise ConfigError("set KEEPSTEP_TOKEN or KEEPSTEP_TOKEN_FILE to the job's secret, the same for every rank")
    try:
        with open(path, "rb") as file:
            token = file.read(MAX_TOKEN + 1).strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"KEEPSTEP_TOKEN_FILE {path} cannot be read: {why}") from None
    if len(token) > MAX_TOKEN:
        raise ConfigError(f"KEEPSTEP_TOKEN_FILE {path} has more than {MAX_TOKEN} bytes: is it the right file?")
    if not token:
        raise ConfigError(f"KEEPSTEP_TOKEN_FILE {path} is empty: put the job's secret in it")
    return token


class _Reader:
    """Reads typed variables; every complaint names the variable."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str) -> str:
        value = self._env.get(name)
        if not value:
            raise ConfigError(
                f"{name} is not set: start the script with `keepstep run ...`, or with torchrun, one per replica, and "
                "REPLICA_ID, NUM_REPLICAS, KEEPSTEP_STORE and KEEPSTEP_TOKEN set"
            )
        return value

    def word(self, name: str, default: str) -> str:
        value = self._env.get(name) or default
        if not value.isprintable():
            self._refuse(name, value, "a name in printable characters")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int, below: int | None = None) -> int:
        text = self.text(name) if default is None else self._env.get(name) or str(default)
        try:
            value = int(text)
        except ValueError:
            self._refuse(name, text, "a whole number")
        if value < least or (below is not None and value >= below):
            self._refuse(name, text, f"at least {least}" + (f" and at most {below - 1}" if below is not None else ""))
        return value

    def number(self, name: str, default: float, *, least: float = 0.0) -> float:
        text = self._env.get(name) or str(default)
        try:
            value = float(text)
        except ValueError:
            self._refuse(name, text, "a number")
        if not least <= value < float("inf"):
            self._refuse(name, text, f"at least {least}")
        return value

    def address(self, name: str) -> Address | None:
        text = self._env.get(name)
        if not text:
            return None
        address = host_and_port(text)
        if address is None:
            self._refuse(name, text, "HOST:PORT")
        return address

    @staticmethod
    def _refuse(name: str, text: str, wanted: str) -> NoReturn:
        raise ConfigError(f"{name} must be {wanted}, got {text!r}")
