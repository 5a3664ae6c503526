"""Counts the bytes of the tensors that are alive while something runs, by what they are for."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside its context every new storage is counted, until it is freed.

    Under FakeTensorMode tensors have sizes and lifetimes but no memory, so a model of any size is counted anywhere.

    Args:
        kind_of: what a new tensor is for; `name` puts it right later, where only what follows tells.
    """

    def __init__(self, kind_of: Callable[[torch.Tensor], str]) -> None:
        super().__init__()
        self.kind_of = kind_of
        self.known: dict[int, tuple[int, str]] = {}
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total = self.highest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._note(value)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        size, kind = storage.nbytes(), self.kind_of(tensor)
        self.known[key] = size, kind
        self.live[kind] += size
        self.total += size
        if self.total > self.highest:
            self.highest, self.peak = self.total, self.live.copy()
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        size, kind = self.known.pop(key)
        self.live[kind] -= size
        self.total -= size

    def name(self, tensor: torch.Tensor, kind: str) -> None:
        """Says what a tensor turned out to be for."""
        key = tensor.untyped_storage()._cdata
        size, before = self.known[key]
        self.known[key] = size, kind
        self.live[before] -= size
        self.live[kind] += size

    def begin(self) -> None:
        """The peak is from here on."""
        self.highest, self.peak = self.total, self.live.copy()
