"""Every figure that the model computes with: its value, its unit, where it comes from. Nothing else here holds a number.

*paper*: what FT-HSDP (arXiv:2602.00277) says, and where. *measured*: what docs/benchmarks.md says of keepstep. *setting*:
keepstep's default. *assumed*: nobody has said it; the reason is given, and `keepstep plan` tells what would be otherwise.

The paper gives the sync recovery of 98,304 GPUs as ten minutes, and of its parts only two: communicator init and the first step.
`LOAD_CHECKPOINT` is what is left after these and the assumed small ones. It is the one figure that is there to make a sum come
out; the sum is the paper's ten minutes, and the effective time follows from that.
"""

from dataclasses import dataclass
from enum import StrEnum

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


class Origin(StrEnum):
    """Who says so."""

    PAPER = "paper"
    MEASURED = "measured"
    SETTING = "setting"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number, and why it should be believed."""

    value: float
    unit: str
    origin: Origin
    what: str
    source: str


class Shows(StrEnum):
    """How a failure shows itself to the other replicas."""

    EXIT = "exit"  # a process ends: its connections end too, and its launcher sees it
    SILENT = "silent"  # a host is gone without a word
    STUCK = "stuck"  # it lives, answers heartbeats, and makes no progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A row of the paper's Table 1. How it shows, and whether another host is needed, are assumed."""

    name: str
    count: int
    shows: Shows
    new_host: bool


KINDS = (
    Kind(name="GPU memory (HBM)", count=155, shows=Shows.EXIT, new_host=True),
    Kind(name="PCIe", count=122, shows=Shows.EXIT, new_host=True),
    Kind(name="NCCL watchdog", count=61, shows=Shows.STUCK, new_host=False),
    Kind(name="GPU compute", count=50, shows=Shows.EXIT, new_host=True),
    Kind(name="software", count=48, shows=Shows.EXIT, new_host=False),
    Kind(name="host maintenance", count=42, shows=Shows.EXIT, new_host=True),
    Kind(name="kernel", count=39, shows=Shows.SILENT, new_host=True),
    Kind(name="system reboot", count=38, shows=Shows.SILENT, new_host=True),
    Kind(name="silent data corruption", count=37, shows=Shows.EXIT, new_host=True),
    Kind(name="network switch, cable", count=36, shows=Shows.SILENT, new_host=True),
    Kind(name="SSD", count=30, shows=Shows.EXIT, new_host=True),
    Kind(name="other", count=20, shows=Shows.EXIT, new_host=True),
)


def _paper(value: float, unit: str, what: str, source: str) -> Figure:
    return Figure(value=value, unit=unit, origin=Origin.PAPER, what=what, source=source)


def _measured(value: float, unit: str, what: str, source: str) -> Figure:
    return Figure(value=value, unit=unit, origin=Origin.MEASURED, what=what, source=source)


def _setting(value: float, unit: str, what: str, source: str) -> Figure:
    return Figure(value=value, unit=unit, origin=Origin.SETTING, what=what, source=source)


def _assumed(value: float, unit: str, what: str, source: str) -> Figure:
    return Figure(value=value, unit=unit, origin=Origin.ASSUMED, what=what, source=source)


# --- the job ---------------------------------------------------------------------------------------------------

GPUS = _paper(98_304, "", "GPUs", "downtime experiment: 98K H100")
REPLICAS = _paper(12, "", "replicas", "downtime experiment")
GPUS_PER_HOST = _assumed(8, "", "GPUs of a host", "an H100 server")
STEP = _paper(20, "s", "a step", "recovery breakdown")
CHECKPOINT_EVERY = _paper(100, "steps", "between checkpoints", "checkpoints")
MTBF = _paper(18 * MINUTE, "s", "between two failures of 98,304 GPUs", "introduction, downtime experiment")
SERVER_RATE = _paper(
    2.3, "", "interruptions a day of 1,000 servers at 32K GPUs", "hardware reliability; leads to one in 51 min, not 18"
)
OVERSUBSCRIPTION = _paper(2.8, "", "oversubscription between zones, and between buildings", "topology: 1:2.8")

# --- recovery, phase by phase ------------------------------------------------------------------------------------

SYNC_RECOVERY = _paper(10 * MINUTE, "s", "recovery of all 98,304 GPUs", "introduction, recovery breakdown")
INIT_16K = _paper(17, "s", "communicator init at 16,384 GPUs", "Figure 2")
INIT_98K = _paper(200, "s", "communicator init at 98,304 GPUs; a power law in between and beyond", "Figure 2")
COLD_ALLOCATION = _paper(5 * MINUTE, "s", "getting GPUs from the cloud anew", "recovery breakdown: up to 5 min")
FIRST_STEP = _paper(200, "s", "the first step beyond an ordinary one", "downtime experiment on Figure 2: about 200 s")
WARM_ALLOCATION = _assumed(30, "s", "getting GPUs out of a reserve", "'greatly reduces' 5 min")
START = _assumed(40, "s", "starting PyTorch", "seconds here, minutes from a shared file system")
HEALTH_CHECK = _assumed(30, "s", "checking the hosts", "a short stress test")
LOAD_CHECKPOINT = _assumed(
    SYNC_RECOVERY.value - INIT_98K.value - FIRST_STEP.value - WARM_ALLOCATION.value - START.value - HEALTH_CHECK.value,
    "s",
    "loading a checkpoint",
    "what is left of the paper's 10 min: a residual, so that the parts add up",
)

