"""Trains a small transformer on bytes of real text, with FSDP2 inside each replica.

    keepstep run --replicas 3 --ranks-per-replica 2 examples/train_fsdp.py -- --steps 200

Kill any of its ranks with `kill -9` while it runs: the other replicas go on, and the dead one comes back. With
`--checkpoint-dir DIR` after `run`, kill everything: the same command goes on from where it was. What keepstep asks of a script
is marked with (1) to (5). Without --data it reads the source of Python's own standard library.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import keepstep


class Bytes(torch.utils.data.Dataset[torch.Tensor]):
    """All text under a path, cut into windows of `length` bytes and the one that follows."""

    def __init__(self, path: Path, length: int) -> None:
        if not path.exists():
            raise keepstep.ConfigError(f"--data: {path} does not exist")
        files = [path] if path.is_file() else [p for p in sorted(path.rglob("*.*")) if is_text(p.relative_to(path))]
        text = bytearray(b"\n".join(f.read_bytes() for f in files))
        if len(text) <= length:
            raise keepstep.ConfigError(f"--data: {path} holds less than {length + 1} bytes of text")
        self.text, self.length = torch.frombuffer(text, dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.text[index * self.length : (index + 1) * self.length + 1].long()


def is_text(path: Path) -> bool:
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    return path.suffix in {".py", ".txt", ".md", ".rst"} and not skipped & set(path.parts)


class Block(nn.Module):
    """Attention to what came before, then a perceptron."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, dim / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Guesses the next byte."""

    def __init__(self, dim: int, layers: int, length: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=max(1, dim // 32)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--data", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="a file or folder of text"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--unit-size", type=int, default=16, help="windows of text that a replica trains in one step")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes in a window")
    parser.add_argument("--dim", type=int, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with keepstep.join() as job:  # (1) this process is a rank of a replica now
        data = Bytes(args.data, args.seq_len)
        torch.manual_seed(0)
        model = Transformer(args.dim, args.layers, args.seq_len)
        for block in model.blocks:
            fully_shard(block, mesh=job.mesh)  # (2) shard over the replica's ranks: the mesh is all that is new
        fully_shard(model, mesh=job.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        training = keepstep.Training(  # (3) reads the data, so that each window is trained exactly once
            job, model, optimizer, data=data, unit_size=args.unit_size, max_steps=args.steps, max_grad_norm=1.0,
            tokens_per_sample=args.seq_len,
        )  # fmt: skip
        for step in training:
            logits = model(step.batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), step.batch[:, 1:].flatten())
            step.backward(loss)  # (4) gradients travel between the replicas while backward still runs
            step.commit()  # (5) all of the step happens, on all replicas, or none of it


if __name__ == "__main__":
    main()
