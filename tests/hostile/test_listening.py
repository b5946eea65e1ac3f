"""A job listens where it was told to, and nowhere else."""

from pathlib import Path

import psutil
import pytest
from jobs import finish, processes_of, start, wait_until


def test_nothing_of_a_job_listens_beyond_the_interface_that_was_chosen(tmp_path: Path) -> None:
    """Ranks, etcd, and what torch opens for the ranks of one replica among themselves."""
    job = start(tmp_path, "--replicas", "2", "--ranks-per-replica", "2", args=("--steps", "100000"))
    try:
        assert job.stdout is not None
        wait_until(lambda: any('"commit"' in p.read_text() for p in (tmp_path / "events").glob("replica0-rank0-*")))
        listening = [
            (process.name(), connection.laddr.ip, connection.laddr.port)
            for process in processes_of(tmp_path)
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
    finally:
        job.terminate()
        finish(job, tmp_path, 30)
    ranks = {name for name, _, _ in listening if name.startswith("keepstep-r")}
    assert len(ranks) == 4, "every rank listens"
    assert any("etcd" in name for name, _, _ in listening)
    elsewhere = [place for place in listening if place[1] != "127.0.0.1"]
    if elsewhere:
        pytest.fail(f"these listen on other interfaces: {elsewhere}")
