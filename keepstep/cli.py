"""The command line: `keepstep run`, `agent`, `status`, `report`, `drain`, `add`, `stop`, `simulate`, `plan`, `scale quorum`,
`shadow`, `demo`, `version`.

Thin: options to settings, errors to one sentence on stderr and exit code 78. What a command needs is imported when it runs, so
that `keepstep --help` is quick.
"""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from keepstep.demo import demo
from keepstep.protocol.errors import EX_CONFIG, ConfigError, StoreError
from keepstep.version import __version__

app = typer.Typer(
    help="Fault-tolerant hybrid-sharded data-parallel training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
scale = typer.Typer(help="Measure the control plane with more ranks than fit on this machine.", no_args_is_help=True)
app.add_typer(scale, name="scale")

# Options that several commands have.
Args = Annotated[list[str] | None, typer.Argument(help="its own arguments, after --")]
Replicas = Annotated[int, typer.Option(help="copies of the model, the units of failure")]
RanksPerReplica = Annotated[int, typer.Option(help="processes that share one copy")]
NewRunDir = Annotated[Path | None, typer.Option(help="where logs and events go [default: runs/SCRIPT-TIME]")]
MinReplicas = Annotated[int, typer.Option(help="wait when fewer could train")]
Spares = Annotated[int, typer.Option(help="warm replicas on this machine that wait in keepstep.join() to take over")]
JoinWait = Annotated[
    float | None, typer.Option(help="seconds that a step waits for a replica that is started again [default: 0]")
]
Straggler = Annotated[
    float | None, typer.Option(help="seconds until a replica that lives and does not go on is given up [default: 60]")
]
SlowFloor = Annotated[
    float | None, typer.Option(help="seconds beyond twice a step in which no progress is normal [default: 1]")
]
SlowCeiling = Annotated[
    float | None,
    typer.Option(help="seconds after which no step is normal; a first one may take as long [default: 300]"),
]
MaxRestarts = Annotated[int, typer.Option(help="of one replica, on whatever host, within --restart-window")]
RestartWindow = Annotated[float, typer.Option(help="seconds")]
FinishGrace = Annotated[float, typer.Option(help="seconds for the rest to end, once one has")]
CheckpointDir = Annotated[
    Path | None, typer.Option(help="save states here and go on from the newest; all replicas must reach it")
]
CheckpointEvery = Annotated[int, typer.Option(help="steps between two checkpoints")]
KeepCheckpoints = Annotated[int, typer.Option(help="how many complete ones are kept")]
FaultText = Annotated[
    list[str] | None,
    typer.Option(help='rehearse a failure: "kill replica=1 rank=0 step=5 phase=in_exchange"; may be repeated'),
]
RunDir = Annotated[Path | None, typer.Argument(help="the --run-dir of a run on this machine")]
Store = Annotated[str | None, typer.Option(help="instead: etcd://HOST:PORT[,HOST:PORT...] of the job's store")]
JobName = Annotated[str | None, typer.Option(help="with --store: the job's name")]
TokenFile = Annotated[
    Path | None, typer.Option(help="file with the job's secret [default: the run's own, or KEEPSTEP_TOKEN]")
]
WaitS = Annotated[float, typer.Option(help="seconds to wait for it; the request stands after that, too")]


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="the training script")],
    args: Args = None,
    replicas: Replicas = 2,
    ranks_per_replica: RanksPerReplica = 1,
    run_dir: NewRunDir = None,
    job: Annotated[str | None, typer.Option(help="the job's name in the store [default: made up]")] = None,
    store: Annotated[
        str | None, typer.Option(help="etcd://HOST:PORT[,HOST:PORT...] of an etcd to use [default: start one]")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="file with the job's secret [default: made up]")] = None,
    min_replicas: MinReplicas = 1,
    spares: Spares = 0,
    join_wait: JoinWait = None,
    straggler: Straggler = None,
    slow_floor: SlowFloor = None,
    slow_ceiling: SlowCeiling = None,
    max_restarts: MaxRestarts = 20,
    restart_window: RestartWindow = 3600.0,
    finish_grace: FinishGrace = 30.0,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = 100,
    keep_checkpoints: KeepCheckpoints = 3,
    fault: FaultText = None,
) -> None:
    """Train SCRIPT on this machine; restart whatever replica dies."""
    from keepstep.launch.launcher import launch
    from keepstep.launch.settings import LaunchSettings

    settings = LaunchSettings.checked(
        script,
        _own(args),
        replicas=replicas,
        ranks=ranks_per_replica,
        run_dir=run_dir,
        job=job,
        store=store,
        token_file=token_file,
        min_replicas=min_replicas,
        spares=spares,
        join_wait_s=join_wait,
        straggler_s=straggler,
        slow_floor_s=slow_floor,
        slow_ceiling_s=slow_ceiling,
        max_restarts=max_restarts,
        restart_window_s=restart_window,
        finish_grace_s=finish_grace,
        faults=tuple(fault or ()),
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
    )
    raise typer.Exit(launch(settings))


