"""A rank's part of a checkpoint, read in a thread: what a fetch is when nobody alive holds the state.

Like `state_fetcher.FetchHandle`: `on_done` is called from the thread, not after `cancel`. Storage that hangs holds up this
thread only.
"""

import threading
from collections.abc import Callable

from keepstep.ports import CheckpointStorage
from keepstep.protocol.errors import TransferError
from keepstep.protocol.messages import Checkpoint, StateName
from keepstep.runtime.state_fetcher import FetchedState


class Restore:
    """One reading under way."""

    def __init__(
        self,
        storage: CheckpointStorage,
        checkpoint: Checkpoint,
        state: StateName,
        on_done: Callable[[FetchedState | TransferError], None],
        fault: Callable[[], None],
    ) -> None:
        """`state`: what it is called from now on."""
        self._storage, self._checkpoint, self._state = storage, checkpoint, state
        self._on_done, self._fault = on_done, fault
        self._cancelled = False
        threading.Thread(target=self._run, name="keepstep-restore", daemon=True).start()

    def cancel(self) -> None:
        """`on_done` is not called any more, unless it is being called right now."""
        self._cancelled = True

    def _run(self) -> None:
        result: FetchedState | TransferError
        self._fault()
        try:
            manifest, data = self._storage.load(self._checkpoint)
            result = FetchedState(state=self._state, manifest=manifest, data=data, bytes_from={})
        except TransferError as error:
            result = error
        if not self._cancelled:
            self._on_done(result)
