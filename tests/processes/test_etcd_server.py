"""The embedded etcd server: what it needs to start, what it survives, and that it leaves nothing behind."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from keepstep.protocol.errors import StoreError
from keepstep.runtime import etcd_server
from keepstep.runtime.etcd_server import EmbeddedEtcd


def test_an_etcd_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a directory")
    with pytest.raises(StoreError, match="did not start"):
        EmbeddedEtcd(tmp_path / "data", tmp_path / "log").start()


def test_a_port_that_another_etcd_took_is_left_to_it(
    server: tuple[EmbeddedEtcd, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, taken = etcd_server._free_ports, int(server[1].rpartition(":")[2])
    offers = iter([(taken, free()[1])])
    monkeypatch.setattr(etcd_server, "_free_ports", lambda: next(offers, None) or free())
    mine = EmbeddedEtcd(tmp_path / "data", tmp_path / "log")
    try:
        assert mine.start() != server[1]
        assert mine.poll() is None
    finally:
        mine.stop()


def test_an_etcd_outlives_the_thread_that_started_it_and_starts_again(tmp_path: Path) -> None:
    mine = EmbeddedEtcd(tmp_path / "data", tmp_path / "log")
    try:
        thread = threading.Thread(target=mine.start)
        thread.start()
        thread.join()
        with pytest.raises(psutil.TimeoutExpired):
            psutil.Process(mine.pid).wait(0.5)
        mine.stop()
        assert mine.poll() is not None
        next_one = EmbeddedEtcd(tmp_path / "data", tmp_path / "log")  # other ports, same data
        next_one.start()
        next_one.stop()
    finally:
        mine.stop()


def test_etcd_dies_with_the_launcher(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from keepstep.runtime.etcd_server import EmbeddedEtcd\n"
        f"etcd = EmbeddedEtcd(Path({str(tmp_path)!r}, 'data'), Path({str(tmp_path)!r}, 'log')); etcd.start()\n"
        "print(etcd.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        try:
            assert launcher.stdout is not None
            etcd = psutil.Process(int(launcher.stdout.readline()))
            assert os.getsid(etcd.pid) == etcd.pid, "a terminal's ^C does not reach it"
        finally:
            launcher.kill()
    psutil.wait_procs([etcd], timeout=10)
    assert not etcd.is_running() or etcd.status() == psutil.STATUS_ZOMBIE  # a container may have nobody who reaps
