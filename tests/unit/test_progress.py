"""The line of the log: who writes it, and what it says."""

import re

from machines import C, W, decision, member

from keepstep.launch.screen import coloured
from keepstep.protocol.ids import Incarnation
from keepstep.training.progress import Progress

A = Incarnation("a0")
BOTH = member(0, W, 1), member(1, W, 2)


class Crew:
    """The leaders of some lives; each sees the decisions that name it."""

    def __init__(self) -> None:
        self.views: dict[Incarnation, Progress] = {}

    def commit(self, seq: int, *members: object, took_s: float = 1.0, **fields: object) -> dict[str, str]:
        """Who writes what."""
        done = decision(seq, seq - 1, seq - 1, *members, quorum=7)  # type: ignore[arg-type]
        lines = {}
        for m in done.members:
            view = self.views.setdefault(m.incarnation, Progress(m.incarnation, every=1, tokens_per_sample=None))
            line = view.on_commit(done, loss=3.2102, samples=8.0, took_s=took_s, phases=fields.get("phases", ()))  # type: ignore[arg-type]
            if line is not None:
                lines[str(m.incarnation)] = line
        return lines


def test_the_line() -> None:
    progress = Progress(A, every=2, tokens_per_sample=1000)
    progress.note({"grad_norm": 0.123456})
    first, second = decision(120, 118, 119, *BOTH, quorum=7), decision(121, 119, 120, *BOTH, quorum=7)
    assert progress.on_commit(first, loss=3.0, samples=8.0, took_s=0.25, phases=()) is None
    assert progress.on_commit(second, loss=3.2102, samples=8.0, took_s=0.25, phases=()) == (
        "step:  120  loss:  3.2102  grad_norm: 0.1235  step_time: 0.25s  tps: 32,000  replicas: 2/3  quorum_id: 7  ettr: 66.7%"
    )


def test_the_line_is_coloured_for_a_terminal_and_no_other_line_is() -> None:
    line = Crew().commit(1, *BOTH)["a0"]
    shown = coloured(f"12:00 INFO keepstep: {line}")
    assert re.sub(r"\x1b\[\d+m", "", shown) == f"12:00 INFO keepstep: {line}"
    assert "\x1b[31mstep:    1\x1b[0m  \x1b[32mloss:  3.2102\x1b[0m" in shown
    assert coloured("step: 7 of my own") == "step: 7 of my own"


def test_exactly_one_replica_writes_it_and_another_when_it_dies() -> None:
    crew = Crew()
    assert list(crew.commit(1, *BOTH)) == ["a0"]
    assert list(crew.commit(2, *BOTH)) == ["a0"]
    assert list(crew.commit(3, member(1, W, 1))) == ["b0"]  # a0 is dead
    assert list(crew.commit(4, member(0, C, life=1), member(1, W, 2))) == ["b0"]
    assert list(crew.commit(5, member(0, W, 3, life=1), member(1, W, 2))) == ["b0"]  # the older one, not the first
    assert list(crew.commit(6, member(0, W, 3, life=1))) == ["a1"]


def test_who_was_left_out_and_came_back_is_a_newcomer() -> None:
    crew = Crew()
    crew.commit(1, *BOTH)
    crew.commit(2, member(1, W, 2))
    assert list(crew.commit(3, member(0, C), member(1, W, 2))) == ["b0"]
    assert list(crew.commit(4, *BOTH)) == ["b0"]


def test_waiting_beyond_the_usual_is_not_effective() -> None:
    crew = Crew()
    three = member(0, W, 1), member(1, W, 2), member(2, W, 3)
    for seq in range(1, 10):
        line = crew.commit(seq, *three, phases=[("wait", 0.0, 0.1)])["a0"]
    assert line.endswith("ettr: 100.0%")
    line = crew.commit(10, *three, took_s=11.0, phases=[("wait", 0.0, 10.1)])["a0"]
    assert line.endswith("ettr: 50.0%")


def test_it_can_be_turned_off() -> None:
    progress = Progress(A, every=0, tokens_per_sample=None)
    assert progress.on_commit(decision(1, 0, 0, *BOTH), loss=1.0, samples=1.0, took_s=1.0, phases=()) is None
