"""`python -m keepstep.simulation`: plays worlds. See `keepstep.simulation`."""

import sys, time
from keepstep.simulation.judge import Violation
from keepstep.simulation.plan import plan_of
from keepstep.simulation.world import World
from collections import Counter

a, b = int(sys.argv[1]), int(sys.argv[2])
t = time.time()
ends = Counter()
ev = steps = 0
bad = Counter()
for seed in range(a, b):
    try:
        r = World(plan_of(seed)).run()
        ends[r.ending] += 1
        ev += r.events
        steps += r.steps
    except Violation as e:
        bad[str(e).split(": ", 1)[1][:60]] += 1
        if sum(bad.values()) <= 8:
            print(seed, str(e)[:300])
    except Exception as e:
        print(seed, type(e), e)
        raise
d = time.time() - t
print(
    ends,
    dict(bad),
    f"{(b - a) / d:.0f} seeds/s, {ev / (b - a):.0f} events, {steps / (b - a):.1f} steps, {ev / d:.0f} ev/s",
)
