"""Finds missing waits between lanes without a device that would show them only sometimes.

Every lane has a vector clock, and so has the host, which puts things into lanes. `record` and `wait` carry clocks over. Two
accesses to the same byte, one of them a write, that no chain of waits orders are a race, whatever happened to come first here.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

Clock = dict[str, int]


@dataclass
class Access:
    lo: int
    hi: int
    who: str
    at: int
    write: bool


class Race(AssertionError):
    """Two accesses that nothing orders."""


class RacyLane:
    def __init__(self, world: "RaceFinder", name: str) -> None:
        self.world, self.name, self.clock = world, name, Clock()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self.access(source, write=False)
        self.access(into, write=True)
        into.copy_(source)

    def record(self) -> Clock:
        self.tick()
        return dict(self.clock)

    def wait(self, mark: Clock) -> None:
        if not self.world.is_deaf(self.name):
            join(self.clock, mark)

    def tick(self) -> None:
        join(self.clock, self.world.host.clock)  # the host puts it into the lane now
        self.clock[self.name] = self.clock.get(self.name, 0) + 1

    def access(self, tensor: torch.Tensor, *, write: bool) -> None:
        self.tick()
        lo, hi = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for other in self.world.accesses:
            together = other.lo < hi and lo < other.hi and (write or other.write)
            if together and self.clock.get(other.who, 0) < other.at:
                raise Race(f"{self.name} and {other.who} use the same memory, and neither waits for the other")
        self.world.accesses.append(Access(lo, hi, self.name, self.clock[self.name], write))


class RaceFinder:
    """`Lanes` over CPU tensors that raise Race. `deaf`: (lane, function) of a wait that is left out, to see it noticed."""

    def __init__(self, deaf: tuple[str, str] | None = None) -> None:
        self.deaf, self.missed = deaf, 0
        self.accesses: list[Access] = []
        self.host = RacyLane.__new__(RacyLane)
        self.host.world, self.host.name, self.host.clock = self, "host", {}
        self.compute, self.fetch, self.drain = (RacyLane(self, name) for name in ("compute", "fetch", "drain"))

    def is_deaf(self, lane: str) -> bool:
        found = self.deaf == (lane, sys._getframe(2).f_code.co_name)
        self.missed += found
        return found

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.forget(buffer)
        self.compute.access(buffer, write=True)  # whoever had it before
        return buffer

    def release(self, tensor: torch.Tensor) -> None:
        self.compute.access(tensor, write=True)  # whoever gets it next
        self.forget(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        lo, hi = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        self.accesses = [each for each in self.accesses if each.hi <= lo or hi <= each.lo]

    def is_in_host_memory(self, tensor: torch.Tensor) -> bool:
        return True

    def host_like(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(tensor)
        self.forget(made)
        self.host.access(made, write=True)
        return made

    def finish(self, mark: Any) -> None:
        if not self.is_deaf("host"):
            join(self.host.clock, mark)


def join(clock: Clock, other: Clock) -> None:
    for who, at in other.items():
        clock[who] = max(clock.get(who, 0), at)
