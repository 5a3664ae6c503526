"""Run directories on disk: layout, checkpoints, records, garbage collection.

Only `load` and `generation` import torch.
"""
