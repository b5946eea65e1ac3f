"""What a shadow run must have left behind, checked from its records alone: bugs of data loading and of the control plane.

    states       every replica that saw the end has the same digest, and the ledger that the history says
    units        each is committed once, none is lost, and each was read by somebody before it was trained
    data         two units of an epoch hold different data; a unit that is read again holds the same

A job that failed is judged by what it did until then. Pure.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.observe.findings import Findings
from keepstep.observe.history import units
from keepstep.observe.records import Record, Run
from keepstep.observe.summary import summarize

SHOWN = 5  # of each kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`problems`: in words, one each; none: the run is what it must be."""

    summary: Record
    problems: tuple[str, ...]


def judge(run: Run) -> Verdict:
    """Everything that is wrong with a run."""
    findings = Findings.of(run)
    summary = summarize(run, findings)
    chain = findings.history.chain
    whole = bool(chain) and chain[0]["step"] == 0  # a run that went on from a checkpoint does not know what was before
    problems = [*_of_states(summary, whole), *_of_units(summary, run, findings, whole), *_of_data(run)]
    return Verdict(summary=summary, problems=tuple(problems))


def _of_states(summary: Record, whole: bool) -> Iterator[str]:
    digests = summary["state_digest"]
    if len(set(digests.values())) > 1:
        told = ", ".join(f"replica {r}: {digest}" for r, digest in digests.items())
        yield f"replicas ended with different states ({told})"
    if whole and digests and not summary["ledgers_agree"]:
        yield "the ledgers at the end do not hold what was committed"


def _of_units(summary: Record, run: Run, findings: Findings, whole: bool) -> Iterator[str]:
    if summary["units_duplicated"]:
        yield f"{summary['units_duplicated']} units were trained twice"
    if whole and summary["units_lost"]:
        yield f"{summary['units_lost']} units were never trained"
    read = {unit for e in run.of("batch") for unit in e["units"]}
    unread = sorted(set(units(findings.history.chain)) - read)
    if read and unread and not summary["events_lost"]:
        yield f"units were trained that nobody had read: {_some(unread)}"


def _of_data(run: Run) -> Iterator[str]:
    """By (units, rank): a rank's share of them, as the digest of its bits."""
    shares: dict[tuple[tuple[int, ...], int], set[str]] = defaultdict(set)
    epochs: dict[tuple[int, ...], tuple[int, ...]] = {}
    for e in run.of("batch"):
        key = tuple(e["units"])
        shares[key, e["rank"]].add(e["digest"])
        epochs[key] = tuple(e["epoch"])
    unsteady = sorted({key for (key, _), digests in shares.items() if len(digests) > 1})
    if unsteady:
        yield f"read again, they held other data: units {_some(sorted({u for key in unsteady for u in key}))}"
    whole: dict[object, set[tuple[int, ...]]] = defaultdict(set)
    ranks = sorted({rank for _, rank in shares})
    for key in epochs:
        parts = [shares.get((key, rank), set()) for rank in ranks]
        if all(len(part) == 1 for part in parts):
            whole[epochs[key], tuple(next(iter(part)) for part in parts)].add(key)
    for same in list(filter(lambda keys: len(keys) > 1, whole.values()))[:SHOWN]:
        yield f"units {_some(sorted(u for key in same for u in key))} hold the same data"


def _some(found: list[int]) -> str:
    return ", ".join(map(str, found[:SHOWN])) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
