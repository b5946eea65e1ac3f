"""The real protocol in a fake world, driven by one seed (design section 13).

`keepstep.protocol` runs unchanged: the leader's and the rank's machines, `decide`, the ledger, the transfer plan. Around it
everything is made up: time, threads, store, rings, transfers, crashes. A judge that shares no code with the protocol watches
what can be seen from outside and raises `Violation` at the first broken promise.

    python -m keepstep.simulation --seed 17          plays one world and prints its transcript
    python -m keepstep.simulation --seeds 10000      plays many, says how many broke a promise

Not modelled: bytes on a wire (handshakes, checksums, tokens: `tests/processes`), disks (the job writes no checkpoints yet), the
death of the launcher, and a store that forgets what it has confirmed.
"""