# --- a failure under FT-HSDP ---------------------------------------------------------------------------------------

TIMEOUT = _paper(60, "s", "until a failure is noticed", "failure detection, downtime experiment")
RETRAIN = _paper(20, "s", "training the failed step again", "downtime experiment")
POWER_PAUSE = _paper(45, "s", "the power smoother's pause when all GPUs stop", "downtime experiment; found and fixed")
BUG_PAUSE = _paper(45, "s", "a needless reconfiguration", "downtime experiment; found and fixed")
STALL = _paper(3 * MINUTE, "s", "stall of the survivors", "downtime experiment")
REBUILD_RING = _assumed(
    STALL.value - TIMEOUT.value - RETRAIN.value - POWER_PAUSE.value - BUG_PAUSE.value,
    "s",
    "a new ring in the paper",
    "what is left of its 3 min; it says 'seconds', and so does 60 + 10 + 20 = its 1.5 min",
)
REJOIN_STALL = _paper(100, "s", "all wait when a replica comes back", "downtime experiment; not in the paper's 80%")
FETCH = _paper(20, "s", "fetching the state from peers", "catch-up: usually less than a step; taken as one")

# --- the same with keepstep ------------------------------------------------------------------------------------------

SEEN_EXIT = _measured(0.097, "s", "survivors know of a dead process", "a sum, kill -9, TCP, the worst of 7")
SEEN_SILENT = _setting(
    5,
    "s",
    "a silent peer is given up",
    "LinkSettings.silent_s: 4 x the slowest recent step, at most this; 1.6-2 s measured at short steps",
)
SEEN_STUCK = _setting(
    60,
    "s",
    "a peer without progress is given up",
    "EngineSettings.progress_ceiling_s: 10 x the slowest recent step, at most this",
)
PROGRESS_FLOOR = _setting(10, "s", "and never before", "EngineSettings.progress_floor_s")
DECISION = _paper(0.7, "s", "a quorum decision at 98,304 ranks", "get_quorum; ours at this size: see the quorum table")
NEW_RING = _measured(0.0047, "s", "a new ring after one left", "members that go and come, N=4, the worst of 100")
REPEAT_SUM = _assumed(
    0.5, "s", "repeating the sums of a step", "2 x 1 GB a GPU at a fourth of the paper's 45 GB/s, ten times that"
)
WARM_START = _measured(
    1.8, "s", "from a forked process to its report", "predictions, row 1: 3 replicas x 2 ranks on 2 cores"
)
REJOIN = _measured(0.56, "s", "survivors' longest step at a rejoin, beyond an ordinary one", "a kill, median of 10")

# --- what is around it ----------------------------------------------------------------------------------------------

REPAIR = _assumed(DAY, "s", "until a broken host is back in the reserve", "somebody has to go there")
JOB_MTBF = _assumed(14 * DAY, "s", "between two stops of the whole job", "a building's power, a wrong release")
CHECKPOINT_WRITE = _assumed(
    5 * MINUTE, "s", "until a checkpoint is complete", "several TB to shared storage, beside training"
)
CHECKPOINT_BLOCK = _measured(
    0.004, "of a step", "a checkpoint holds its replica up", "a checkpoint: 1 ms of 263 at worst"
)
STATE_BYTES_PER_PARAMETER = _assumed(
    16, "B", "state of a parameter", "bf16 weight, fp32 master copy, AdamW, bf16 gradient"
)
GRADIENT_BYTES_PER_PARAMETER = _assumed(2, "B", "gradient of a parameter that is summed", "bf16")
PARAMETERS = _assumed(2e12, "", "parameters", "'several trillion'; 2T is named with silent data corruption")
MEMORY_FOR_STATE = _assumed(
    8e9, "B", "of a GPU's memory that the state may take", "a tenth of an H100; the rest: activations"
)
NIC = _assumed(50e9, "B/s", "a GPU's network", "400 Gbit/s; Table 2 reaches 45 GB/s")
BACKWARD = _assumed(
    2 / 3, "of a step", "the backward pass, in which sums can hide", "it takes twice the forward pass's work"
)
TAIL = _assumed(
    2, "", "a healthy step takes at most so many times the usual one", "for deadlines that cry wolf at nobody"
)
EMPTY_RESERVE = _assumed(0.01, "", "of the failures may find the reserve empty", "a choice, for the number of spares")
AS_GOOD = _assumed(0.005, "", "of ETTR that fewer replicas may cost", "a choice, for the number of replicas")


def all_figures() -> dict[str, Figure]:
    """By name, in the order in which they stand here."""
    return {name: value for name, value in globals().items() if isinstance(value, Figure)}
