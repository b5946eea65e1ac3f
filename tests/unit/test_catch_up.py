"""A rank's machine: which orders the main thread gets, what is exchanged in its name, and when it is live."""

import pytest
from machines import C, W, decision, me, member, peers, state

from keepstep.protocol.catch_up import (
    Apply,
    Begin,
    BeginExchanges,
    BreakRing,
    CancelFetch,
    ConfigureRing,
    Effect,
    GiveOrder,
    Leave,
    LoadState,
    Order,
    RankMachine,
    SendUp,
    Serve,
    StartFetch,
    Train,
)
from keepstep.protocol.errors import InvariantViolation
from keepstep.protocol.ids import QuorumId, Rank, ReplicaId, Seq
from keepstep.protocol.messages import (
    Abort,
    Decided,
    Decision,
    Fetched,
    Finish,
    Kind,
    Load,
    Loaded,
    Reader,
    RingBroken,
    StartOver,
    StateName,
    Verdict,
    Vote,
)


def decided(of: Decision) -> Decided:
    return Decided(decision=of, peers=peers(of))


def orders(effects: tuple[Effect, ...]) -> list[Order]:
    return [e.order for e in effects if isinstance(e, GiveOrder)]


def begun(effects: tuple[Effect, ...]) -> list[tuple[int, int | None]]:
    return [(e.seq, e.attempt) for e in effects if isinstance(e, BeginExchanges)]


def commit(machine: RankMachine, seq: int) -> tuple[Effect, ...]:
    return machine.on_message(Verdict(seq=Seq(seq), commit=True))


def working() -> RankMachine:
    """Replica 0 of two WORKERs has committed step 0 under decision 1 and begun step 1 on the units it expects."""
    machine = RankMachine(me(), Rank(1))
    effects = machine.on_message(decided(decision(1, 0, 1, member(0, W, 0), member(1, W, 1))))
    begin, train = orders(effects)
    assert begin == Begin(state=state(0, 1))
    assert isinstance(train, Train)
    assert begun(effects) == [(1, train.attempt)]
    apply, nxt = orders(commit(machine, 1))
    assert isinstance(apply, Apply)
    assert isinstance(nxt, Train)
    assert (nxt.start, nxt.units) == (state(1, 1), (2,))
    return machine


def test_a_steady_step_is_begun_before_the_decision_and_needs_no_order() -> None:
    machine = working()
    effects = machine.on_message(decided(decision(2, 1, 1, member(0, W, 2), member(1, W, 3))))
    assert orders(effects) == []
    assert begun(effects) == [(2, 2)]
    assert not [e for e in effects if isinstance(e, ConfigureRing)], "the ring is kept"


def test_the_initial_state_can_be_read_before_anybody_trains() -> None:
    """With min_replicas > 1 the job starts with a decision to fetch: nothing else tells the main thread what its tensors are."""
    machine = RankMachine(me(), Rank(1))
    gather = decision(1, 0, 1, member(0, W), member(1, C, fetch=True), kind=Kind.GATHER)
    assert Begin(state=state(0, 1)) in orders(machine.on_message(decided(gather)))
    (train,) = orders(machine.on_message(decided(decision(2, 0, 1, member(0, W, 0), member(1, W, 1)))))
    assert isinstance(train, Train)


def test_other_units_than_expected_are_a_new_attempt() -> None:
    machine = working()
    effects = machine.on_message(decided(decision(2, 1, 1, member(0, W, 5), quorum=2)))
    (train,) = orders(effects)
    assert isinstance(train, Train)
    assert train.units == (5,)
    assert begun(effects) == [(2, train.attempt)]
    assert [e.position for e in effects if isinstance(e, ConfigureRing)] == [0]


def test_a_retry_exchanges_the_same_attempt_again() -> None:
    machine = working()
    machine.on_message(decided(decision(2, 1, 1, member(0, W, 2), member(1, W, 3))))
    assert machine.on_message(Verdict(seq=Seq(2), commit=False)) == ()
    effects = machine.on_message(decided(decision(3, 1, 1, member(0, W, 2), quorum=3)))
    assert begun(effects) == [(3, 2)]
    assert orders(effects) == [], "nothing is computed again"


def test_an_attempt_from_another_state_is_never_exchanged() -> None:
    machine = working()
    effects = machine.on_message(decided(decision(2, 1, 9, member(1, W, 3), member(0, C, fetch=True), quorum=2)))
    assert begun(effects) == [(2, None)]


