"""Imported once, before the ranks are forked: loads all that a rank needs, and replaces the device.

A process that was forked from this one shares its memory, so what is loaded here costs a rank nothing.
"""

import gc

import torch
import torch.distributed.checkpoint
import torch.profiler
import torch.utils.data
from torch.distributed import distributed_c10d

from keepstep.shadow import training
from keepstep.shadow.device import replace_device
from keepstep.shadow.warm import warm_up
from keepstep.training import training as real

_init_process_group = distributed_c10d.init_process_group
torch.set_num_threads(1)
training.ShadowTraining.mode = replace_device()
real.Training = training.ShadowTraining  # type: ignore[misc]
warm_up(_init_process_group)
training.ShadowTraining.mode.calls.forget()
gc.collect()
gc.freeze()  # the collector would write to every page of what is shared
