"""What a rank has learned of its steps, kept for its next life: RUN_DIR/pace/replicaR-rankK.json, replaced as a whole.

Where agents keep replicas, RUN_DIR is the one that all lives of an agent share, and all hosts if they share the disk.

Training never waits for it: a thread writes, and what comes while it does (a disk that hangs) is dropped. A file that cannot be
read, or makes no sense, is as none: the next life then begins with the ceiling. Not synced to the disk, for a machine that
goes down takes the run with it.
"""

import logging
import threading
from pathlib import Path

from keepstep.protocol.errors import RemoteProtocolError
from keepstep.protocol.pace import Learned
from keepstep.runtime.environment import Environment
from keepstep.runtime.wire import decode, encode

log = logging.getLogger("keepstep")

BYTES_MAX = 4096


class PaceFile:
    """Of one rank. `before` is what the life before has kept. Without a path, nothing is."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.before = self._kept = None if path is None else _read(path)
        self._writing: threading.Thread | None = None
        self._said = False

    @staticmethod
    def for_rank(env: Environment) -> "PaceFile":
        """Whatever life it is."""
        if env.run_dir is None:
            return PaceFile(None)
        folder = env.run_dir.parent if env.agent else env.run_dir
        return PaceFile(folder / "pace" / f"replica{env.replica_id}-rank{env.rank}.json")

    def keep(self, learned: Learned | None) -> bool:
        """In place of what is there; None: nothing. Never blocks. False: there was nothing to do, or it is still busy."""
        if self._path is None or learned == self._kept or (self._writing is not None and self._writing.is_alive()):
            return False
        self._kept = learned
        self._writing = threading.Thread(
            target=self._write, args=(self._path, learned), name="keepstep-pace", daemon=True
        )
        self._writing.start()
        return True

    def _write(self, path: Path, learned: Learned | None) -> None:
        try:
            if learned is None:
                path.unlink(missing_ok=True)
                return
            path.parent.mkdir(exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(encode(learned))
            part.replace(path)
        except OSError as error:
            if not self._said:
                self._said = True
                log.warning("what is learned of this rank's steps cannot be kept for its next life: %s", error)


def _read(path: Path) -> Learned | None:
    try:
        with path.open("rb") as file:
            return decode(file.read(BYTES_MAX), Learned)
    except (OSError, RemoteProtocolError):
        return None
