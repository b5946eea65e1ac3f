"""A warm spare, from inside: it has run the user's script up to `keepstep.join()`, and waits there to be told which rank it is.

    launcher ── its place as environment variables; descriptors: output, and for rank 0 the listener ──> spare
                                                            the files that it has run, and then its pid <──

It holds memory and nothing else: no port, no lease, no connection to the store. The socket comes where a leader's listener would
(`launch.spares` is the other end).

Fails: a launcher that hangs up ends the process, quietly.
"""

import ctypes
import json
import os
import socket
import sys
from collections.abc import MutableMapping

MAX_MESSAGE = 1 << 20
PR_SET_NAME = 15
SOURCES_MAX = 500


def stand_by(env: MutableMapping[str, str]) -> bool:
    """Returns once we are a rank, with `env` saying which one. False, at once: we were one all the time."""
    if env.pop("KEEPSTEP_SPARE", None) is None:
        return False
    launcher = socket.socket(fileno=int(env.pop("KEEPSTEP_LEADER_FD")))
    try:
        launcher.send(json.dumps(sources()).encode())
        data, fds, _, _ = socket.recv_fds(launcher, MAX_MESSAGE, 2)
    except OSError:
        data = b""
    if not data:
        os._exit(0)
    env.update(json.loads(data))
    sys.stdout.flush()
    sys.stderr.flush()
    for ours in (1, 2):
        os.dup2(fds[0], ours)
    os.close(fds[0])
    if len(fds) > 1:
        env["KEEPSTEP_LEADER_FD"] = str(fds[1])
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"keepstep-r{env['REPLICA_ID']}.{env['RANK']}".encode()[:15], 0, 0, 0)
    launcher.send(str(os.getpid()).encode())
    launcher.close()
    return True


def sources() -> list[str]:
    """The script and the modules beside it that it has imported: what a user changes between two lives."""
    script = os.path.abspath(sys.argv[0])
    beside = os.path.dirname(script) + os.sep
    files = [getattr(module, "__file__", None) or "" for module in [*sys.modules.values()]]
    ours = [path for path in files if path.startswith(beside) and "site-packages" not in path]
    return [script, *ours][:SOURCES_MAX]
