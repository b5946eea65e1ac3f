"""`keepstep.join()`: makes this process a rank of its replica.

What it does, in order: wait for a place if this is a warm spare (`runtime.spare`), read the environment (from `keepstep run`, or
torchrun's plus ours), rank 0 reaches the store, join
the replica's control tree, initialise `torch.distributed` *inside* the replica over a rendezvous that rank 0
opened on a free port and announced through the tree (no port is guessed). Between replicas there is no torch process
group: that is FTAR's.

Fails: `ConfigError` with one sentence. Leaving the `with` block with an exception ends the rank non-zero. ConfigError,
ReplicaLost and NoStateLeft print their sentence only, and exit with codes of their own (`protocol.errors`).
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from time import process_time

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from keepstep.protocol.errors import ConfigError, JobOver, Left, NoStateLeft, ReplicaLost, exit_code
from keepstep.protocol.ids import LEADER, Incarnation
from keepstep.runtime.environment import Environment
from keepstep.runtime.event_log import EventLog
from keepstep.runtime.faults import Faults
from keepstep.runtime.rank import RankRuntime
from keepstep.runtime.spare import stand_by

log = logging.getLogger("keepstep")


class Job:
    """This process's place in the job."""

    def __init__(self, env: Environment, runtime: RankRuntime, mesh: DeviceMesh) -> None:
        self.env, self.runtime, self.mesh = env, runtime, mesh
        self.finished = False  # the job ran to its end here
        self.has_training = False

    @property
    def replica_id(self) -> int:
        return self.env.replica_id

    @property
    def num_replicas(self) -> int:
        return self.env.num_replicas

    @property
    def rank(self) -> int:
        """This process inside its replica, 0..size-1."""
        return self.env.rank

    @property
    def size(self) -> int:
        """Ranks in a replica."""
        return self.env.world_size

    @property
    def is_leader(self) -> bool:
        return self.env.rank == LEADER

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __repr__(self) -> str:
        return f"Job({self.env.job!r}, replica {self.replica_id}/{self.num_replicas}, rank {self.rank}/{self.size})"


@contextlib.contextmanager
def join() -> Iterator[Job]:
    """Joins the job that the environment describes; leaves it at the end of the `with` block."""
    try:
        job = _join()
        try:
            yield job
            _check_finished(job)
        except SystemExit as end:
            if not end.code:
                _check_finished(job)
            raise
        except Left:
            raise
        except JobOver as over:
            job.runtime.emit("over", reason=str(over))
            raise
        except Exception as error:  # top of the user's script
            fatal = job.runtime.fatal
            if fatal is None or fatal is error:
                raise
            raise fatal from error  # what the script ran into since then, in a collective for one, came of it
        finally:
            _leave(job)
    except JobOver as over:
        print(f"keepstep: {over}", file=sys.stderr, flush=True)
    except (ConfigError, ReplicaLost, NoStateLeft) as error:
        print(f"keepstep: {error}", file=sys.stderr, flush=True)
        raise SystemExit(exit_code(error)) from None


def _check_finished(job: Job) -> None:
    if not job.finished:
        raise ConfigError(
            "the script left the training loop before the job ended: to train fewer steps, pass max_steps"
            if job.has_training
            else "the script joined the job but never trained: iterate over keepstep.Training"
        )


def _join() -> Job:
    was_spare = stand_by(os.environ)
    env = Environment.from_env(os.environ)
    _show_log()
    if env.host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look the host's name up, which can take seconds
    env = _with_torchrun(env) if env.leader_address is None else env
    if env.incarnation is None:
        env = replace(env, incarnation=Incarnation(secrets.token_hex(8)))
    events = EventLog.for_rank(env)
    runtime = RankRuntime(env, events=events, faults=Faults.parse(env.faults, env))
    runtime.emit("entered", script_at=env.script_at, spare=was_spare, cpu_s=process_time())
    stores: list[TCPStore] = []

    def make_welcome() -> bytes:
        if dist.is_initialized():
            return b"{}"
        listener = socket.create_server(
            (env.host, 0), family=socket.AF_INET6 if ":" in env.host else socket.AF_INET, backlog=1024
        )
        port, fd = listener.getsockname()[1], listener.detach()  # by itself torch would listen on every interface
        store = TCPStore(env.host, port, env.world_size, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        stores.append(store)
        return json.dumps({"host": env.host, "port": store.port}).encode()

    try:
        welcome = json.loads(runtime.connect(make_welcome))
        runtime.emit("connected", cpu_s=process_time())
        if not dist.is_initialized():
            store = stores[0] if stores else TCPStore(welcome["host"], welcome["port"], env.world_size)
            dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size)
    except BaseException:
        runtime.close()
        events.close()
        raise
    mesh = init_device_mesh("cpu", (env.world_size,), mesh_dim_names=("shard",))
    runtime.emit("joined", cpu_s=process_time())
    return Job(env, runtime, mesh)


def _show_log() -> None:
    """Unless the script has said already how it wants its log."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if root.level != logging.INFO:  # to set a level touches every logger there is
            root.setLevel(logging.INFO)


def _with_torchrun(env: Environment) -> Environment:
    """Under torchrun the default process group comes first, and carries the leader's address and our incarnation."""
    if env.master_addr is None:
        raise ConfigError(
            "neither KEEPSTEP_LEADER nor MASTER_ADDR is set: start the script with `keepstep run ...`, or with torchrun, "
            "one per replica"
        )
    dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size)
    store = dist.distributed_c10d._get_default_store()
    if env.rank == LEADER:
        listener = socket.create_server((env.host, 0))
        word = {"leader": f"{env.host}:{listener.getsockname()[1]}", "incarnation": secrets.token_hex(8)}
        store.set("keepstep/leader", json.dumps(word))
        env = replace(env, leader_fd=listener.detach())
    else:
        word = json.loads(store.get("keepstep/leader"))
    host, port = word["leader"].rsplit(":", 1)
    return replace(env, leader_address=(host, int(port)), incarnation=Incarnation(word["incarnation"]))


def _leave(job: Job) -> None:
    job.runtime.close()
    job.runtime.events.close()
    if dist.is_initialized():
        dist.destroy_process_group()
