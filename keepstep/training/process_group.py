"""`FTARProcessGroup`: the fault-tolerant all-reduce as a `torch.distributed.ProcessGroup`, for use outside keepstep.

    pg = keepstep.FTARProcessGroup()
    pg.configure("127.0.0.1:29500/quorum-1", "replica-0", rank=0, world_size=3)
    pg.allreduce([tensor], ReduceOp.SUM).wait()
    ...one dies: ExchangeError...
    pg.configure("127.0.0.1:29500/quorum-2", "replica-0", rank=0, world_size=2)

`configure` may be called any number of times, with other members and ranks: links to members that stay are kept. It has the
arguments of torchft's process groups, so it can stand in for them. Members meet in a torch store, under a prefix that is new
each time.

All members call the same operations in the same order. Operations are asynchronous, and may be issued from any thread. After the
first failure every operation fails at once with the same ExchangeError, which names the suspect, until the next `configure`; the
future of a failed operation is set too. The process lives on.

Not supported, and said so: other operations and reductions, sparse or complex tensors, tensors that are not contiguous or not on
the CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keepstep.protocol.errors import ConfigError, ExchangeError
from keepstep.training.collectives import REDUCIBLE, as_bytes, in_place, together
from keepstep.training.exchange_buffers import Combine, raw
from keepstep.training.group_membership import SEQ, FTARWork, Membership


class FTARProcessGroup(Membership):
    """See the module.

    Args:
        timeout: of an operation, and of `configure`.
        token: members with another one are refused. Default: KEEPSTEP_TOKEN or KEEPSTEP_TOKEN_FILE; on loopback, none.
        host: the address where other members reach this one. Default: that of the interface towards the store.
        settings: of the engine; the same for all members.
    """

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM) -> FTARWork:  # type: ignore[override]
        """In place. `opts`: AllreduceOptions or a bare ReduceOp; SUM, AVG, MAX or MIN."""
        tensors = _list(tensors)
        op = getattr(opts, "reduceOp", opts)
        combine, average = self._combine(op), op == dist.ReduceOp.AVG
        for tensor in tensors:
            self._check(tensor)
            if tensor.dtype not in REDUCIBLE:
                raise self._unsupported(f"reductions of {tensor.dtype}")
            if average and not tensor.dtype.is_floating_point:
                raise self._unsupported(f"the average of {tensor.dtype}")
        groups, after = together(tensors), []
        flats = [group[0].detach().view(-1) if len(group) == 1 else _pack(group) for group in groups]

        def finish() -> None:
            for flat, group in zip(flats, groups, strict=True):
                if average:
                    flat.div_(self._world)
                if len(group) > 1:
                    _unpack(flat, group)

        after.append(finish)
        return self._exchange(flats, combine, tensors, after)

    def allreduce_coalesced(self, tensors: Any, opts: Any = dist.ReduceOp.SUM) -> FTARWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = 0) -> FTARWork:  # type: ignore[override]
        """In place. `opts`: BroadcastOptions or the root's rank."""
        tensors = _list(tensors)
        root = getattr(opts, "rootRank", opts)
        for tensor in tensors:
            self._check(tensor)
            if root != self._rank:
                tensor.detach().zero_()
        return self._exchange([as_bytes(t) for t in tensors], torch.add, tensors, [])

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> FTARWork:
        return self.broadcast([tensor], root)

    def barrier(self, opts: Any = None) -> FTARWork:
        return self._exchange([torch.zeros(1, dtype=torch.uint8)], torch.add, None, [])

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> FTARWork:
        """`output_tensors`: a list of `size` tensors for each input."""
        gathered, after = [], []
        for outputs, tensor in zip(output_tensors, input_tensors, strict=True):
            for each in (*outputs, tensor):
                self._check(each)
            if len(outputs) != self._world or any(o.nbytes != tensor.nbytes for o in outputs):
                raise ConfigError(f"allgather needs {self._world} outputs of the size of the input")
            whole = torch.zeros(self._world * tensor.nbytes, dtype=torch.uint8)
            self._part(whole, tensor).copy_(as_bytes(tensor))
            gathered.append(whole)
            after.append(lambda outputs=outputs, whole=whole: _unpack(whole, [as_bytes(o) for o in outputs]))
        return self._exchange(gathered, torch.add, output_tensors, after)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> FTARWork:
        wholes = []
        for output, tensor in zip(outputs, inputs, strict=True):
            for each in (output, tensor):
                self._check(each)
            if output.nbytes != self._world * tensor.nbytes:
                raise ConfigError(f"allgather needs an output of {self._world} times the size of the input")
            own, whole = as_bytes(tensor).clone(), as_bytes(output)
            whole.zero_()
            self._part(whole, tensor).copy_(own)
            wholes.append(whole)
        return self._exchange(wholes, torch.add, outputs, [])

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FTARWork:
        return self.allgather_into_tensor_coalesced([output], [tensor])

    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> FTARWork:
        return self._point_to_point(_list(tensors), dst_rank, tag, sending=True)

    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> FTARWork:
        return self._point_to_point(_list(tensors), src_rank, tag, sending=False)

    def _refuse(name: str) -> Callable[..., FTARWork]:  # type: ignore[misc]
        def refused(self: "FTARProcessGroup", *args: Any, **kwargs: Any) -> FTARWork:
            raise self._unsupported(name)

        return refused

    alltoall = _refuse("alltoall")
    alltoall_base = _refuse("alltoall_base")
    gather = _refuse("gather")
    reduce = _refuse("reduce")
    reduce_scatter = _refuse("reduce_scatter")
    reduce_scatter_tensor_coalesced = _refuse("reduce_scatter_tensor_coalesced")
    _reduce_scatter_base = _refuse("reduce_scatter_tensor")
    scatter = _refuse("scatter")

    # --- how they run -----------------------------------------------------------------------------------------

    def _exchange(
        self, flats: list[torch.Tensor], combine: Combine, result: Any, after: Sequence[Callable[[], None]]
    ) -> FTARWork:
        work = FTARWork(self, result)
        left = [len(flats)]

        def done() -> None:  # from the engine's threads
            with self._lock:
                left[0] -= 1
                last = left[0] == 0
            if last:
                for step in after:
                    step()
                with self._lock:
                    self._running.discard(work)
                work._end(None)

        buffers = [in_place(flat, combine, done) for flat in flats]
        with self._lock:
            error, engine = self._error, self._engine
            if error is None and engine is None:
                error = ConfigError("the process group has no members yet: call configure() first")
            if error is None and engine is not None:
                self._running.add(work)
                for buffer in buffers:
                    engine.submit(SEQ, self._count, buffer)
                    self._count += 1
        if error is not None:
            work._end(error)
        elif not flats:
            work._end(None)
        return work

    def _point_to_point(self, tensors: list[torch.Tensor], rank: int, tag: int, *, sending: bool) -> FTARWork:
        for tensor in tensors:
            self._check(tensor)
        work = FTARWork(self, tensors)
        with self._lock:
            error, direct = self._error, self._direct
            if error is None and direct is None:
                error = ConfigError("the process group has no members yet: call configure() first")
            if error is None and not (0 <= rank < self._world and rank != self._rank):
                error = ConfigError(f"rank {rank} is not another member of this group of {self._world}")
            if error is None:
                self._running.add(work)
        if error is not None or direct is None:
            work._end(error)
            return work
        start = direct.send if sending else direct.receive
        parts = [start(rank, tag, raw(as_bytes(t)), self.timeout_s) for t in tensors]

        def ended(_: Any) -> None:
            if all(part.done() for part in parts):
                errors = [part.exception() for part in parts if not part.cancelled() and part.exception()]
                cancelled = any(part.cancelled() for part in parts)
                with self._lock:
                    self._running.discard(work)
                failure = errors[0] if errors else ExchangeError("it was cancelled") if cancelled else None
                work._end(failure)  # type: ignore[arg-type]

        for part in parts:
            part.add_done_callback(ended)
        return work

    def _part(self, whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return whole[self._rank * tensor.nbytes : (self._rank + 1) * tensor.nbytes]

    def _combine(self, op: Any) -> Combine:
        for known, combine in (
            (dist.ReduceOp.SUM, torch.add),
            (dist.ReduceOp.AVG, torch.add),
            (dist.ReduceOp.MAX, torch.maximum),
            (dist.ReduceOp.MIN, torch.minimum),
        ):
            if op == known:
                return combine
        raise self._unsupported(str(op))

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cpu":
            raise self._unsupported(f"tensors on {tensor.device}")
        if tensor.layout != torch.strided or tensor.is_complex():
            raise self._unsupported("sparse or complex tensors")
        if not tensor.is_contiguous():
            raise ConfigError("the tensor is not contiguous: pass tensor.contiguous()")

    def _unsupported(self, what: str) -> RuntimeError:
        return RuntimeError(f"FTARProcessGroup does not support {what}")


def _list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(torch.split(flat, [t.numel() for t in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.view_as(tensor))
