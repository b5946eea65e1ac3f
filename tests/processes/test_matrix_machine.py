"""What goes wrong with the machine under a job: descriptors, disks, clocks, ports; and lives that end faster than they train."""

import contextlib
import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from etcds import Etcds
from jobs import SCRIPTS
from matrix import FAULTY, Job, fill, small_disk

STEPS = ("--steps", "150", "--step-seconds", "0.04")


# --- descriptors -------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_rank_that_has_no_descriptors_left_is_replaced_once_it_needs_one(tmp_path: Path) -> None:
    """While nothing changes, it needs none. A new ring does: then it is its own fault, and not its neighbours'."""
    args = ("--what", "no files", "--steps", "250", "--step-seconds", "0.05")
    with Job(tmp_path, script=FAULTY, args=args) as job:
        job.until_step(25)
        assert job.lives(1) == 1, "it needed none so far"
        job.rank(2).kill()
        job.wait(lambda: job.lives(1) == 2, 30)
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 2, 2]
    assert "Too many open files" in result.output
    assert "files, and no more" in result.output


LISTENER = """
import logging, os, resource, sys
from keepstep.protocol.ids import Incarnation, Rank, ReplicaId
from keepstep.runtime.handshake import Identity
from keepstep.runtime.links import LinkSettings
from keepstep.runtime.listener import Listener
logging.basicConfig(stream=sys.stdout, format="%(message)s")
me = Identity(
    job="j", token=b"t", replica_id=ReplicaId(0), incarnation=Incarnation("a"), rank=Rank(0), layout_digest="d"
)
listener = Listener(me, "127.0.0.1", LinkSettings(connect_s=60.0), lambda hello: "", print)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print(listener.port, flush=True)
sys.stdin.readline()
print("the end", flush=True)
for fd in held:
    os.close(fd)
sys.stdin.readline()
"""


def test_a_listener_without_descriptors_lets_callers_wait() -> None:
    """It says so once, does not spin, and serves them when it can again (here: hangs up on garbage)."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = ("127.0.0.1", int(process.stdout.readline()))
        with (
            socket.create_connection(address, timeout=20),  # takes the descriptor that `accept` had reserved
            socket.create_connection(address, timeout=20) as caller,
        ):
            assert "Too many open files" in process.stdout.readline()
            before = psutil.Process(process.pid).cpu_times()
            caller.sendall(b"garbage" * 100)
            caller.settimeout(1.5)
            with pytest.raises(TimeoutError):
                caller.recv(1)
            after = psutil.Process(process.pid).cpu_times()
            assert after.user + after.system - before.user - before.system < 0.5, "it spins"
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "the end\n", "it says it again and again"
            caller.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""
    finally:
        process.kill()
        process.communicate()


RING = """
import os, resource
from keepstep.protocol.exchange import Deadline
from keepstep.protocol.ids import Incarnation, QuorumId, Rank, ReplicaId
from keepstep.protocol.messages import Endpoint, Peer
from keepstep.runtime.engine_events import EngineSettings
from keepstep.runtime.handshake import Identity
from keepstep.runtime.ring import Owner, Ring
me = Identity(
    job="j", token=b"t", replica_id=ReplicaId(0), incarnation=Incarnation("a"), rank=Rank(0), layout_digest="d"
)
at = Endpoint(host="127.0.0.1", ftar_port=9, state_port=9)
peers = [Peer(replica_id=ReplicaId(r), incarnation=Incarnation("ab"[r]), endpoint=at) for r in (0, 1)]
told = []
slow = Deadline(floor=1.0, ceiling=1.0)
owner = Owner(
    identity=me, settings=EngineSettings(), deadline=slow, silence=slow, tell=told.append, fault=lambda *_: None
)
ring = Ring(owner, QuorumId(1), peers, 0)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while HUNGRY:
        os.open("/dev/null", os.O_RDONLY)
except OSError:
    pass