def test_a_worker_without_units_contributes_zeros_and_applies() -> None:
    machine = working()
    effects = machine.on_message(decided(decision(2, 1, 1, member(0, W), member(1, W, 3))))
    assert begun(effects) == [(2, None)]
    assert orders(effects) == []
    assert isinstance(orders(commit(machine, 2))[0], Apply)


def fetching() -> RankMachine:
    machine = RankMachine(me(), Rank(1))
    effects = machine.on_message(decided(decision(7, 5, 6, member(1, W, 5), member(2, W, 6), member(0, C, fetch=True))))
    (start,) = (e for e in effects if isinstance(e, StartFetch))
    assert start.state == state(5, 6)
    assert [p.replica_id for p in start.sources] == [1, 2]
    assert begun(effects) == [(7, None)], "the ring does not wait for the fetch"
    assert orders(effects) == []
    return machine


def vote_of(machine: RankMachine, seq: int) -> Vote:
    (send,) = machine.on_step_done(Seq(seq))
    assert isinstance(send, SendUp)
    assert isinstance(send.message, Vote)
    return send.message


def test_replay_when_the_fetch_outlasts_the_step() -> None:
    machine = fetching()
    assert not vote_of(machine, 7).caught_up
    assert commit(machine, 7) == ()
    machine.on_message(decided(decision(8, 6, 7, member(1, W, 7), member(2, W, 8), member(0, C))))
    (send,) = machine.on_fetched(state(5, 6), None)
    assert send == SendUp(message=Fetched(rank=Rank(1), state=state(5, 6), since=Seq(7), ok=True))
    load, replay = orders(machine.on_message(Load(state=state(5, 6))))
    assert isinstance(load, LoadState)
    assert isinstance(replay, Apply)
    assert replay.decision.seq == 7
    assert not vote_of(machine, 8).caught_up, "step 5 is not replayed yet"
    (live,) = orders(commit(machine, 8))
    assert isinstance(live, Apply)
    machine.on_message(decided(decision(9, 7, 8, member(1, W, 9), member(2, W, 10), member(0, C))))
    machine.on_held(state(5, 6))
    machine.on_held(state(6, 7))
    assert not vote_of(machine, 9).caught_up
    machine.on_held(state(7, 8))
    assert vote_of(machine, 9).caught_up
    (apply,) = orders(commit(machine, 9))
    assert isinstance(apply, Apply)
    effects = machine.on_message(decided(decision(10, 8, 9, member(1, W, 11), member(2, W, 12), member(0, W, 13))))
    (train,) = orders(effects)
    assert isinstance(train, Train)
    assert (train.start, train.units) == (state(8, 9), (13,))


def test_a_new_fetch_replaces_the_old_one() -> None:
    machine = fetching()
    commit(machine, 7)
    effects = machine.on_message(decided(decision(9, 5, 6, member(1, W, 5), member(0, C, fetch=True), quorum=9)))
    assert [type(e) for e in effects if isinstance(e, CancelFetch | StartFetch)] == [CancelFetch, StartFetch]
    assert [o for o in orders(machine.on_message(Load(state=state(5, 6)))) if isinstance(o, Apply)] == []


def test_late_news_of_another_fetch_is_ignored() -> None:
    machine = fetching()
    assert machine.on_fetched(state(4, 4), None) == ()
    assert machine.on_message(Load(state=state(4, 4))) == ()


def test_a_failed_fetch_is_told() -> None:
    (send,) = fetching().on_fetched(state(5, 6), "every source is gone")
    assert send == SendUp(
        message=Fetched(rank=Rank(1), state=state(5, 6), since=Seq(7), ok=False, reason="every source is gone")
    )


def test_a_source_keeps_what_is_being_read() -> None:
    machine = working()
    reader = member(2, C, fetch=True)

    def serve(of: Decision) -> dict[Reader, StateName]:
        (effect,) = (e for e in machine.on_message(decided(of)) if isinstance(e, Serve))
        return dict(effect.readers)

    first, again = (Reader(incarnation=reader.incarnation, since=Seq(seq)) for seq in (2, 4))
    assert serve(decision(2, 1, 1, member(0, W, 2), reader, quorum=2)) == {first: state(1, 1)}
    commit(machine, 2)
    assert serve(decision(3, 2, 2, member(0, W, 3), member(2, C), quorum=2)) == {first: state(1, 1)}
    commit(machine, 3)
    assert serve(decision(4, 3, 3, member(0, W, 4), reader, quorum=2)) == {again: state(3, 3)}, "it starts over"
    commit(machine, 4)
    assert serve(decision(5, 4, 4, member(0, W, 5), member(2, W, 6), quorum=2)) == {}


