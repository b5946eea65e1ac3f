"""The same job with a plain module: each replica is one process, as with DistributedDataParallel.

keepstep run --replicas 3 examples/train_ddp.py -- --steps 200
"""

import torch
from torch.nn import functional as F
from train_fsdp import Bytes, Transformer, arguments

import keepstep


def main() -> None:
    args = arguments()
    with keepstep.join() as job:
        torch.manual_seed(0)
        model = Transformer(args.dim, args.layers, args.seq_len)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        data = Bytes(args.data, args.seq_len)
        for step in keepstep.Training(job, model, optimizer, data=data, unit_size=args.unit_size, max_steps=args.steps):
            logits = model(step.batch[:, :-1])
            step.backward(F.cross_entropy(logits.flatten(0, 1), step.batch[:, 1:].flatten()))
            step.commit()


if __name__ == "__main__":
    main()