ring.start(None)
ring.join(20.0)
print(type(told[0]).__name__, getattr(told[0], "fatal", False))
"""


@pytest.mark.parametrize(("hungry", "told"), [(True, "StepFailed True"), (False, "RingBroken False")])
def test_a_link_that_cannot_be_dialled_for_want_of_descriptors_is_our_own_fault(hungry: bool, told: str) -> None:
    """Fatal, or else it would be repeated for ever. A next member that refuses is not."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    code = RING.replace("HUNGRY", str(hungry))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout.strip() == told, done.stderr


# --- disks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path) as path:
        yield path


@pytest.mark.faults
def test_the_disk_under_the_run_directory_is_full(tmp_path: Path, disk: Path) -> None:
    """Logs and events are lost, and nothing else: training goes on, and even a killed replica comes back."""
    run_dir = disk / "run"
    with Etcds(tmp_path, 1) as etcds, Job(run_dir, "--store", etcds.url, args=STEPS) as job:
        job.until_step(10)
        filler = fill(disk)
        job.rank(1).kill()
        job.wait(lambda: job.lives(1) == 2 or psutil.disk_usage(str(disk)).free)
        job.stays(5.0)
        filler.unlink()
        result = job.finish()
    assert result.code == 0, result.output[-4000:]
    assert len(set(result.digests.values())) == 1
    assert len(result.digests) == 3
    assert {e["step"] for e in result.of("final")} == {150}
    written = {path.read_text() for path in run_dir.glob("parameters-*")}
    assert len(written) == 1
    assert "events are being lost, training goes on" in result.output


@pytest.mark.faults
def test_the_disk_of_the_embedded_etcd_is_full(tmp_path: Path, disk: Path) -> None:
    """It ends, and cannot be started again until there is room: training waits for it."""
    run_dir = disk / "run"
    with Job(run_dir, args=("--steps", "5000", "--step-seconds", "0.0")) as job:
        job.until_step(10)
        filler = fill(disk)
        job.etcd().kill()
        job.stays(8.0)
        filler.unlink()
        job.goes_on()
        assert [job.lives(r) for r in range(3)] == [1, 1, 1]
        job.process.terminate()
        result = job.finish(30)
    assert result.code == 128 + 15
    assert "training waits, and it is tried again" in result.output
    assert "the embedded etcd runs again" in result.output
    committed = {e["seq"] for e in result.of("commit")}  # the chain has a gap, where events were lost
    units = [u for d in result.decisions if d["seq"] in committed for m in d["members"] for u in m["units"]]
    assert len(units) == len(set(units)) > 30