def test_failures_are_voted_down_and_name_the_suspect() -> None:
    machine = working()
    machine.on_message(decided(decision(2, 1, 1, member(0, W, 2), member(1, W, 3))))
    (send,) = machine.on_step_failed(Seq(2), ReplicaId(1), "connection reset")
    assert isinstance(send, SendUp)
    assert isinstance(send.message, Vote)
    assert (send.message.yes, send.message.ring_broken, send.message.suspect) == (False, True, 1)
    assert machine.on_step_failed(Seq(1), ReplicaId(1), "late") == ()


def test_a_worker_whose_part_is_there_says_so_when_the_exchange_fails() -> None:
    machine = working()

    def fails(seq: int) -> bool:
        (send,) = machine.on_step_failed(Seq(seq), ReplicaId(1), "told: replica 1 is slow")
        assert isinstance(send, SendUp)
        assert isinstance(send.message, Vote)
        return send.message.computed

    machine.on_message(decided(decision(2, 1, 1, member(0, W, 2), member(1, W, 3))))
    assert not fails(2)
    machine.on_message(decided(decision(3, 1, 1, member(0, W, 2), member(1, W, 3), quorum=3)))
    machine.on_computed(2)
    assert fails(3)
    machine.on_message(decided(decision(4, 1, 1, member(0, W), member(1, W, 3), quorum=4)))
    assert fails(4), "the data is over: nothing to compute, but something to wait for"
    machine.on_message(decided(decision(5, 1, 1, member(0, C), member(1, W, 3), quorum=5)))
    assert not fails(5), "nobody is late for whoever catches up"


def test_only_the_present_ring_matters() -> None:
    machine = working()
    assert machine.on_ring_broken(QuorumId(9), None, "old") == ()
    (send,) = machine.on_ring_broken(QuorumId(1), None, "ours")
    assert isinstance(send, SendUp)
    assert isinstance(send.message, RingBroken)


def test_gathering_the_final_state() -> None:
    machine = RankMachine(me(), Rank(0))
    gather = decision(9, 5, 8, member(1, W), member(0, C, fetch=True), kind=Kind.GATHER)
    effects = machine.on_message(decided(gather))
    assert begun(effects) == []
    machine.on_fetched(state(5, 8), None)
    machine.on_message(Load(state=state(5, 8)))
    assert machine.on_held(state(5, 8)) == (SendUp(message=Loaded(rank=Rank(0), state=state(5, 8))),)
    assert machine.on_message(Finish(left="asked to")) == (GiveOrder(order=Leave(left="asked to")),)


def test_a_process_with_other_weights_never_serves_as_the_initial_state() -> None:
    machine = working()
    machine.on_held(state(1, 1))
    machine.on_message(StartOver(reason="test"))
    with pytest.raises(InvariantViolation, match="initial state"):
        machine.on_message(decided(decision(12, 0, 12, member(0, W, 0), quorum=12)))


def test_a_failed_fetch_goes_back_to_the_state_that_is_still_held() -> None:
    machine = working()
    machine.on_held(state(1, 1))
    machine.on_message(decided(decision(12, 5, 9, member(0, C, fetch=True), member(1, W, 3), quorum=12)))
    assert machine.on_message(StartOver(reason="no source is left", state=state(1, 1))) == (CancelFetch(),)
    again = decision(13, 1, 1, member(0, W, 7), quorum=13)
    orders = [e.order for e in machine.on_message(decided(again)) if isinstance(e, GiveOrder)]
    assert [(order.start, order.units) for order in orders if isinstance(order, Train)] == [(state(1, 1), (7,))]


def test_an_abort_breaks_the_ring_it_names() -> None:
    machine = working()
    ring = QuorumId(1)
    assert machine.on_message(Abort(quorum_id=QuorumId(99), suspect=ReplicaId(1), reason="gone")) == ()
    (effect,) = machine.on_message(Abort(quorum_id=ring, suspect=ReplicaId(1), reason="gone"))
    assert effect == BreakRing(quorum_id=ring, suspect=ReplicaId(1), reason="gone")
