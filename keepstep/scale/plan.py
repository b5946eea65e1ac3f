"""`keepstep plan`: what to choose for a job, in words; with --topology, where each replica goes.

Deterministic: the same options give the same output. Fails: ConfigError without simpy, without matplotlib if a picture is wanted,
if nothing fits, or if a file cannot be read or written.
"""

from dataclasses import asdict
from pathlib import Path

from keepstep.protocol.errors import ConfigError
from keepstep.protocol.placement import Placement, place_replicas
from keepstep.scale import figures, planning
from keepstep.scale.planning import Choice, Needs, Plan
from keepstep.scale.simulate import folder, markdown, write_json
from keepstep.scale.topology_file import Topology, read_topology
from keepstep.scale.uplinks import exchange_s, hops, uplinks

SWINGS_SHOWN = 8


def plan(
    needs: Needs,
    *,
    replicas: int | None,
    topology: Path | None,
    seed: int,
    seeds: int,
    days: float,
    json_file: Path | None,
    out: Path | None,
) -> str:
    """Makes the plan, writes what is asked for, returns the text to print."""
    if seeds < 1 or days <= 0:
        raise ConfigError("--seeds and --days must be positive")
    where = read_topology(topology) if topology else None
    made = planning.make_plan(needs, seed=seed, seeds=seeds, days=days, replicas=replicas)
    lines = in_words(made)
    placed = None
    if where:
        placed = place_replicas(where.hosts, replicas=made.chosen.replicas, ranks=made.chosen.ranks)
        lines += ["", *placement_in_words(needs, where, placed)]
    if json_file:
        write_json(json_file, as_json(made, placed))
    if out:
        from keepstep.scale import pictures

        folder(out)
        pictures.trade_off(
            [(c.replicas, c.ettr, c.memory) for c in made.choices],
            limit=needs.memory_for_state,
            chosen=made.chosen.replicas,
            path=out / "plan.png",
        )
    return "\n".join(lines)


def in_words(made: Plan) -> list[str]:
    needs, chosen = made.needs, made.chosen
    reserve = chosen.spares * needs.gpus_per_host
    lines = [
        f"{needs.gpus:,} GPUs, each failing every {needs.gpu_mtbf_s / figures.HOUR:,.0f} h: "
        f"a failure every {needs.mtbf_s / figures.MINUTE:,.1f} min",
        "",
        *markdown(
            ("replicas", "GPUs each", "state, GB a GPU", "ETTR", "over seeds", "of all GPUs", "checkpoint, steps", ""),
            [_choice(c, chosen) for c in made.choices],
        ),
        "",
        f"replicas      {chosen.replicas} of {chosen.ranks:,} GPUs",
        f"spares        {chosen.spares} hosts ({reserve:,} GPUs): a failure finds none in 1 of "
        f"{1 / figures.EMPTY_RESERVE.value:.0f} cases, if a repair takes {needs.repair_s / figures.HOUR:g} h",
        f"checkpoint    every {chosen.checkpoint_steps} steps ({chosen.checkpoint_steps * needs.step_s / 60:.0f} min)",
        f"deadlines     no progress: EngineSettings(progress_ceiling_s={made.progress_deadline_s:g}); "
        f"no heartbeat: LinkSettings(silent_s={figures.SEEN_SILENT.value:g})",
        f"ETTR          {chosen.ettr.mean:.1%} ({chosen.ettr.low:.1%} to {chosen.ettr.high:.1%}); "
        f"of all GPUs, those in reserve too, {chosen.ettr_of_all:.1%}",
        f"hangs most on {made.swings[0].what}: {made.swings[0].at_low:.1%} ({made.swings[0].low}) "
        f"to {made.swings[0].at_high:.1%} ({made.swings[0].high})",
        "",
        *markdown(
            ("if this is other than thought", "", "ETTR", "", "ETTR", "swing"),
            [
                (s.what, s.low, f"{s.at_low:.1%}", s.high, f"{s.at_high:.1%}", f"{100 * s.size:.1f}")
                for s in made.swings[:SWINGS_SHOWN]
            ],
        ),
    ]
    return lines


def _choice(choice: Choice, chosen: Choice) -> tuple[str, ...]:
    return (
        str(choice.replicas),
        f"{choice.ranks:,}",
        f"{choice.memory / 1e9:.1f}",
        f"{choice.ettr.mean:.1%}",
        f"{choice.ettr.low:.1%} .. {choice.ettr.high:.1%}",
        f"{choice.ettr_of_all:.1%}",
        str(choice.checkpoint_steps),
        "recommended" if choice is chosen else "" if choice.fits else "does not fit",
    )


def placement_in_words(needs: Needs, where: Topology, placed: Placement) -> list[str]:
    """Where everything goes, the ring, and whether the uplinks carry it."""
    lines = []
    for replica, seats in placed.seats.items():
        span = seats[0].host if len(seats) == 1 else f"{seats[0].host} .. {seats[-1].host}"
        lines.append(f"replica {replica:<3} {placed.labels[replica] or 'over buildings':16} {len(seats)} hosts: {span}")
    spare = sum(free > 0 for free in placed.free.values())
    lines += [f"in reserve  {spare} hosts", ""]
    lines += [f"ring        {a} -> {b}: {t.name}, latency {t.cost}x" for a, b, t in hops(placed, where.hosts)]
    found = uplinks(placed, where.hosts, zone=where.oversubscription_zone, building=where.oversubscription_building)
    lines += ["", *(_uplink(u.place, u.sending, u.gpus, u.oversubscription, u.pace) for u in found)]
    pace = min(u.pace for u in found)
    replicas = len(placed.seats)
    gradients = figures.GRADIENT_BYTES_PER_PARAMETER.value / figures.STATE_BYTES_PER_PARAMETER.value
    takes = exchange_s(needs.state_bytes * gradients * replicas / needs.gpus, replicas, where.nic_bytes_per_s * pace)
    hides = figures.BACKWARD.value * needs.step_s
    verdict = "which hides in" if takes <= hides else "MORE than"
    lines += ["", f"a step's sums take {takes:.2f} s at that pace, {verdict} the {hides:.1f} s of a backward pass"]
    return lines


def _uplink(name: str, sending: int, gpus: int, oversubscription: float, pace: float) -> str:
    kind = "zone" if "/" in name else "building"
    enough = "enough" if pace == 1 else f"OVERSUBSCRIBED: the ring goes at {pace:.0%} of the network's speed"
    return f"uplink of {kind} {name or '(no label)'}: {sending:,} of {gpus:,} GPUs send out, 1:{oversubscription:g}: {enough}"


def as_json(made: Plan, placed: Placement | None) -> dict[str, object]:
    return {
        "needs": asdict(made.needs),
        "chosen": asdict(made.chosen),
        "choices": [asdict(choice) for choice in made.choices],
        "progress_deadline_s": made.progress_deadline_s,
        "sensitivity": [{**asdict(swing), "swing": swing.size} for swing in made.swings],
        "placement": placed
        and {
            "ring": list(placed.ring),
            "replicas": {
                str(r): {"label": placed.labels[r], "seats": [asdict(seat) for seat in seats]}
                for r, seats in placed.seats.items()
            },
            "reserve": {name: free for name, free in placed.free.items() if free},
        },
    }