# --- clocks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def false_clock(tmp_path: Path) -> Path:
    """A library that shifts a process's wall clock."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the false clock with")
    library = tmp_path / "false_clock.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, SCRIPTS / "false_clock.c"], check=True, timeout=60
    )
    return library


def test_the_wall_clock_jumps(tmp_path: Path, false_clock: Path) -> None:
    """A minute forward, then two back, under launcher and ranks: nothing that matters reads it."""
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("q", 0))
    with Job(tmp_path / "run", args=STEPS, LD_PRELOAD=str(false_clock), FALSE_CLOCK=str(clock)) as job:
        for step, shift in ((20, 60), (60, -60), (100, 0)):
            job.until_step(step)
            with clock.open("r+b") as file:
                file.write(struct.pack("q", shift))
        result = job.finish()
    job.same_bits(result)
    differences = [e["t"] - e["mono"] for e in result.of("commit")]
    assert max(differences) - min(differences) > 119, "the clock did not jump"
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    assert not result.of("retry")
    assert {len(d["members"]) for d in result.committed()} == {3}


# --- ports -------------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_somebody_takes_the_port_of_etcd_while_it_is_down(tmp_path: Path) -> None:
    """The ranks know it by that port, so no other would do. Every other port of ours is chosen by the kernel."""
    with Job(tmp_path, args=STEPS) as job:
        job.until_step(10)
        etcd, launcher = job.etcd(), psutil.Process(job.process.pid)
        (port,) = {c.laddr.port for c in etcd.net_connections() if c.status == psutil.CONN_LISTEN} & client_ports(job)
        launcher.suspend()
        etcd.kill()
        with socket.socket() as squatter:
            squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            job.wait(lambda: takes(squatter, port))
            squatter.listen()
            launcher.resume()
            job.stays(8.0)
        result = job.finish()
    job.same_bits(result)
    assert [job.lives(r) for r in range(3)] == [1, 1, 1]
    assert "training waits, and it is tried again" in result.output


def takes(squatter: socket.socket, port: int) -> bool:
    """A process that is a zombie may have threads that still end, and its sockets end with the last of them."""
    try:
        squatter.bind(("127.0.0.1", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def client_ports(job: Job) -> set[int]:
    """Where the ranks have been told that etcd is."""
    return {int(job.rank(r).environ()["KEEPSTEP_STORE"].rpartition(":")[2]) for r in range(job.replicas)}


# --- lives -------------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_fifty_restarts_of_one_replica(tmp_path: Path) -> None:
    """Each of its lives trains a step and is killed: that is bad luck, not a crash loop, and the next begins at once."""
    with Job(tmp_path, "--max-restarts", "50", replicas=2, args=("--steps", "20000", "--step-seconds", "0.02")) as job:
        for life in range(1, 51):
            spawn = job.wait(lambda life=life: [e for e in job.of("spawn", replica=1) if e["life"] == life], 30)[0]
            mine = {"replica": 1, "incarnation": spawn["incarnation"], "role": "worker"}
            job.wait(lambda mine=mine: job.of("commit", **mine), 30)
            psutil.Process(spawn["pids"][0]).kill()
        job.until_step(job.last_step() + 20, replica=1)
        job.process.terminate()
        result = job.finish(30)
    assert result.code == 128 + 15
    assert [job.lives(r) for r in range(2)] == [1, 51]
    assert {e["pause_s"] for e in result.of("restart")} == {0.0}
    units = result.units()
    assert len(units) == len(set(units))


@pytest.mark.faults
def test_a_replica_that_is_killed_before_it_trains_is_given_up(tmp_path: Path) -> None:
    """Five lives without a step are a crash loop, with growing pauses; the others go on to the end."""
    with Job(tmp_path, replicas=3, args=("--steps", "300", "--step-seconds", "0.05")) as job:
        job.until_step(5)
        job.rank(1).kill()
        for life in range(2, 7):
            spawn = job.wait(lambda life=life: [e for e in job.of("spawn", replica=1) if e["life"] == life], 30)[0]
            psutil.Process(spawn["pids"][0]).kill()
        result = job.finish()
    job.same_bits(result, replicas=2)
    assert [job.lives(r) for r in range(3)] == [1, 6, 1]
    assert [e["pause_s"] for e in result.of("restart")] == [0.0, 0.5, 1.0, 2.0, 5.0]
    (gave_up,) = result.of("gave_up")
    assert "5 lives in a row ended before they had trained a step: rank 0 was killed by SIGKILL" in gave_up["reason"]


# --- jobs --------------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_two_jobs_on_one_store_do_not_see_each_other(tmp_path: Path) -> None:
    """Not even when a replica of each dies."""
    fault = ("--fault", "kill replica=1 rank=0 step=12 phase=in_exchange")
    with Etcds(tmp_path, 1) as etcds:
        shape = ("--store", etcds.url, *fault)
        args = ("--steps", "150", "--step-seconds", "0.05")
        with (
            Job(tmp_path / "one", "--job", "a", *shape, replicas=2, args=args) as a,
            Job(tmp_path / "two", "--job", "ab", *shape, replicas=2, args=(*args, "--seed", "1")) as b,
        ):
            results = [job.finish() for job in (a, b)]
    for job, result in zip((a, b), results, strict=True):
        job.same_bits(result)
        assert [job.lives(r) for r in range(2)] == [1, 2]
    assert set(results[0].digests.values()).isdisjoint(results[1].digests.values())
