"""What `keepstep agent` was asked to do, checked before anything starts: this host, and the job that all agents run together.

Fails: ConfigError, one sentence that says what is wrong and what to do.
"""

import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from keepstep.launch.settings import LaunchSettings, check_job, read_token_file
from keepstep.protocol.errors import ConfigError
from keepstep.protocol.roster import Plan, PoolHost
from keepstep.runtime.etcd_members import parse_url

PARTS = ("building", "zone", "rack")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """One life of the agent of one host."""

    host: PoolHost
    address: str  # that the other hosts reach this one by
    plan: Plan
    launch: LaunchSettings  # of the replicas that are kept here

    @staticmethod
    def checked(
        script: Path,
        args: tuple[str, ...],
        *,
        store: str,
        job: str,
        slots: int,
        replicas: int,
        ranks: int,
        host: str | None = None,
        address: str | None = None,
        labels: str = "",
        run_dir: Path | None = None,
        token_file: Path | None = None,
        min_replicas: int = 1,
        spares: int = 0,
        replace_after_s: float = 10.0,
        join_wait_s: float | None = None,
        straggler_s: float | None = None,
        slow_floor_s: float | None = None,
        slow_ceiling_s: float | None = None,
        max_restarts: int = 20,
        restart_window_s: float = 3600.0,
        finish_grace_s: float = 30.0,
        faults: tuple[str, ...] = (),
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 100,
        keep_checkpoints: int = 3,
    ) -> "AgentSettings":
        """Fills defaults in, checks, and makes a directory for this life of the agent."""
        check_job(job)
        name = check_host(socket.gethostname() if host is None else host)
        label = label_of(labels)
        join_wait_s = said_s("KEEPSTEP_JOIN_WAIT_S", join_wait_s)
        straggler_s = said_s("KEEPSTEP_STRAGGLER_S", straggler_s)
        slow_floor_s = said_s("KEEPSTEP_SLOW_FLOOR_S", slow_floor_s)
        slow_ceiling_s = said_s("KEEPSTEP_SLOW_CEILING_S", slow_ceiling_s)
        if read_token_file(token_file) is None:
            raise ConfigError(
                "set KEEPSTEP_TOKEN or --token-file to the job's secret, the same for the agents of all hosts"
            )
        if not replace_after_s >= 0:
            raise ConfigError(f"--replace-after must be at least 0, got {replace_after_s}")
        if slots < ranks:
            raise ConfigError(
                f"--slots {slots} has no room for a replica of {ranks} ranks, and agents keep each replica within one host: "
                "take fewer --ranks-per-replica, or start one torchrun a replica over several hosts"
            )
        address = own_address(store) if address is None else check_address(address)
        launch = LaunchSettings.checked(
            script,
            args,
            replicas=replicas,
            ranks=ranks,
            run_dir=_next_life((Path("runs") / job if run_dir is None else run_dir), name),
            job=job,
            store=store,
            token_file=token_file,
            min_replicas=min_replicas,
            spares=spares,
            join_wait_s=join_wait_s,
            straggler_s=straggler_s,
            slow_floor_s=slow_floor_s,
            slow_ceiling_s=slow_ceiling_s,
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            finish_grace_s=finish_grace_s,
            faults=faults,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
        )
        plan = Plan(
            script=str(script.resolve()),
            args=args,
            replicas=replicas,
            ranks=ranks,
            min_replicas=min_replicas,
            checkpoint_dir=None if launch.checkpoint_dir is None else str(launch.checkpoint_dir),
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            replace_after_s=replace_after_s,
            join_wait_s=join_wait_s,
            straggler_s=straggler_s,
            slow_floor_s=slow_floor_s,
            slow_ceiling_s=slow_ceiling_s,
            max_restarts=max_restarts,
            restart_window_s=restart_window_s,
            faults=faults,
        )
        about = f"pid {os.getpid()} on {socket.gethostname()}, run directory {launch.run_dir}"
        me = PoolHost(name=name, agent=secrets.token_hex(8), slots=slots, label=label, about=about)
        return AgentSettings(host=me, address=address, plan=plan, launch=launch)

    def environment(self, url: str, token_file: Path) -> dict[str, str]:
        """What every rank of this host is told."""
        ours = self.launch.environment(os.environ, url, token_file)
        ours.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a replica lies within this host
        return {
            **ours,
            "KEEPSTEP_HOST": self.address,
            "KEEPSTEP_AGENT": self.host.name,
            "KEEPSTEP_LABEL": self.host.label,
        }


def said_s(name: str, option: float | None) -> float | None:
    """What holds here, so that agents can compare it: the option, else the environment that ranks inherit."""
    if option is not None or not os.environ.get(name):
        return option
    try:
        return float(os.environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {os.environ[name]!r}") from None


def check_host(name: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,80}", name) or name.isdigit():
        raise ConfigError(
            f"a host's name must be one word of letters, digits, dots, dashes and underscores, and no number, got {name!r}: "
            "give it one with --host"
        )
    return name


def check_address(address: str) -> str:
    """It must be this host's, and one that others can reach."""
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            usable = address not in ("0.0.0.0", "::")
    except OSError:
        usable = False
    if not usable:
        raise ConfigError(f"--host-address {address} is none of this host's: name one that the other hosts reach it by")
    return address


def label_of(text: str) -> str:
    """ "building=b1,zone=z1,rack=r1", all of it optional, as "b1/z1/r1"."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in PARTS or not re.fullmatch(r"[\w.-]{1,80}", value) or key in found:
            raise ConfigError(f"--labels must look like building=b1,zone=z1,rack=r1, got {text!r}")
        found[key] = value
    return "/".join(found.get(part, "") for part in PARTS).rstrip("/")


def own_address(store: str) -> str:
    """That of the interface which leads to the store. Sends nothing."""
    address, port = parse_url(store)[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, port))
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no way to the store {store} is known ({error}): is the address right? Else say with --host-address which of this "
            "host's addresses the others reach"
        ) from None


def _next_life(folder: Path, host: str) -> Path:
    """A directory that is not there yet: an agent that is started again does not mix its records with those before."""
    number = 1
    while (folder / f"{host}-{number}").exists():
        number += 1
    return folder / f"{host}-{number}"
