"""Shadow runs: an unchanged training script, many more ranks than this machine could compute, and no device.

Replaced: tensors on the device (`shapes`), `torch.cuda` and NCCL (`device`), and the model that keepstep exchanges, serves and
saves (`stand_in`), which is a stated fraction of the script's. Everything else is the product's own code and real: launcher,
processes, data loading, ledger, quorum, two-phase commit, FTAR, state transfer, checkpoints, events.
"""
