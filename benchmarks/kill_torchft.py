"""The job of `kill.py` on torchft 0.2.0 with gloo: one process is one replica.

Its DDP wrapper ends the survivor with an assertion on CPU, because a failed `wait` leaves the future it then asks for unset; the
hook below waits and hands back a finished future, and leaves the error to the manager.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from kill_model import BUCKET_MB, Journal, Rows, batch_of, build, loss_of, optimizer_of
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


class Patched(DistributedDataParallel):
    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    torch.set_num_threads(1)
    replica, steps = int(os.environ["KILL_REPLICA"]), int(os.environ["KILL_STEPS"])
    model, rows, journal = build(), Rows(), Journal()
    optimizer = optimizer_of(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica{replica}-",
        timeout=timedelta(seconds=30),
    )
    wrapped = Patched(manager, model, bucket_cap_mb=BUCKET_MB)
    while manager.current_step() < steps:
        step = manager.current_step()
        manager.start_quorum()
        optimizer.zero_grad()
        loss_of(wrapped, batch_of(rows, step * 3 + replica)).backward()
        committed = manager.should_commit()
        if committed:
            optimizer.step()
            step = manager.current_step() - 1  # a replica that was healed in this step began it with another number
        journal.write(model, step, manager.num_participants(), committed=committed)
    manager.shutdown()


if __name__ == "__main__":
    main()
