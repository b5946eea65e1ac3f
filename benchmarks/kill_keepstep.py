"""The job of `kill.py` on keepstep."""

import os

import torch
from kill_model import BATCH, BUCKET_MB, Journal, Rows, build, loss_of, optimizer_of

import keepstep


def main() -> None:
    torch.set_num_threads(1)
    with keepstep.join() as job:
        os.environ["KILL_REPLICA"] = str(job.replica_id)
        os.environ["KILL_JOURNAL"] += f".{job.replica_id}.{os.getpid()}"
        model, journal = build(), Journal()
        training = keepstep.Training(
            job,
            model,
            optimizer_of(model),
            data=Rows(),
            unit_size=BATCH,
            lr_policy="none",
            bucket_bytes=BUCKET_MB << 20,
            max_steps=int(os.environ["KILL_STEPS"]),
        )
        for step in training:
            step.backward(loss_of(model, step.batch))
            step.commit()
            if step.committed:
                journal.write(model, step.number, len(step.members))


if __name__ == "__main__":
    main()