@app.command(context_settings={"allow_interspersed_args": False})
def agent(
    script: Annotated[Path, typer.Argument(help="the training script, at the same path on every host")],
    store: Annotated[str, typer.Option(help="etcd://HOST:PORT[,HOST:PORT...] of the job's store")],
    job: Annotated[str, typer.Option(help="the job's name in the store")],
    slots: Annotated[int, typer.Option(help="ranks that this host has room for")],
    args: Args = None,
    replicas: Replicas = 2,
    ranks_per_replica: Annotated[int, typer.Option(help="processes that share one copy, on one host")] = 1,
    host: Annotated[str | None, typer.Option(help="what this host is called [default: its hostname]")] = None,
    host_address: Annotated[
        str | None, typer.Option(help="where the others reach it [default: its address towards the store]")
    ] = None,
    labels: Annotated[str, typer.Option(help="where it stands: building=b1,zone=z1,rack=r1")] = "",
    run_dir: Annotated[Path | None, typer.Option(help="logs and events go below it [default: runs/JOB]")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="file with the job's secret [default: KEEPSTEP_TOKEN]")
    ] = None,
    min_replicas: MinReplicas = 1,
    spares: Spares = 0,
    replace_after: Annotated[
        float, typer.Option(help="seconds that a host may be gone before its replicas go to other hosts")
    ] = 10.0,
    join_wait: JoinWait = None,
    straggler: Straggler = None,
    slow_floor: SlowFloor = None,
    slow_ceiling: SlowCeiling = None,
    max_restarts: MaxRestarts = 20,
    restart_window: RestartWindow = 3600.0,
    finish_grace: FinishGrace = 30.0,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = 100,
    keep_checkpoints: KeepCheckpoints = 3,
    fault: FaultText = None,
) -> None:
    """Train SCRIPT on several hosts: the same command on each. Replicas of a host that is lost go to another one."""
    from keepstep.launch.agent import keep
    from keepstep.launch.agent_settings import AgentSettings

    settings = AgentSettings.checked(
        script,
        _own(args),
        store=store,
        job=job,
        slots=slots,
        replicas=replicas,
        ranks=ranks_per_replica,
        host=host,
        address=host_address,
        labels=labels,
        run_dir=run_dir,
        token_file=token_file,
        min_replicas=min_replicas,
        spares=spares,
        replace_after_s=replace_after,
        join_wait_s=join_wait,
        straggler_s=straggler,
        slow_floor_s=slow_floor,
        slow_ceiling_s=slow_ceiling,
        max_restarts=max_restarts,
        restart_window_s=restart_window,
        finish_grace_s=finish_grace,
        faults=tuple(fault or ()),
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
    )
    raise typer.Exit(keep(settings))


def _own(args: list[str] | None) -> tuple[str, ...]:
    """The script's arguments, without the -- before them."""
    return tuple(args[1:] if args[:1] == ["--"] else args) if args else ()


@app.command(context_settings={"allow_interspersed_args": False})
def shadow(
    script: Annotated[Path, typer.Argument(help="the training script, unchanged")],
    args: Args = None,
    replicas: Replicas = 2,
    ranks_per_replica: RanksPerReplica = 1,
    step_s: Annotated[float | None, typer.Option(help="seconds that a step computes [default: 0]")] = None,
    step_like: Annotated[
        Path | None, typer.Option(help="instead: as long as in this real run, by its run directory")
    ] = None,
    state_fraction: Annotated[float, typer.Option(help="of the true bytes that move and are saved")] = 0.001,
    run_dir: NewRunDir = None,
    min_replicas: MinReplicas = 1,
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = 100,
    fault: FaultText = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write what it took here")] = None,
) -> None:
    """Rehearse SCRIPT without devices: everything real but the computing, on shapes. See docs/scale.md."""
    from keepstep.launch.settings import LaunchSettings
    from keepstep.shadow.run import run_shadow, step_of
    from keepstep.shadow.settings import ShadowSettings

    if step_s is not None and step_like is not None:
        raise ConfigError("name either --step-s or --step-like: both say how long a step takes")
    takes = step_s or 0.0 if step_like is None else step_of(step_like)
    shadow_settings = ShadowSettings(step_s=takes, state_fraction=state_fraction)
    settings = LaunchSettings.checked(
        script,
        _own(args),
        replicas=replicas,
        ranks=ranks_per_replica,
        run_dir=run_dir,
        min_replicas=min_replicas,
        faults=tuple(fault or ()),
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
    )
    raise typer.Exit(run_shadow(settings, shadow_settings, json_file))


