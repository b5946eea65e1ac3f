"""The job of `operations.py` on keepstep: one epoch of the units. Checkpoints are `keepstep run`'s."""

import os

import torch
from kill_model import BUCKET_MB, Journal, build
from operations_model import Counting, Traced, Units, only, write_counts

import keepstep


def main() -> None:
    torch.set_num_threads(1)
    with keepstep.join() as job:
        os.environ["KILL_REPLICA"] = str(job.replica_id)
        os.environ["KILL_JOURNAL"] += f".{job.replica_id}.{os.getpid()}"
        units = Units(int(os.environ["KILL_STEPS"]) * job.num_replicas)
        model, journal = Traced(build(), len(units)), Journal()
        training = keepstep.Training(
            job,
            model,
            Counting(model),
            data=units,
            unit_size=1,
            collate=only,
            lr_policy="none",
            bucket_bytes=BUCKET_MB << 20,
        )
        for step in training:
            step.backward(model(step.batch))
            step.commit()
            if step.committed:
                journal.write(model, step.number, len(step.members), unit=step.units[0])
        write_counts(model)


if __name__ == "__main__":
    main()
