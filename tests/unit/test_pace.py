"""Whether a main thread keeps up: learned from its steps, said when it does not, and never too early."""

import pytest

from keepstep.protocol.pace import BEFORE, KNOWN, RECENT, KeepsUp, Learned, Pace, PaceSettings, Slow, Stuck

S = 1_000_000_000
STEP = 3 * S // 10
SETTINGS = PaceSettings(floor_ns=S, ceiling_ns=300 * S, straggler_ns=60 * S)


class Main:
    """A main thread, and the clock."""

    def __init__(self, settings: PaceSettings = SETTINGS, before: Learned | None = None) -> None:
        self.pace, self.now = Pace(settings, before), 5 * S

    def step(self, took: int = STEP, *, apply: int = S // 100) -> None:
        """As in a steady job: the sums of the last step and the next one are given together."""
        for trains, takes in ((False, apply), (True, took)):
            self.pace.on_order(trains=trains, now=self.now)
            self.now += takes
            assert self.pace.on_time(now=self.now) == ()
            assert self.pace.on_done(now=self.now) == ()
        assert self.pace.next_deadline() is None, "it waits for the others: that is no hang"

    def steps(self, count: int, took: int = STEP) -> None:
        for _ in range(count):
            self.step(took)

    def hangs(self, *, trains: bool = True) -> int:
        """From now on. Returns the first deadline."""
        self.pace.on_order(trains=trains, now=self.now)
        due = self.pace.next_deadline()
        assert due is not None
        return due

    def at(self, now: int) -> tuple[object, ...]:
        self.now = now
        return self.pace.on_time(now=now)


def test_slow_after_twice_the_longest_step_and_the_floor() -> None:
    main = Main()
    main.steps(10)
    main.step(2 * STEP)
    main.steps(10)
    due = main.hangs()
    assert due - main.now == S + 4 * STEP
    assert main.at(due - 1) == ()
    assert main.at(due) == (Slow(took=S + 4 * STEP, longest=2 * STEP),)
    assert main.pace.slow


def test_a_step_of_a_third_of_a_second_is_missed_within_its_triple_and_a_second() -> None:
    main = Main()
    main.steps(30)
    assert main.hangs() - main.now <= 3 * STEP + S


def test_until_steps_are_known_only_the_ceiling_counts_and_the_first_is_not_learned_from() -> None:
    main = Main()
    main.step(100 * S)  # it compiles
    main.steps(KNOWN - 1)
    assert main.pace.threshold == SETTINGS.ceiling_ns
    main.step()
    assert main.pace.threshold == S + 2 * STEP


def test_one_hang_hides_the_next_hardly_and_longer_steps_are_soon_known() -> None:
    main = Main()
    main.steps(10)
    first = main.pace.threshold
    for expected in (S + 2 * first, S + 2 * (S + 2 * first)):
        main.hangs()
        main.now += 30 * S
        main.pace.on_done(now=main.now)
        assert main.pace.threshold == expected
    main.steps(RECENT, took=7 * S)
    assert main.pace.threshold == 15 * S


def test_an_old_slow_step_is_forgotten() -> None:
    main = Main()
    main.steps(4)
    main.step(50 * S // 100)
    main.steps(RECENT - 1)
    assert main.pace.threshold == 2 * S
    main.step()
    assert main.pace.threshold == S + 2 * STEP


def test_the_ceiling_is_never_exceeded() -> None:
    main = Main(PaceSettings(floor_ns=S, ceiling_ns=4 * S, straggler_ns=60 * S))
    main.steps(5, took=3 * S)
    assert main.pace.threshold == 4 * S


def test_it_keeps_up_again() -> None:
    main = Main()
    main.steps(5)
    main.at(main.hangs())
    main.now += S
    assert main.pace.on_done(now=main.now) == (KeepsUp(took=2 * S + 2 * STEP),)
    assert not main.pace.slow
    main.steps(5, took=S)


def test_said_again_later_and_later_and_that_it_is_stuck() -> None:
    main = Main()
    main.steps(5)
    began, said = main.now, []
    due: int | None = main.hangs()
    while len(said) < 9:
        assert due is not None
        said += [(type(e), main.now - began) for e in main.at(due)]
        due = main.pace.next_deadline()
    first = S + 2 * STEP
    slow = [first << i for i in range(7)]
    assert said == [*((Slow, at) for at in slow[:6]), (Stuck, 60 * S), (Slow, slow[6]), (Stuck, 120 * S)]


def test_who_was_stuck_and_goes_on_is_judged_anew() -> None:
    main = Main()
    main.steps(5)
    main.at(main.hangs(trains=False))
    assert main.pace.on_done(now=main.now) == (KeepsUp(took=60 * S),)
    began = main.now
    assert main.hangs(trains=False) == began + 60 * S


def test_stuck_is_never_sooner_than_four_thresholds() -> None:
    main = Main(PaceSettings(floor_ns=S, ceiling_ns=300 * S, straggler_ns=S))
    main.steps(5, took=10 * S)
    due = main.hangs()
    assert main.at(due) == (Slow(took=21 * S, longest=10 * S),)
    main.at(due + 21 * S)
    last = main.pace.next_deadline()
    assert last == due + 63 * S
    assert main.at(last) == (Stuck(took=84 * S),)


def test_nobody_waits_for_a_replica_that_replays() -> None:
    main = Main()
    main.steps(5)
    due = main.hangs(trains=False)
    assert due - main.now == 60 * S
    assert main.at(due) == (Stuck(took=60 * S),)
    main = Main()
    main.steps(5)
    main.hangs(trains=False)
    main.pace.on_order(trains=True, now=main.now)
    due = main.pace.next_deadline() or 0
    assert due - main.now == S + 2 * STEP, "an order to train waits behind it"


def test_what_is_not_begun_is_not_counted() -> None:
    """Two orders at once: the second one's time begins when the first is done."""
    main = Main()
    main.steps(5)
    main.pace.on_order(trains=False, now=main.now)
    main.pace.on_order(trains=True, now=main.now)
    main.now += S
    main.pace.on_done(now=main.now)
    assert main.pace.next_deadline() == main.now + S + 2 * STEP


def test_a_process_that_stood_still_gets_more_time() -> None:
    """Frozen and thawed: the deadline is told seconds late, and the main thread had no chance to be in time."""
    main = Main()
    main.steps(5)
    due = main.hangs()
    assert main.at(due + 6 * S) == ()
    again = main.pace.next_deadline()
    assert again == main.now + S
    assert [type(e) for e in main.at(again)] == [Slow], "and if it does not use it, it is slow"


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="not above its ceiling"):
        PaceSettings(floor_ns=2, ceiling_ns=1)


# --- from one life to the next ---------------------------------------------------------------------------------

COMPILED = Learned(first=20 * S, longest=STEP)


def test_a_life_hands_on_what_its_first_step_and_the_longest_of_the_others_took() -> None:
    main = Main()
    main.step(20 * S)
    main.steps(KNOWN - 1)
    assert main.pace.learned is None, "too little is known"
    main.step(2 * STEP)
    assert main.pace.learned == Learned(first=20 * S, longest=2 * STEP)
    main.steps(2 * RECENT)
    assert main.pace.learned == Learned(first=20 * S, longest=2 * STEP), "beginnings count for the next beginning"
    main.steps(RECENT, took=S)
    assert main.pace.learned == Learned(first=20 * S, longest=S)


def test_a_hang_in_the_first_steps_of_the_next_life_is_found_by_it() -> None:
    main = Main(before=COMPILED)
    assert main.pace.threshold == S + BEFORE * 20 * S, "a first step may be slow again"
    main.step(30 * S)
    due = main.hangs()
    assert due - main.now == S + BEFORE * STEP
    assert main.at(due) == (Slow(took=S + BEFORE * STEP, longest=0, before=STEP),)


def test_its_own_steps_soon_replace_it() -> None:
    main = Main(before=COMPILED)
    main.step(3 * S)
    main.step(2 * STEP)
    assert main.pace.threshold == S + BEFORE * 2 * STEP, "its own count as soon as they are longer"
    main.steps(KNOWN - 1, took=STEP // 2)
    assert main.pace.threshold == S + 2 * 2 * STEP
    assert main.pace.learned == Learned(first=3 * S, longest=2 * STEP)


def test_never_above_the_ceiling_nor_below_the_floor() -> None:
    assert Main(before=Learned(first=400 * S, longest=400 * S)).pace.threshold == SETTINGS.ceiling_ns
    assert Main(before=Learned(first=1, longest=1)).pace.threshold >= SETTINGS.floor_ns


def test_a_life_that_is_stuck_by_what_it_was_told_does_not_tell_the_next() -> None:
    """Steps have become 100 times as long, for the script is another one now: one life may end of it, the next must not."""
    main = Main(before=COMPILED)
    main.step(3 * S)
    due: int | None = main.hangs()
    while due is not None and (Stuck not in {type(e) for e in main.at(due)}):
        due = main.pace.next_deadline()
    assert main.pace.learned is None
    main.now += S
    main.pace.on_done(now=main.now)
    main.steps(KNOWN - 1, took=2 * STEP)
    assert main.pace.learned is not None, "it was not stuck after all, and knows its own steps now"
    main = Main()
    main.steps(KNOWN + 1)
    main.at(main.hangs(trains=False))
    assert main.pace.learned is not None, "who knows its own steps is not misled"


def test_nothing_makes_no_step() -> None:
    for first, longest in ((0, 1), (1, 0), (1, 1 << 63)):
        with pytest.raises(ValueError, match="some time"):
            Learned(first=first, longest=longest)