@app.command()
def drain(
    what: Annotated[str, typer.Argument(metavar="REPLICA|HOST", help="the number of a replica, or a host's name")],
    run_dir: RunDir = None,
    store: Store = None,
    job: JobName = None,
    token_file: TokenFile = None,
    wait: WaitS = 300.0,
) -> None:
    """Let a replica, or all of a host, leave at a step boundary: for maintenance. `keepstep add` brings it back."""
    from keepstep.launch import operate

    target = operate.find(run_dir, store, job, token_file)
    if what.isdigit():
        raise typer.Exit(operate.drain(target, int(what), wait_s=wait))
    raise typer.Exit(operate.drain_host(target, what, wait_s=wait))


@app.command()
def add(
    what: Annotated[str, typer.Argument(metavar="REPLICA|HOST", help="the number of a replica, or a host's name")],
    run_dir: RunDir = None,
    store: Store = None,
    job: JobName = None,
    token_file: TokenFile = None,
    wait: WaitS = 300.0,
) -> None:
    """Bring a replica back that was drained or given up; let a drained host keep replicas again."""
    from keepstep.launch import operate

    target = operate.find(run_dir, store, job, token_file)
    if what.isdigit():
        raise typer.Exit(operate.add(target, int(what), wait_s=wait))
    raise typer.Exit(operate.add_host(target, what, wait_s=wait))


@app.command()
def stop(
    run_dir: RunDir = None,
    store: Store = None,
    job: JobName = None,
    token_file: TokenFile = None,
    wait: WaitS = 300.0,
) -> None:
    """Let every replica leave at the same step boundary, and end the job."""
    from keepstep.launch import operate

    raise typer.Exit(operate.stop(operate.find(run_dir, store, job, token_file), wait_s=wait))


@app.command()
def status(
    run_dir: RunDir = None,
    store: Store = None,
    job: JobName = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="as metrics, for a textfile collector")] = False,
) -> None:
    """Say how a job does: members, step, roles, ETTR, the last failures."""
    from keepstep.observe import status as found

    if (run_dir is None) == (store is None) or (store is None) != (job is None):
        raise ConfigError("name either the run directory, or --store and --job")
    if store is not None and job is not None:
        logging.getLogger("keepstep").setLevel(logging.ERROR)  # one sentence at the end will do
        now = found.of_store(store, job)
    else:
        assert run_dir is not None
        now = found.of_run_dir(run_dir)
    if as_json:
        typer.echo(json.dumps(now.as_json()))
    elif prometheus:
        typer.echo(found.for_prometheus(now), nl=False)
    else:
        typer.echo(found.in_words(now))


@app.command()
def report(
    run_dir: Annotated[
        list[Path],
        typer.Argument(
            help="the --run-dir of a run, which may still go on; of a job's agents, or the directory of each host"
        ),
    ],
) -> None:
    """Write RUN_DIR/report.html: where the time went, every failure, ETTR. Of several hosts, one report over all."""
    from keepstep.observe.report import write_report

    typer.echo(write_report(*run_dir))


