"""train_tiny, but replica 1 differs in something."""

import atexit
import os
import sys
import threading
from pathlib import Path

import torch
import train_tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep
import keepstep.runtime.environment

odd = os.environ["REPLICA_ID"] == "1"
what = sys.argv[1]
sys.argv = [sys.argv[0], "--steps", "50"]


def end_last() -> None:
    """Ends only after another rank has: whoever knows the cause is not always the first to go."""
    events = Path(os.environ["KEEPSTEP_RUN_DIR"]) / "events" / "launcher.jsonl"
    while '"exit"' not in events.read_text():
        threading.Event().wait(0.01)


size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
if size == "2" and (what, rank) in (("model", "0"), ("one rank raises", "1")):
    atexit.register(end_last)
if what == "model" and odd:
    sys.argv += ["--width", "48"]
elif what == "data" and odd:
    sys.argv += ["--length", "100"]
elif what == "unit size" and odd:
    sys.argv += ["--unit-size", "8"]
elif what == "version" and odd:
    keepstep.runtime.environment.__version__ = "0.0.9"
elif what == "one rank raises" and rank == "1":
    sys.argv += ["--raise-at", "3"]
elif what == "mesh":
    own = init_device_mesh
    with keepstep.join() as job:
        model = train_tiny.build(0, 16)
        fully_shard(model, mesh=own("cpu", (job.size, 1), mesh_dim_names=("a", "b"))["b"])
        keepstep.Training(
            job, model, torch.optim.SGD(model.parameters()), data=train_tiny.dataset(100), unit_size=4, max_steps=5
        )
elif what == "unsharded":
    sys.argv += ["--plain"]
elif what == "never joins":
    sys.exit(0)
elif what == "never trains":
    with keepstep.join():
        sys.exit(0)
train_tiny.main(train_tiny.arguments().parse_args())
