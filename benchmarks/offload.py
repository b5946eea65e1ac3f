"""What offloading the optimizer's state costs a step, and what memory it frees.

    python benchmarks/offload.py [--json FILE] [--device cuda] [--quick]

One rank, its share of a model, no exchange: only `optimizer.step()` is timed, in turns with and without, on one set of gradients.
Both end with the same bits, or the script fails.

On CPU tensors nothing is freed, since both memories are the same one: there "device" is what would be on one. Between steps
that is what `optimizer.state` holds outside of the host's store; in a step also every tensor that torch's operations make, by
`tests/unit/storage_meter.py`, not what a single kernel has inside. Weights and gradients are never counted. With --device cuda it
is the allocator's own count, and the times are those of real copies.

The last table is computed, not measured: bytes a rank for a large model, and the time of the copies at the rate that the paper
gives; the copies back go the other way at the same time.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from keepstep.training.buckets import Buckets
from keepstep.training.offload import PIECE_BYTES, Offload

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from storage_meter import StorageMeter

MB = 1 << 20
PAPER_BYTES_PER_S = (1 << 30) / 0.060  # "1 GB optimizer state to the GPU ~60 ms"
KINDS: dict[str, Any] = {
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


class Rank:
    """The parameters of one rank, their gradients, and an optimizer; offloaded or not."""

    def __init__(self, kind: str, args: argparse.Namespace, *, offloaded: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device = torch.device(args.device)
        self.params = []
        for _ in range(args.layers):
            weight = torch.randn(args.width, args.width, generator=generator).to(self.device)
            self.params.append(torch.nn.Parameter(weight))
            self.params[-1].grad = torch.randn(args.width, args.width, generator=generator).to(self.device)
        self.before = self.allocated()
        self.optimizer = KINDS[kind](self.params)
        self.offload = Offload(self.optimizer, piece_bytes=args.piece_mb * MB) if offloaded else None

    def allocated(self) -> int:
        return 0 if self.device.type == "cpu" else torch.accelerator.memory_allocated()

    def step(self) -> float:
        """Seconds of one step."""
        self.synchronize()
        started = time.perf_counter()
        (self.offload or self.optimizer).step()
        self.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def state(self) -> list[torch.Tensor]:
        return [t for p in self.params for t in self.optimizer.state[p].values() if t.dim()]

    def memory(self) -> tuple[int, int]:
        """Bytes on the device beyond weights and gradients: between steps, and at most in one."""
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            self.step()
            return self.allocated() - self.before, torch.accelerator.max_memory_allocated() - self.before
        held = 0 if self.offload is not None else sum(t.nbytes for t in self.state())
        with StorageMeter() as meter:
            (self.offload or self.optimizer).step()
        return held, held + meter.peak


def measure(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    ranks = [Rank(kind, args, offloaded=offloaded) for offloaded in (False, True)]
    times: list[list[float]] = [[], []]
    for number in range(args.rounds + 2):
        for rank, row in zip(ranks, times, strict=True):
            took = rank.step()
            if number >= 2:
                row.append(took)
    memory = [rank.memory() for rank in ranks]
    tensors = [[*rank.params, *rank.state()] for rank in ranks]
    if not all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*tensors, strict=True)):
        raise SystemExit(f"{kind}: the bits differ with and without offloading")
    state = sum(t.nbytes for t in ranks[0].state())
    return [
        {
            "optimizer": kind,
            "offloaded": rank.offload is not None,
            "device": args.device,
            "state_bytes": state,
            "pieces": rank.offload.pieces if rank.offload is not None else 1,
            "step_s": statistics.median(row),
            "step_worst_s": max(row),
            "between_steps_bytes": between,
            "peak_bytes": most,
        }
        for rank, row, (between, most) in zip(ranks, times, memory, strict=True)
    ]


def exchange_bytes(dtype: torch.dtype) -> float:
    """Bytes a parameter of what is exchanged: what this rank puts in, the sum, zeros to contribute, conversions."""
    param = torch.nn.Parameter(torch.zeros(1 << 16, dtype=dtype))
    buckets = Buckets([("p", param)], bucket_bytes=1 << 16)
    kept = [t for part in (buckets.inputs, buckets.outputs, buckets._zeros, buckets._work) for t in part]
    return sum(t.nbytes for t in kept if t.dtype != torch.float64) / param.numel()


def computed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """For `params` parameters in float32 on `gpus` devices as R replicas, AdamW: the formula of docs/operations.md."""
    rows = []
    exchange = exchange_bytes(torch.float32)
    for replicas in (2, 4, 8, 16, 32):
        share = args.params * replicas / args.gpus
        state = 8 * share
        rows.append(
            {
                "computed": True,
                "replicas": replicas,
                "ranks_per_replica": args.gpus // replicas,
                "parameters": share,
                "device_bytes": share * (4 + exchange) + state,
                "device_bytes_offloaded": share * (4 + exchange) + min(state, 2 * PIECE_BYTES),
                "host_bytes_offloaded": state,
                "copy_s": state / PAPER_BYTES_PER_S,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], estimates: list[dict[str, Any]], args: argparse.Namespace) -> None:
    print(f"{'optimizer':<16} {'':<9} {'step, ms':>9} {'worst':>7} {'between steps, MB':>18} {'peak in step, MB':>17}")
    for row in rows:
        where = f"{row['pieces']} pieces" if row["offloaded"] else "resident"
        print(
            f"{row['optimizer']:<16} {where:<9} {row['step_s'] * 1e3:>9.1f} {row['step_worst_s'] * 1e3:>7.1f}"
            f" {row['between_steps_bytes'] / MB:>18.1f} {row['peak_bytes'] / MB:>17.1f}"
        )
    print(f"\nbytes a parameter exchanged as float32: {exchange_bytes(torch.float32):.0f}, bfloat16:"
          f" {exchange_bytes(torch.bfloat16):.0f}")  # fmt: skip
    print(f"\nCOMPUTED, not measured: {args.params:.3g} parameters on {args.gpus} devices, float32, AdamW; GB a rank")
    print(f"{'R':>3} {'K':>5} {'resident':>9} {'offloaded':>10} {'host':>7} {'fetch, s a step':>16}")
    for row in estimates:
        print(
            f"{row['replicas']:>3} {row['ranks_per_replica']:>5} {row['device_bytes'] / 1e9:>9.1f}"
            f" {row['device_bytes_offloaded'] / 1e9:>10.1f} {row['host_bytes_offloaded'] / 1e9:>7.1f} {row['copy_s']:>16.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="5 rounds on a quarter of the model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024, help="of a layer of width x width parameters")
    parser.add_argument("--piece-mb", type=int, default=16)
    parser.add_argument("--params", type=float, default=70e9, help="of the model of the computed table")
    parser.add_argument("--gpus", type=int, default=1024, help="of the computed table")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.layers = 5, args.layers // 4
    rows = [row for kind in KINDS for row in measure(kind, args)]
    estimates = computed(args)
    show(rows, estimates, args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        exchange = {"float32": exchange_bytes(torch.float32), "bfloat16": exchange_bytes(torch.bfloat16)}
        result = {"rows": rows, "exchange_bytes_per_parameter": exchange, "computed": estimates}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
