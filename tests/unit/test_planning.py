"""What is recommended, and why; where replicas go, and whether the uplinks carry their ring."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from keepstep.cli import app
from keepstep.protocol.errors import ConfigError
from keepstep.protocol.ids import ReplicaId
from keepstep.protocol.placement import Host, place_replicas
from keepstep.scale import planning
from keepstep.scale.planning import Needs, make_plan
from keepstep.scale.topology_file import read_topology
from keepstep.scale.uplinks import exchange_s, hops, uplinks

QUICK: dict[str, Any] = {"seed": 0, "seeds": 1, "days": 5}

TWO_BUILDINGS = """
oversubscription_building = 4
[[zones]]
label = "b1/z1"
racks = 2
hosts_per_rack = 2
[[zones]]
label = "b2/z1"
racks = 2
hosts_per_rack = 2
[[hosts]]
name = "spare"
label = "b2/z2/r1"
gpus = 4
"""


def test_the_papers_job() -> None:
    made = make_plan(Needs(), **QUICK)
    ettr = {choice.replicas: choice.ettr.mean for choice in made.choices}
    assert ettr[1] < ettr[2] < ettr[4] < ettr[12]
    assert 10 <= made.chosen.replicas <= 24  # the paper: 10 to 20
    assert made.chosen.fits
    assert all(c.memory == pytest.approx(32e12 / c.ranks) for c in made.choices)
    assert made.swings[0].size == max(swing.size for swing in made.swings) > 0.01


def test_room_for_fewer_replicas_means_fewer() -> None:
    tight = make_plan(Needs(memory_for_state=2.1e9), **QUICK)
    assert tight.chosen.replicas == 6
    assert [c.fits for c in tight.choices if c.replicas > 6] == [False] * sum(c.replicas > 6 for c in tight.choices)
    with pytest.raises(ConfigError, match=r"0\.3 GB of state on each GPU, and there is room for 0\.1"):
        make_plan(Needs(memory_for_state=1e8), **QUICK)


@pytest.mark.parametrize("repair_s", [3600.0, 86_400.0])
def test_the_reserve_is_empty_once_in_a_hundred_failures(repair_s: float) -> None:
    """Counted in a queue of its own: a broken host comes back after a fixed time."""
    needs, rng = Needs(repair_s=repair_s), random.Random(0)
    count, share = planning.spares(needs), 1 - 109 / 678  # but for NCCL watchdog and software
    now, away, empty, failures = 0.0, list[float](), 0, 20_000
    for _ in range(failures):
        now += rng.expovariate(share / needs.mtbf_s)
        away = [back for back in away if back > now]
        if len(away) >= count:
            empty += 1
        away.append(now + repair_s)
    assert empty / failures < 0.02
    assert empty or count < 5


def test_spares_follow_the_failures() -> None:
    assert planning.spares(Needs(repair_s=0)) == 1
    assert planning.spares(Needs()) == pytest.approx(67 + 2.3 * 67**0.5, abs=3)
    assert planning.spares(Needs(repair_s=86_400 * 60)) > 60 * 60


def test_checkpoints_are_as_often_as_somebody_needs_them() -> None:
    needs = Needs()
    alone, many = (planning.checkpoint_steps(needs, planning.scenario(needs, r)) for r in (1, 12))
    assert alone == 15  # as fast as one can be written: 5 min
    assert many > alone
    rare = replace(needs, job_mtbf_s=needs.job_mtbf_s * 100)
    assert planning.checkpoint_steps(rare, planning.scenario(rare, 12)) == pytest.approx(10 * many, rel=0.05)


def test_deadlines_keep_within_what_the_engine_takes() -> None:
    assert [planning.progress_deadline(step) for step in (0.1, 10, 20, 100)] == [10, 20, 40, 60]


def test_bad_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match="whole number of hosts"):
        Needs(gpus=9)
    with pytest.raises(ConfigError, match="must be positive"):
        Needs(step_s=0)


# --- places --------------------------------------------------------------------------------------------------------


def test_the_papers_buildings_carry_its_ring() -> None:
    """Three replicas to a building, one of which sends to the next building: 1/3 of its GPUs, and 1/2.8 would do."""
    hosts = [Host(name=f"b{b}-{h}", label=f"b{b}/z/r{h}", slots=64) for b in range(4) for h in range(384)]
    placed = place_replicas(hosts, replicas=12, ranks=8192)
    found = {u.place: u for u in uplinks(placed, hosts, zone=2.8, building=2.8)}
    assert {(u.sending, u.gpus) for u in found.values()} == {(8192, 24_576)}
    assert all(u.pace == 1 for u in found.values())
    assert [t.cost for _, _, t in hops(placed, hosts)] == [7, 7, 30] * 4
    crossed = replace(placed, ring=tuple(ReplicaId(r) for i in range(3) for r in range(i, 12, 3)))
    slow = uplinks(crossed, hosts, zone=2.8, building=2.8)
    assert [u.pace for u in slow] == pytest.approx([1 / 2.8] * 8)  # every link leaves its building


def test_one_replica_has_no_ring() -> None:
    hosts = [Host(name="h", slots=8)]
    placed = place_replicas(hosts, replicas=1, ranks=8)
    assert hops(placed, hosts) == []
    assert [u.pace for u in uplinks(placed, hosts, zone=2.8, building=2.8)] == [1, 1]
    assert exchange_s(1e9, 1, 1e9) == 0
    assert exchange_s(1e9, 4, 1e9) == 1.5


def test_the_topology_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(TWO_BUILDINGS)
    found = read_topology(path)
    assert len(found.hosts) == 9
    assert found.slots == 8 * 8 + 4
    assert found.hosts[1] == Host(name="b1-z1-r1-h1", label="b1/z1/r1", slots=8)
    assert (found.oversubscription_zone, found.oversubscription_building) == (2.8, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names 0 hosts"),
        ("hosts = 3", "Expected `array`"),
        ('[[hosts]]\nname = "a"\nrack = 3', "unknown field `rack`"),
        ('[[zones]]\nlabel = "b/z"\nracks = 0\nhosts_per_rack = 1', "needs racks"),
        ('[[zones]]\nlabel = "b/z"\nracks = 1000000\nhosts_per_rack = 1000', "1,000,000 will do"),
        ('oversubscription_zone = 0.5\n[[hosts]]\nname = "a"', "1 or more"),
        ("[[hosts", "is not as it should be"),
    ],
)
def test_a_bad_topology_file_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_topology(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_topology(tmp_path / "none")


def test_the_command(tmp_path: Path) -> None:
    topology = tmp_path / "hosts.toml"
    topology.write_text(TWO_BUILDINGS)

    def run(name: str, *more: str) -> tuple[str, Any]:
        path = tmp_path / name / "plan.json"
        options = ["--gpus", "64", "--gpu-mtbf", "100", "--step-time", "1", "--state-bytes", "1e9", "--seeds", "1"]
        options += ["--days", "2", "--json", str(path), "--out", str(tmp_path / name), *more]
        result = CliRunner().invoke(app, ["plan", *options], catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout, json.loads(path.read_text())

    text, numbers = run("a", "--replicas", "4", "--topology", str(topology))
    assert (text, numbers) == run("b", "--replicas", "4", "--topology", str(topology))
    assert "64 GPUs, each failing every 100 h: a failure every 93.8 min" in text
    assert "ring        1 -> 2: other building, latency 30x" in text
    assert "uplink of building b1: 16 of 32 GPUs send out, 1:4: OVERSUBSCRIBED: the ring goes at 50%" in text
    assert numbers["placement"]["ring"] == [0, 1, 2, 3]
    assert numbers["placement"]["reserve"] == {"spare": 4}
    assert (tmp_path / "a" / "plan.png").stat().st_size > 1000
    assert numbers["chosen"]["replicas"] == 4
    assert "recommended" in run("c")[0]
