"""What reads a tensor's value or a size that depends on it, which a GPU would be waited for."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations whose result's value or size the host has to know; indexing by a mask is one by its argument.
READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2", "equal")
METHODS = ("tolist", "numpy", "item", "__bool__", "__float__", "__int__", "__index__")


class Reads(TorchDispatchMode):
    """Lists the operations that do."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        if name in READS or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[list[str]]:
    """The names of the operations and methods inside that do."""
    with pytest.MonkeyPatch.context() as patch, Reads() as mode:
        for name in METHODS:
            own = getattr(torch.Tensor, name)
            patch.setattr(
                torch.Tensor, name, lambda self, *args, own=own, name=name: mode.found.append(name) or own(self, *args)
            )
        yield mode.found
