"""Without our launcher: one plain torchrun a replica, an etcd of one's own, four environment variables."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import TINY, Result, kill_all, read_events
from test_training import check

from keepstep.runtime.etcd_server import EmbeddedEtcd


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedEtcd(tmp_path / "etcd", tmp_path / "etcd.log")
    yield server.start()
    server.stop()


def torchrun(run_dir: Path, store: str, replica: int, ranks: int, *args: str) -> "subprocess.Popen[str]":
    env = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "REPLICA_ID": str(replica),
        "NUM_REPLICAS": "2", "KEEPSTEP_STORE": store, "KEEPSTEP_TOKEN": "secret", "KEEPSTEP_RUN_DIR": str(run_dir),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks),
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(TINY), *args,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_two_torchruns_are_a_job(tmp_path: Path, etcd: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    jobs = [torchrun(run_dir, etcd, replica, 2, "--length", "80", "--unit-size", "4") for replica in range(2)]
    try:
        outputs = [job.communicate(timeout=100)[0] for job in jobs]
    finally:
        kill_all(run_dir)
        for job in jobs:
            job.kill()
            job.communicate()
    assert [job.returncode for job in jobs] == [0, 0], outputs
    check(Result(0, "".join(outputs), run_dir, read_events(run_dir)), 2, units=20)


def test_a_variable_that_is_missing_is_a_sentence(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KEEPSTEP", "REPLICA"))}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, str(TINY)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert [line for line in done.stderr.splitlines() if line.startswith("keepstep:")] == [
        "keepstep: NUM_REPLICAS is not set: start the script with `keepstep run ...`, or with torchrun, one per replica, and "
        "REPLICA_ID, NUM_REPLICAS, KEEPSTEP_STORE and KEEPSTEP_TOKEN set"
    ]
    assert "Traceback" not in done.stderr
