"""What operators want of the replicas that are kept here: `keepstep drain`, `add` and `stop`, as they stand in the store.

The leaders read them too: theirs is when to leave, ours whether anything is started again. A replica that has left is not, until
it is asked back. Runs on the launcher's loop.
"""

from collections.abc import Mapping

from keepstep.launch.replica_keeper import Replica, ReplicaKeeper
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.messages import Request


class Requests:
    """Carries them out for the replicas of one keeper."""

    def __init__(self, keeper: ReplicaKeeper) -> None:
        self._keeper, self._shell = keeper, keeper.shell
        self.stop_asked = False  # the whole job was asked to stop

    def on_change(self, requests: Mapping[ReplicaId | None, Request]) -> None:
        """All that stand now."""
        stop = requests.get(None)
        if stop is not None and stop.leave and not self.stop_asked:
            self.stop_asked = True
            self._shell.say(
                f"every replica leaves at the next step boundary and the job ends, asked by {stop.by} (keepstep stop)"
            )
            self._shell.events.emit("stop_asked", {"by": stop.by})
            for replica in [*self._keeper.replicas.values()]:
                self.let_go(replica)
        for replica in [*self._keeper.replicas.values()]:
            request = requests.get(ReplicaId(replica.id))
            if request is None or request.request_id == replica.request_id or self._shell.stopping or self.stop_asked:
                continue
            replica.request_id = request.request_id
            self._shell.events.emit("asked", {"replica": replica.id, "leave": request.leave, "by": request.by})
            if not request.leave:
                self._take_back(replica, request.by)
            elif not replica.over:
                self._shell.say(
                    f"replica {replica.id} leaves at its next step boundary, asked by {request.by} (keepstep drain)"
                )
                replica.drained = True
                self.let_go(replica)

    def let_go(self, replica: Replica) -> None:
        """It leaves by itself, and is not started again."""
        if replica.over:
            return
        replica.leaving = True
        self._shell.tell(self._keeper.store.unannounce(ReplicaId(replica.id)))
        if not replica.running:
            self._keeper.left(replica, "was not running: it is not started again")

    def _take_back(self, replica: Replica, by: str) -> None:
        """Asked back: it stays if it has not left yet, and else gets another life, also if it had been given up."""
        running = replica.running
        if replica.outcome == "done" or (replica.over and running) or not (replica.over or replica.leaving):
            return
        what = "stays" if running else "is started again"
        self._shell.say(f"replica {replica.id} {what}, asked by {by} (keepstep add)")
        replica.leaving = replica.drained = False
        if running:
            self._shell.tell(self._keeper.store.announce(ReplicaId(replica.id)))
        else:
            replica.outcome = ""
            replica.history.forgive()
            self._keeper.start(replica)
