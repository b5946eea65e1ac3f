"""The files for SLURM and Kubernetes: their syntax, and the command lines that come out of them, read by the real parser."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from keepstep.cli import _own, app

EXAMPLES = Path(__file__).parents[2] / "examples"
SBATCH = EXAMPLES / "slurm.sbatch"


def parsed(command: list[str]) -> dict[str, Any]:
    """The options of a `keepstep agent` command line, as the real parser takes them."""
    assert command[:2] == ["keepstep", "agent"]
    group: Any = typer.main.get_command(app)
    with group.commands["agent"].make_context("keepstep agent", command[2:]) as context:
        params: dict[str, Any] = context.params
    return {**params, "args": list(_own(params["args"]))}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """srun runs its command once, as on one node; keepstep says what it was called with."""
    tools = tmp_path / "bin"
    tools.mkdir()
    write = "import json, sys; json.dump(sys.argv[1:], open(sys.argv[1], 'w'))"
    (tools / "srun").write_text(
        f'#!/bin/bash\npython3 -c "{write}" "{tmp_path}/srun.json" "$@"\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
    )
    (tools / "keepstep").write_text(f'#!/bin/bash\npython3 -c "{write}" "{tmp_path}/keepstep.json" "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "KEEPSTEP_STORE": "etcd://a:2379,b:2379",
        "SLURM_JOB_NAME": "keepstep",
        "SLURM_JOB_ID": "17",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURMD_NODENAME": "node3",
        "SLURM_TOPOLOGY_ADDR": "root.s2.node3",
    }


SBATCH_OPTIONS = {  # of sbatch's manual: those that the file uses, and what they take
    "job-name": r"=\w+", "nodes": r"=\d+", "ntasks-per-node": r"=\d+", "cpus-per-task": r"=\d+", "no-kill": r"(=off)?",
    "time": r"=(\d+-)?\d+:\d\d:\d\d",
}  # fmt: skip


def test_slurm_takes_the_options_of_the_batch_file() -> None:
    """To bash they are comments."""
    options = re.findall(r"^#SBATCH (.*)$", SBATCH.read_text(), re.MULTILINE)
    assert len(options) == len(SBATCH_OPTIONS)
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        assert re.fullmatch(f"--{name}{SBATCH_OPTIONS[name]}", option), option


def test_slurm(cluster: dict[str, str], tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", SBATCH], check=False).returncode == 0
    subprocess.run(["bash", SBATCH, "train me.py", "--lr", "1 2"], env=cluster, check=True, timeout=60)
    srun = json.loads((tmp_path / "srun.json").read_text())
    assert "--kill-on-bad-exit=0" in srun
    got = parsed(["keepstep", *json.loads((tmp_path / "keepstep.json").read_text())[1:]])
    assert (got["script"], got["args"]) == (Path("train me.py"), ["--lr", "1 2"])
    assert (got["store"], got["job"], got["host"], got["labels"]) == (
        "etcd://a:2379,b:2379", "keepstep-17", "node3", "rack=s2"
    )  # fmt: skip
    assert got["slots"] >= got["ranks_per_replica"]
    nodes = int(re.findall(r"^#SBATCH --nodes=(\d+)$", SBATCH.read_text(), re.MULTILINE)[0])
    assert nodes * (got["slots"] // got["ranks_per_replica"]) == got["replicas"] + 1, "one spare"
    assert got["token_file"].stat().st_mode & 0o777 == 0o600
    assert got["run_dir"] == tmp_path / "runs" / "keepstep-17"


@pytest.mark.parametrize("topology", ["", "node3"])
def test_slurm_without_a_topology(cluster: dict[str, str], tmp_path: Path, topology: str) -> None:
    env = {k: v for k, v in cluster.items() if k != "SLURM_TOPOLOGY_ADDR"}
    env |= {"SLURM_TOPOLOGY_ADDR": topology} if topology else {}
    subprocess.run(["bash", SBATCH, "train.py"], env=env, check=True, timeout=60)
    got = parsed(["keepstep", *json.loads((tmp_path / "keepstep.json").read_text())[1:]])
    assert got["labels"] == ""


@pytest.mark.parametrize(
    ("missing", "said"), [("KEEPSTEP_STORE", "set it to the etcd"), ("", "name the training script")]
)
def test_slurm_with_something_missing(cluster: dict[str, str], missing: str, said: str) -> None:
    env = {k: v for k, v in cluster.items() if k != missing}
    done = subprocess.run(["bash", SBATCH], env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr


def test_kubernetes() -> None:
    (job,) = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    values = {"POD_NAME": "my-job-3-abcde", "POD_IP": "10.0.0.7"}
    assert {variable["name"] for variable in container["env"]} == values.keys()
    command = [
        re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], word) for word in container["command"] + container["args"]
    ]
    got = parsed(command)
    assert (got["script"], got["args"]) == (Path("/app/train.py"), ["--my-arguments"])
    assert (got["host"], got["host_address"], got["job"]) == ("my-job-3-abcde", "10.0.0.7", job["metadata"]["name"])
    assert job["spec"]["parallelism"] * (got["slots"] // got["ranks_per_replica"]) == got["replicas"] + 1, "one spare"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in spec["volumes"]}
    for path in (got["run_dir"], got["checkpoint_dir"]):
        assert path.is_relative_to(mounts["shared"])
    assert got["token_file"].is_relative_to(mounts["token"])
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["containerName"]) == ("FailJob", container["name"])
    assert set(rule["onExitCodes"]["values"]) == {1, 78}, "what an agent ends with when the job has failed"
    assert job["spec"]["template"]["metadata"]["labels"].items() >= _affinity(spec).items()


def _affinity(spec: dict[str, Any]) -> dict[str, str]:
    rules = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (rule,) = rules
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    labels: dict[str, str] = rule["labelSelector"]["matchLabels"]
    return labels
