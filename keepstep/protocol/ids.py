"""Names for the numbers that the protocol passes around.

They are plain integers and strings at run time; the type checker keeps a step from being used as a rank.
"""

from typing import NewType

ReplicaId = NewType("ReplicaId", int)
"""Which replica, 0..R-1. Stable across restarts."""

Rank = NewType("Rank", int)
"""Which process inside a replica, 0..K-1. Rank 0 is the leader."""

Incarnation = NewType("Incarnation", str)
"""One life of a replica: a fresh random string at each start. Two lives never share one."""

Step = NewType("Step", int)
"""An optimizer update, from 0. "State n" is the state before step n."""

Seq = NewType("Seq", int)
"""The number of a decision, from 1, strictly increasing. 0 stands for "no decision yet"."""

QuorumId = NewType("QuorumId", int)
"""A ring membership: the `seq` of the decision that formed it, so it is never used twice."""

UnitId = NewType("UnitId", int)
"""The smallest piece of data that is trained exactly once. Runs on across epochs."""

NO_DECISION = Seq(0)

LEADER = Rank(0)

FIRST_UNIT = UnitId(0)
