"""The end of a rank that torchrun started for a test."""

import os
from typing import NoReturn

from infini_llama.tasks.train.worker.strategies.ranks import Ranks


def leave_together(ranks: Ranks) -> NoReturn:
    """End this rank with 0 when all have come here, as the worker ends.

    Nothing is taken down: DDP's reducer would end gloo's threads while it holds Python's lock, and a
    thread that still has a result of the backward pass to drop waits for that lock.
    """
    ranks.barrier()
    os._exit(0)