@app.command()
def simulate(
    gpus: Annotated[int, typer.Option(help="GPUs that train [default: the paper's]")] = 98_304,
    replicas: Annotated[int, typer.Option(help="replicas they are divided into")] = 12,
    mtbf: Annotated[
        float | None, typer.Option(help="seconds between failures of all GPUs [default: 18 min at 98,304 GPUs]")
    ] = None,
    step_time: Annotated[float, typer.Option(help="seconds of a step")] = 20.0,
    seed: Annotated[int, typer.Option(help="of the first run")] = 0,
    seeds: Annotated[int, typer.Option(help="runs of each row")] = 5,
    days: Annotated[float, typer.Option(help="simulated, of each run")] = 30.0,
    sizes: Annotated[bool, typer.Option("--sizes", help="also from 16K to 128K GPUs")] = False,
    assumptions: Annotated[bool, typer.Option("--assumptions", help="only print what is assumed, and why")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
    out: Annotated[Path | None, typer.Option(help="write pictures here")] = None,
) -> None:
    """Simulate months of failures: the paper's 44% and 80%, then keepstep, one mechanism at a time."""
    from keepstep.scale.ladder import Job
    from keepstep.scale.simulate import assumptions as told
    from keepstep.scale.simulate import simulate as run_it

    if assumptions:
        typer.echo("\n".join(told()))
        return
    job = Job(gpus=gpus, replicas=replicas, mtbf_s=mtbf, step_s=step_time)
    typer.echo(run_it(job, seed=seed, seeds=seeds, days=days, sizes=sizes, json_file=json_file, out=out))


@app.command()
def plan(
    gpus: Annotated[int, typer.Option(help="GPUs that train; spares come on top")] = 98_304,
    gpu_mtbf: Annotated[
        float | None, typer.Option(help="hours between failures of one GPU [default: the paper's]")
    ] = None,
    step_time: Annotated[float, typer.Option(help="seconds of a step")] = 20.0,
    state_bytes: Annotated[
        float | None, typer.Option(help="of one replica: weights, optimizer, gradients [default: 2e12 parameters x 16]")
    ] = None,
    memory_for_state: Annotated[float, typer.Option(help="bytes of each GPU that the state may take")] = 8e9,
    replicas: Annotated[int | None, typer.Option(help="what it must be [default: recommend it]")] = None,
    topology: Annotated[Path | None, typer.Option(help="file of hosts: print where each replica goes")] = None,
    gpus_per_host: Annotated[int, typer.Option(help="GPUs of a host")] = 8,
    repair_hours: Annotated[float, typer.Option(help="until a broken host is back")] = 24.0,
    seed: Annotated[int, typer.Option(help="of the first run")] = 0,
    seeds: Annotated[int, typer.Option(help="runs of each choice")] = 5,
    days: Annotated[float, typer.Option(help="simulated, of each run")] = 30.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
    out: Annotated[Path | None, typer.Option(help="write the picture here")] = None,
) -> None:
    """Recommend replicas, spares, checkpoint interval and deadlines for a job; and place them."""
    from keepstep.scale.plan import plan as make_it
    from keepstep.scale.planning import Needs

    needs = Needs(gpus=gpus, step_s=step_time, memory_for_state=memory_for_state, gpus_per_host=gpus_per_host)
    needs = replace(needs, repair_s=repair_hours * 3600)
    if gpu_mtbf is not None:
        needs = replace(needs, gpu_mtbf_s=gpu_mtbf * 3600)
    if state_bytes is not None:
        needs = replace(needs, state_bytes=state_bytes)
    told = make_it(
        needs, replicas=replicas, topology=topology, seed=seed, seeds=seeds, days=days, json_file=json_file, out=out
    )
    typer.echo(told)


@scale.command("quorum")
def scale_quorum(
    replicas: Annotated[int, typer.Option(help="replicas, each a process here")] = 12,
    ranks: Annotated[int, typer.Option(help="ranks of a replica")] = 8192,
    ranks_per_host: Annotated[int, typer.Option(help="ranks that share a host, and a socket here")] = 8,
    rounds: Annotated[int, typer.Option(help="rounds of each kind")] = 20,
    fan_out: Annotated[int, typer.Option(help="hosts below a host in the control tree")] = 32,
    sockets: Annotated[bool, typer.Option("--sockets", help="a socket for each rank")] = False,
    machines: Annotated[bool, typer.Option("--machines", help="also run each rank's state machine")] = False,
    curve: Annotated[bool, typer.Option("--curve", help="also with fewer ranks, and one replica alone")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
    out: Annotated[Path | None, typer.Option(help="write the picture here")] = None,
) -> None:
    """Measure how long a decision takes with many ranks: steady, one replica lost, one back."""
    from keepstep.scale.quorum import Settings
    from keepstep.scale.quorum_table import quorum

    settings = Settings(
        replicas=replicas, ranks=ranks, ranks_per_host=ranks_per_host, fan_out=fan_out, rounds=rounds, sockets=sockets,
        machines=machines,
    )  # fmt: skip
    typer.echo(quorum(settings, curve=curve, json_file=json_file, out=out, say=typer.echo))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """The console script."""
    try:
        app()
    except (ConfigError, StoreError) as error:
        print(f"keepstep: {error}", file=sys.stderr)
        sys.exit(EX_CONFIG)
