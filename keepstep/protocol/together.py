"""What many say alike, said once: on its way to rank 0, the tree counts the yes votes instead of passing on each of them.

A process of the tree has *slots*: its own ranks, and its children, each of which speaks for everybody below it. Once every slot
has said the same, it goes up, once. So the leader gets as many messages as it has children, and none before all below a child
have spoken: a commit needs them all anyway. Only what means the same is merged. A vote of no is not: it goes up by itself, and
as whoever gave it is missing in the count, no yes for its replica ever does.

What is said is a *topic* and a number that only grows: the decision that is voted on, or that told to fetch. Whoever speaks of a
newer decision has heard that the older one is over, so of each topic only the newest number is counted. Pure.
"""

from dataclasses import dataclass, field

from keepstep.protocol.ids import Seq
from keepstep.protocol.messages import AllFetched, AllVoted, Fetched, RingBroken, Said, Vote

VOTED, FETCHED = 1, 2  # topics
SEEN_MAX = 64


def merged(message: Said) -> tuple[int, int, bool] | None:
    """Topic, number, and whether this rank agrees, of what the leader needs to hear only once all ranks have said it."""
    match message:
        case Vote(yes=True):
            return VOTED, message.seq, message.caught_up
        case Fetched(ok=True):
            return FETCHED, message.since, True
        case _:
            return None


def said_by_all(topic: int, number: int, agreed: bool) -> AllVoted | AllFetched | None:
    """What the leader hears; None: there is no such topic."""
    if topic == VOTED:
        return AllVoted(seq=Seq(number), caught_up=agreed)
    return AllFetched(since=Seq(number)) if topic == FETCHED else None


def enough_once(message: Said) -> bytes | None:
    """Of messages with the same key the leader needs only one, whoever says it. None: it needs them all."""
    match message:
        case Vote():
            return b"vote %d" % message.seq
        case Fetched():
            return b"fetch %d" % message.since
        case RingBroken():
            return f"ring {message.quorum_id} {message.suspect} {message.own_link}".encode()
        case _:
            return None


@dataclass(slots=True)
class _Count:
    number: int
    said: set[int] = field(default_factory=set)
    agreed: bool = True


@dataclass(slots=True)
class Together:
    """The newest number of each topic, and which slots have said it."""

    slots: int
    _counts: dict[int, _Count] = field(default_factory=dict)

    def say(self, slot: int, topic: int, number: int, agreed: bool) -> bool | None:
        """Once every slot has said this: whether all of them agreed. Before and after that, None."""
        count = self._counts.get(topic)
        if count is None or number > count.number:
            count = self._counts[topic] = _Count(number)
        if number < count.number or slot in count.said:
            return None
        count.said.add(slot)
        count.agreed &= agreed
        return count.agreed if len(count.said) == self.slots else None


@dataclass(slots=True)
class Once:
    """Of messages that mean the same to the leader, the first."""

    _seen: dict[bytes, None] = field(default_factory=dict)

    def is_first(self, key: bytes) -> bool:
        if key in self._seen:
            return False
        if len(self._seen) == SEEN_MAX:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = None
        return True
