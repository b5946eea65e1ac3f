"""Warm starts: a process that has imported torch forks the ranks, so a new life begins in a tenth of a second.

Importing torch costs seconds of CPU, for every rank, at every start and every restart. The zygote pays once. It never trains,
opens no connection and starts no thread, so forking it is safe; it forks twice, and the rank becomes a child of the launcher
(its subreaper): if the zygote dies, nothing else does, and the launcher starts ranks cold.

    zygote -> "warm"
    launcher -> (JSON request, file descriptors: output, listener or none)      zygote -> {"pid": N}

FT-HSDP section 5.4 keeps warm spares for the same reason.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence

from keepstep.launch.child import become, tie_to_parent

MAX_REQUEST = 1 << 20
REPARENT_S = 5.0
ANSWER_S = 120.0  # the first answer waits for torch's import; a stopped zygote must not stop the launcher for good
PR_SET_NAME = 15
PRELOAD = (
    "keepstep.training.training",  # torch, FSDP2, etcd, HTTP: all that join() needs
    "torch._dynamo",  # the first optimizer or fully_shard() of a process imports it, which takes a second
)


class ZygoteError(Exception):
    """The zygote cannot start a process: start it cold."""


class Zygote:
    """The launcher's side. Starts importing in the background at once."""

    def __init__(self, env: Mapping[str, str]) -> None:
        from subprocess import DEVNULL, Popen  # only the launcher needs it

        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        self._process = Popen(
            [sys.executable, "-m", "keepstep.launch.zygote", str(theirs.fileno())],
            stdin=DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**env, "KEEPSTEP_PARENT": str(os.getpid())},
        )
        theirs.close()
        self._warm = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, args: Sequence[str], env: Mapping[str, str], output: int, listener: int | None) -> int:
        """Starts a rank that runs `args`; returns its pid, a child of ours. Waits until torch is imported. Raises ZygoteError."""
        self.warm_up()
        request = json.dumps({"args": list(args), "env": dict(env), "cwd": os.getcwd()}).encode()
        fds = [output] if listener is None else [output, listener]
        try:
            socket.send_fds(self._socket, [request], fds)
            answer = self._socket.recv(4096)
        except OSError as error:
            raise ZygoteError(str(error)) from None
        if not answer:
            raise ZygoteError("it has ended")
        return int(json.loads(answer)["pid"])

    def warm_up(self) -> None:
        """Waits until torch is imported. Raises ZygoteError."""
        if self._warm:
            return
        try:
            self._warm = bool(self._socket.recv(16))
        except OSError as error:
            raise ZygoteError(str(error)) from None
        if not self._warm:
            raise ZygoteError("it has ended")

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def serve(requests: socket.socket) -> None:
    """The zygote's loop: says that it is there, then one fork for each request, until the launcher hangs up."""
    requests.send(b"warm")
    while True:
        data, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 2)
        if not data:
            return
        request = json.loads(data)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            rank = os.fork()
            if rank:
                os.write(writer, str(rank).encode())
                os._exit(0)
            os.close(reader)
            os.close(writer)
            requests.close()
            _run(request, fds)
        os.close(writer)
        os.waitpid(middle, 0)
        pid = int(os.read(reader, 32))
        os.close(reader)
        for fd in fds:
            os.close(fd)
        requests.send(json.dumps({"pid": pid}).encode())


def _run(request: dict[str, object], fds: list[int]) -> None:
    """In the new rank: never returns."""
    try:
        env, args = request["env"], request["args"]
        assert isinstance(env, dict)
        assert isinstance(args, list)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(fds[0], 1)
        os.dup2(fds[0], 2)
        os.close(fds[0])
        os.environ.clear()
        os.environ.update(env)
        if len(fds) > 1:
            os.environ["KEEPSTEP_LEADER_FD"] = str(fds[1])
        os.chdir(str(request["cwd"]))
        launcher = int(os.environ.pop("KEEPSTEP_PARENT"))
        _await_parent(launcher)
        tie_to_parent(launcher)
        place = f"r{env['REPLICA_ID']}" if "REPLICA_ID" in env else "spare"
        name = f"keepstep-{place}.{env['RANK']}"  # what `ps` and `top` call it
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
        if "numpy" in sys.modules:  # a fork inherits its generator's state; Python's own reseeds itself
            sys.modules["numpy"].random.seed()
        become([str(arg) for arg in args])
    except BaseException:  # noqa: BLE001  (the fork must never fall back into the zygote's loop)
        traceback.print_exc()
    finally:
        os._exit(1)


def _await_parent(launcher: int) -> None:
    """The process between us and the launcher is just ending."""
    deadline = time.monotonic() + REPARENT_S
    while os.getppid() != launcher and time.monotonic() < deadline:
        time.sleep(0.001)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    tie_to_parent(int(os.environ.pop("KEEPSTEP_PARENT")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own = os.environ.get("KEEPSTEP_PRELOAD")  # `keepstep shadow`: what replaces the device
    for module in PRELOAD if own is None else (own,):
        with contextlib.suppress(ImportError):  # a rank that imports it says so better
            __import__(module)
    serve(requests)


if __name__ == "__main__":
    main()
