"""When a life whose main thread hangs is ended: never while everybody hangs."""

from dataclasses import replace

from quorum_views import OUTCOME, completed, decision_7, not_completed, report, view

from keepstep.protocol.ids import Incarnation, Rank, ReplicaId, Seq
from keepstep.protocol.messages import Kind, Lags
from keepstep.protocol.quorum import View
from keepstep.protocol.stuck import of_no_use

LAST = decision_7()


def lags(rank: int = 0, *, waits: bool = False) -> Lags:
    return Lags(rank=Rank(rank), slow=True, stuck=True, waits=waits, reason=f"at line {rank}")


def ends(seen: View, *said: Lags, replica: int = 0) -> str:
    return of_no_use(ReplicaId(replica), Incarnation(f"{replica}a"), said or (lags(),), seen)


def test_not_while_everybody_hangs() -> None:
    everybody = [not_completed(i, slow=True) for i in range(3)]
    assert ends(view(*everybody, last=LAST)) == ""
    assert ends(view(not_completed(0, slow=True), last=LAST)) == "", "the others have not answered yet"
    assert ends(view(*everybody)) == "", "nothing is decided yet"


def test_not_without_a_rank_that_is_stuck() -> None:
    others = [not_completed(i, waits=True) for i in (1, 2)]
    assert of_no_use(ReplicaId(0), Incarnation("0a"), (), view(not_completed(0, slow=True), *others, last=LAST)) == ""


def test_once_somebody_waits_for_it() -> None:
    why = ends(view(not_completed(0, slow=True), not_completed(1, waits=True), last=LAST))
    assert why == "rank 0: at line 0, with replica 1 waiting for it"
    assert ends(view(not_completed(0, slow=True, waits=True), last=LAST)) == "", "it is itself that waits"


def test_not_for_somebody_who_waited_for_another_step_or_is_dead() -> None:
    assert ends(view(not_completed(0), completed(1, waits=True), last=LAST)) == ""
    assert ends(view(not_completed(0), not_completed(1, waits=True), last=LAST, dead=("1a",))) == ""


def test_a_later_decision_from_the_same_state_is_waited_for_too() -> None:
    again = replace(LAST, seq=Seq(8))
    assert ends(view(not_completed(1, waits=True), last=again))


def test_once_others_go_on_without_it() -> None:
    why = "rank 0: at line 0, with the others going on without it"
    assert ends(view(completed(1), last=decision_7(catching_up=(0,)))) == why
    assert ends(view(completed(1), last=LAST), replica=3) == why
    assert ends(view(report(1, 7, OUTCOME), last=decision_7(Kind.GATHER))) == "", "that is no step"


def test_the_rank_is_named_that_does_not_wait_for_others() -> None:
    left_out = view(completed(1), last=decision_7(catching_up=(0,)))
    assert ends(left_out, lags(0, waits=True), lags(2), lags(1, waits=True), lags(3)).startswith("rank 2: at line 2")
    assert ends(left_out, lags(1, waits=True), lags(0, waits=True)).startswith("rank 0: at line 0")
