"""What the events of a step cost a leader: python benchmarks/events.py

Two events (decision and commit) of a job of 12 replicas, with three phases. Prints microseconds a step in the thread that
trains, CPU time a step with the thread that writes, and bytes a step.
"""

import tempfile
import time
from pathlib import Path

from keepstep.runtime.event_log import EventLog
from keepstep.runtime.phases import DATA_WAIT, WAIT, Phases

STEPS, REPLICAS = 20_000, 12


def step(log: EventLog, phases: Phases, number: int) -> None:
    """What a leader notes in one step."""
    members = [
        {"replica": r, "incarnation": "0123456789abcdef", "role": "worker", "units": [r]} for r in range(REPLICAS)
    ]
    for name in (WAIT, DATA_WAIT, WAIT):
        with phases.during(name):
            pass
    name = {"seq": number, "step": number, "quorum_id": 1}
    log.emit("decision", {**name, "kind": "train", "base": number, "reason": "the next step", "members": members})
    log.emit("commit", {**name, "loss": 3.2102, "samples": 48, "role": "worker", "phases": phases.take()})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        log, phases = EventLog(path, {"replica": 0, "rank": 0, "incarnation": "0123456789abcdef"}), Phases()
        cpu, spent = time.process_time(), 0
        for number in range(STEPS):
            start = time.perf_counter_ns()
            step(log, phases, number)
            spent += time.perf_counter_ns() - start
            if number % 200 == 0:
                time.sleep(0.02)  # training is slower than this, too: let the writer keep up
        log.close()
        cpu_us = 1e6 * (time.process_time() - cpu) / STEPS
        print(f"{spent / STEPS / 1e3:.0f} us a step in the caller, {cpu_us:.0f} us of CPU in all, ", end="")
        print(f"{path.stat().st_size / STEPS:.0f} bytes, {log.lost} events lost")


if __name__ == "__main__":
    main()
