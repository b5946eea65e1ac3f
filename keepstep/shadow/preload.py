"""Imported once, before the ranks are forked: loads all that a rank needs, and replaces the device.

A process that was forked from this one shares its memory, so what is loaded here costs a rank nothing.
"""

import gc
import logging
import os

import numpy as np
import torch
import torch._dynamo.trace_rules
import torch.distributed.checkpoint
import torch.profiler
import torch.utils.data
from torch.distributed import distributed_c10d

from keepstep.shadow import dense, training
from keepstep.shadow.device import replace_device
from keepstep.shadow.patience import be_patient
from keepstep.shadow.settings import ShadowSettings
from keepstep.shadow.warm import warm_up
from keepstep.training import training as real

_init_process_group = distributed_c10d.init_process_group
torch.set_num_threads(1)
training.ShadowTraining.mode = replace_device()
real.Training = training.ShadowTraining  # type: ignore[misc]
warm_up(_init_process_group)
logging.getLogger().setLevel(logging.INFO)  # each rank would, and touch every logger for it
be_patient(ShadowSettings.from_env(os.environ).patience)
np.random.seed()  # each rank will: what numpy makes for it, once, is here then
torch._dynamo.trace_rules.clear_lru_cache()  # or each rank would empty it when it makes its process group
training.ShadowTraining.mode.calls.forget()
dense.fill()
gc.freeze()  # the collector would write to every page of what is shared
