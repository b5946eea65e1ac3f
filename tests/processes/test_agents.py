"""A job on several hosts. What is lost comes up elsewhere; whoever comes back is a spare; nothing is trained twice."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest
from hosts import Hosts
from jobs import wait_until

from keepstep.observe.findings import Findings
from keepstep.observe.hosts import read_hosts, run_directories, together
from keepstep.observe.records import Run, read_run
from keepstep.observe.report import write_report
from keepstep.runtime.etcd import EtcdStore

TWO_OF_THREE = ("--replicas", "2", "--replace-after", "1")
LONG = ("--steps", "600", "--step-seconds", "0.05")
ENDLESS = ("--steps", "100000", "--step-seconds", "0.05")


def begun(hosts: Hosts, replicas: int = 2) -> dict[int, int]:
    """All train; which host keeps which replica."""
    hosts.until(lambda: all(hosts.step(replica) >= 5 for replica in range(replicas)), 120)
    return hosts.places()


def lives(hosts: Hosts, replica: int) -> int:
    return len(hosts.of("spawn", replica=replica))


def test_a_lost_host_is_replaced_by_a_spare_one(tmp_path: Path) -> None:
    """kill -9 of an agent, and with it of its ranks. The spare host has processes ready, and no replica: they take over."""
    options = (*TWO_OF_THREE, "--spares", "1")
    with Hosts(tmp_path, 3, *options, args=("--steps", "400", "--step-seconds", "0.05", "--plain")) as hosts:
        places = begun(hosts)
        (spare,) = {0, 1, 2} - set(places.values())
        warm = hosts.warm(spare)
        hosts.lose(places[1])
        hosts.trains(1)
        assert hosts.places() == {0: places[0], 1: spare}
        assert hosts.of("spawn", replica=1)[-1]["pids"] == warm
        assert hosts.of("entered", replica=1, rank=0)[-1]["spare"]
        result = hosts.finish(2)
    assert [e["life"] for e in result.of("spawn") if e["replica"] == 1] == [1, 2]
    assert [e["life"] for e in result.of("spawn") if e["replica"] == 0] == [1]
    check_the_report(hosts)


def check_the_report(hosts: Hosts) -> None:
    """One over all hosts. Were their clocks not one, the offset would be found as exactly as the report says."""
    directories = run_directories([hosts.run_dir])
    assert [directory.name for directory in directories] == ["h0-1", "h1-1", "h2-1"]
    run, (clock,) = read_hosts(directories)
    assert clock.names == ("h0-1", "h1-1", "h2-1"), "they ran under one kernel"
    (incident,) = Findings.of(run).incidents
    assert (incident.replica, incident.cause) == (1, "it went away")
    assert incident.worker is not None
    goodput = Findings.of(run).goodput
    assert [sum(goodput.totals(slot).values()) for slot in goodput.slots] == [goodput.elapsed] * 2
    apart = {}
    for n, directory in enumerate(directories):
        own = read_run(directory)
        apart[directory.name] = Run(events=tuple({**e, "mono": e["mono"] - 1000 * n, "boot": None} for e in own.events))
    _, clocks = together(apart)
    first = int(clocks[0].names[0][1])
    for clock in clocks[1:]:
        off = abs(clock.shift_s - 1000 * (int(clock.names[0][1]) - first))
        assert clock.decisions > 50
        assert clock.certain_s is not None
        assert off <= clock.certain_s, clock
    assert "the clock of this report" in write_report(hosts.run_dir).read_text()


@pytest.mark.faults
@pytest.mark.timeout(480)
def test_hosts_are_lost_one_after_the_other_and_come_back(tmp_path: Path) -> None:
    """Each in a network of its own, replicas of two ranks. The one that came back is the spare for the next, with warm ranks."""
    options = (*TWO_OF_THREE, "--ranks-per-replica", "2", "--spares", "1")
    with Hosts(tmp_path, 3, *options, slots=2, apart=True, args=LONG) as hosts:
        places = begun(hosts)
        (spare,) = {0, 1, 2} - set(places.values())
        hosts.lose(places[1])
        hosts.trains(1)
        hosts.start(places[1])
        hosts.until(lambda: "in the pool" in {h["doing"] for h in hosts.status()["hosts"] if not h["replicas"]})
        assert hosts.places() == {0: places[0], 1: spare}, "nobody moves because a host is back"
        warm = hosts.warm(places[1])
        hosts.lose(places[0])
        hosts.trains(0)
        assert hosts.of("spawn", replica=0)[-1]["pids"] == warm
        assert hosts.places() == {0: places[1], 1: spare}
        hosts.finish(2)


@pytest.mark.faults
@pytest.mark.timeout(480)
def test_the_restart_budget_goes_with_a_replica_to_another_host(tmp_path: Path) -> None:
    """A rank is killed, its host lost, a rank of the next host killed: once too often. Asked back, it begins anew."""
    fault = "kill replica=1 rank=0 step=10 phase=in_exchange"
    options = (*TWO_OF_THREE, "--max-restarts", "2", "--fault", fault)
    with Hosts(tmp_path, 3, *options, args=ENDLESS) as hosts:
        places = begun(hosts)
        (spare,) = {0, 1, 2} - set(places.values())
        hosts.until(lambda: lives(hosts, 1) == 2)
        hosts.trains(1)
        hosts.lose(places[1])
        hosts.trains(1)
        assert lives(hosts, 1) == 3
        hosts.ranks(spare, 1)[0].kill()
        (given_up,) = hosts.until(lambda: hosts.of("gave_up", replica=1))
        assert "it has been restarted 2 times in 3600 s (--max-restarts, --restart-window)" in given_up["reason"]
        assert "2 of 3 failures said: " in given_up["reason"]
        code, said = hosts.keepstep("add", 1)
        assert code == 0, said
        hosts.trains(1)
        hosts.ranks(spare, 1)[0].kill()
        hosts.until(lambda: lives(hosts, 1) == 5)
        hosts.trains(1)


@pytest.mark.faults
@pytest.mark.timeout(480)
@pytest.mark.parametrize("how", ["cut", "black_hole"])
def test_a_host_that_is_cut_off_is_replaced_and_comes_back_as_a_spare(tmp_path: Path, how: str) -> None:
    """Its ranks live on alone, and train nothing; they end when they hear of the life that took their place."""
    options = (*TWO_OF_THREE, "--ranks-per-replica", "2")
    with Hosts(tmp_path, 3, *options, slots=2, apart=True, args=LONG) as hosts:
        places = begun(hosts)
        (spare,) = {0, 1, 2} - set(places.values())
        away = places[1]
        replica = 1
        if away == 0:  # the commands are given there
            away, replica = places[0], 0
        assert hosts.network is not None
        getattr(hosts.network, how)(away)
        hosts.until(lambda: lives(hosts, replica) == 2)
        hosts.trains(replica)
        assert hosts.ranks(away), "nobody has ended them"
        old = hosts.of("spawn", replica=replica)[0]["incarnation"]
        alone = max(e["mono"] for e in hosts.of("commit", incarnation=old))
        hosts.network.mend(away)
        hosts.until(lambda: not hosts.ranks(away))
        assert max(e["mono"] for e in hosts.of("commit", incarnation=old)) == alone, "it trained without the others"
        assert hosts.places() == {replica: spare, 1 - replica: places[1 - replica]}
        assert {h["host"]: h["doing"] for h in hosts.status()["hosts"]}[f"h{away}"] == "in the pool"
        result = hosts.finish(2)
    assert lives(hosts, replica) == 2, "the host that was cut off starts nothing that is not its own any more"
    assert len({m["incarnation"] for d in result.committed() for m in d["members"] if m["replica"] == replica}) == 2


@pytest.mark.faults
@pytest.mark.timeout(480)
def test_an_agent_that_is_started_again_has_its_replicas_back_at_once(tmp_path: Path) -> None:
    """Its ranks have died with it, so there is nothing to adopt: they begin again on the same host, though another has room."""
    with Hosts(tmp_path, 3, "--replicas", "2", "--replace-after", "120", args=LONG) as hosts:
        places = begun(hosts)
        hosts.lose(places[1])
        hosts.start(places[1])
        hosts.trains(1)
        assert hosts.places() == places
        hosts.finish(2)


@pytest.mark.faults
@pytest.mark.timeout(480)
def test_a_frozen_agent_is_replaced_while_its_ranks_live(tmp_path: Path) -> None:
    """Nobody restarts what it keeps. Its ranks hear of it from the store, and end without it; thawed, it is a spare."""
    with Hosts(tmp_path, 3, *TWO_OF_THREE, args=LONG) as hosts:
        places = begun(hosts)
        (spare,) = {0, 1, 2} - set(places.values())
        frozen = hosts.agents[places[1]]
        frozen.send_signal(signal.SIGSTOP)
        try:
            hosts.until(lambda: lives(hosts, 1) == 2)
            hosts.until(lambda: not hosts.ranks(places[1]))
            hosts.trains(1)
        finally:
            frozen.send_signal(signal.SIGCONT)
        assert hosts.places() == {0: places[0], 1: spare}
        hosts.until(lambda: any(h["host"] == f"h{places[1]}" and h["slots"] for h in hosts.status()["hosts"]))
        hosts.finish(2)
    assert lives(hosts, 1) == 2


@pytest.mark.faults
@pytest.mark.timeout(480)
def test_a_host_is_drained_and_the_job_stops(tmp_path: Path) -> None:
    with Hosts(tmp_path, 3, *TWO_OF_THREE, args=ENDLESS) as hosts:
        places = begun(hosts)
        (spare,) = {0, 1, 2} - set(places.values())
        name = f"h{places[1]}"
        code, said = hosts.keepstep("drain", name)
        assert code == 0, said
        assert said.splitlines()[-1] == f"keepstep: host {name} keeps nothing any more: replica 1 on h{spare}"
        hosts.trains(1)
        assert {h["host"]: h["doing"] for h in hosts.status()["hosts"]}[name] == "drained"
        code, said = hosts.keepstep("drain", f"h{spare}")
        assert code == 0, said
        assert "no other host has room for replica 1" in said
        code, said = hosts.keepstep("add", name)
        assert (code, said) == (0, f"keepstep: host {name} may keep replicas again\n")
        hosts.trains(1)
        assert hosts.places() == places
        assert {e["code"] for e in hosts.of("exit")} == {0}, "nobody was killed"
        code, said = hosts.keepstep("drain", "h9")
        assert code == 78
        assert "the job has no host h9: name one of h0, h1, h2" in said
        code, said = hosts.keepstep("stop")
        assert code == 0, said
        wait_until(lambda: all(agent.poll() is not None for agent in hosts.agents.values()))
        assert {agent.returncode for agent in hosts.agents.values()} == {0}
        last = [e for e in hosts.of("left") if e["step"] == hosts.step() + 1]
        assert {e["replica"] for e in last} == {0, 1}
        assert len({e["digest"] for e in last}) == 1
    assert "the job was stopped, as it was asked to, and is not complete" in hosts.log(0)


@pytest.mark.faults
@pytest.mark.timeout(480)
@pytest.mark.parametrize("store_too", [False, True], ids=["agents", "agents and the store"])
def test_every_agent_is_killed_and_the_job_goes_on_from_its_checkpoint(tmp_path: Path, store_too: bool) -> None:
    """Also if the store is lost with its data: the checkpoint is all that is needed."""
    options = (*TWO_OF_THREE, "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "20")
    with Hosts(tmp_path, 2, *options, args=("--steps", "200", "--step-seconds", "0.05")) as hosts:
        begun(hosts)
        hosts.until(lambda: hosts.step() >= 50)
        for host in (0, 1):
            hosts.lose(host)
        before = hosts.step()
        if store_too:
            hosts.lose_store()
        for host in (0, 1):
            hosts.start(host)
        hosts.until(lambda: hosts.step() > before + 5)
        wait_until(lambda: all(agent.poll() is not None for agent in hosts.agents.values()), 120)
        assert {agent.returncode for agent in hosts.agents.values()} == {0}
        final = hosts.of("final", rank=0)
        assert {e["step"] for e in final} == {200}
        assert len({e["digest"] for e in final}) == 1
        restored = [d for d in hosts.of("decision") if d["restore"]]
        assert restored, "it began anew"


@pytest.mark.faults
def test_a_replica_is_drained_while_its_host_is_lost(tmp_path: Path) -> None:
    """Its next place and the request come to the agent at once: what became of it must not be forgotten with the claim."""
    options = ("--replicas", "2", "--replace-after", "8")
    with Hosts(tmp_path, 3, *options, args=("--steps", "300", "--step-seconds", "0.05")) as hosts:
        places = begun(hosts)
        hosts.lose(places[1])
        code, said = hosts.keepstep("drain", 1, "--wait", "60")
        assert code == 0, said
        hosts.trains(0)
        assert lives(hosts, 1) == 1, "it was started again"
        wait_until(lambda: all(agent.poll() is not None for agent in hosts.agents.values()), 120)
        assert {agent.returncode for agent in hosts.agents.values()} == {0}
    assert {e["step"] for e in hosts.of("final", replica=0)} == {300}


@pytest.mark.faults
def test_an_agent_is_started_again_while_the_job_ends(tmp_path: Path) -> None:
    """What it kept has died with the agent before, and nobody is seated any more: nobody waits for it."""
    with Hosts(tmp_path, 2, "--replicas", "2", args=ENDLESS) as hosts:
        places = begun(hosts)
        for rank in hosts.ranks(places[1]):
            rank.suspend()  # so that it has not left yet
        hosts.keepstep("stop", "--wait", "1")
        hosts.until(lambda: hosts.of("left", replica=0))
        hosts.lose(places[1])
        hosts.start(places[1])
        wait_until(lambda: all(agent.poll() is not None for agent in hosts.agents.values()), 120)
        assert {agent.returncode for agent in hosts.agents.values()} == {0}
    assert lives(hosts, 1) == 1


@pytest.mark.faults
def test_the_store_loses_what_the_job_runs(tmp_path: Path) -> None:
    """All agents end, with a sentence, and nothing of theirs lives on."""

    async def forget(url: str) -> None:
        store = await EtcdStore.open(url, "test")
        await store.call(store.client.delete_prefix(b"keepstep/test/"))
        await store.close()

    with Hosts(tmp_path, 2, "--replicas", "2", args=ENDLESS) as hosts:
        begun(hosts)
        asyncio.run(forget(hosts.url))
        wait_until(lambda: all(agent.poll() is not None for agent in hosts.agents.values()))
        assert {agent.returncode for agent in hosts.agents.values()} == {1}
        assert not hosts.ranks(0)
        assert not hosts.ranks(1)
        for host in (0, 1):
            assert hosts.log(host).count("the store has lost what job test runs") == 1


def test_an_agent_that_still_enters_obeys_a_signal(tmp_path: Path) -> None:
    """It waits for the lease of the agent before it, and must not come into the pool afterwards."""
    with Hosts(tmp_path, 1, "--replicas", "2") as hosts:
        hosts.until(lambda: "waiting: replicas 0 and 1" in hosts.log(0))
        first = hosts.agents[0]
        hosts.start(0)
        wait_until(lambda: "an agent of this host was there just now" in hosts.log(0))
        hosts.agents[0].send_signal(signal.SIGTERM)
        assert hosts.agents[0].wait(30) == 128 + signal.SIGTERM
        first.kill()
        first.wait()


def test_an_agent_that_does_not_fit_says_so_in_one_sentence(tmp_path: Path) -> None:
    def agent(hosts: Hosts, *options: str, **env: str) -> tuple[int, str]:
        done = subprocess.run(
            hosts.command(7, *options), capture_output=True, text=True, timeout=100, check=False,
            env={**hosts.environment(), **env},
        )  # fmt: skip
        return done.returncode, done.stderr

    with Hosts(tmp_path, 0, "--replicas", "2", "--ranks-per-replica", "2", slots=2, args=("--steps", "5")) as hosts:
        code, said = agent(hosts, "--slots", "1")
        assert code == 78
        assert said.startswith(
            "keepstep: --slots 1 has no room for a replica of 2 ranks, and agents keep each replica "
        )
        code, said = agent(hosts, "--labels", "row=3")
        assert (code, said) == (78, "keepstep: --labels must look like building=b1,zone=z1,rack=r1, got 'row=3'\n")
        code, said = agent(hosts, "--host", "12")
        assert code == 78
        assert "a host's name must be one word" in said
        for address in ("192.0.2.1", "0.0.0.0"):
            code, said = agent(hosts, "--host-address", address)
            assert code == 78
            assert said.startswith(f"keepstep: --host-address {address} is none of this host's: ")
        code, said = agent(hosts, KEEPSTEP_TOKEN="")
        assert code == 78
        assert "set KEEPSTEP_TOKEN or --token-file to the job's secret" in said
        assert not any(hosts.run_dir.iterdir()), "something was left behind"
        hosts.start(0)
        wait_until(lambda: "waiting: replicas 0 and 1 of 2 ranks" in hosts.log(0))
        code, said = agent(hosts, "--replicas", "3")
        assert code == 78
        assert said.startswith("keepstep: the agents of job test run something else, replicas is 2 there, 3 here: ")
        code, said = agent(hosts, "--straggler", "9")
        assert code == 78
        assert "the agents of job test run something else, straggler s is None there, 9.0 here: " in said
        code, said = agent(hosts, KEEPSTEP_JOIN_WAIT_S="0.5")
        assert code == 78
        assert "join wait s is None there, 0.5 here: " in said, "the environment of its ranks counts too"
        code, said = agent(hosts, KEEPSTEP_SLOW_FLOOR_S="soon")
        assert (code, said) == (78, "keepstep: KEEPSTEP_SLOW_FLOOR_S must be a number, got 'soon'\n")
        code, said = agent(hosts, KEEPSTEP_TOKEN="another")
        assert code == 78
        assert "the job token differs" in said
        assert [path.name for path in hosts.run_dir.iterdir()] == ["h0-1"]
        os.kill(hosts.agents[0].pid, signal.SIGTERM)
        assert hosts.agents[0].wait(60) == 128 + signal.SIGTERM
        assert "the agent was ended by SIGTERM" in hosts.log(0)
