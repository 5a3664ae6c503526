"""Adam and AdamW with weight_decay=None."""

import functools
from typing import Any

from infini_llama.tasks.patch_environment.patches.patch import Patch

MARK = "_none_is_zero"


def apply() -> None:
    import torch
    from torch.optim import Adam, AdamW

    def none_is_zero(init: Any) -> Any:
        @functools.wraps(init)
        def with_number(self: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("weight_decay", 0.0) is None:
                kwargs["weight_decay"] = 0.0
            init(self, *args, **kwargs)

        return with_number

    add = torch.optim.Optimizer.add_param_group
    if hasattr(add, MARK):
        return
    for optimizer in (Adam, AdamW):
        optimizer.__init__ = none_is_zero(optimizer.__init__)

    @functools.wraps(add)
    def add_with_number(self: Any, param_group: dict[str, Any]) -> None:
        if isinstance(self, Adam) and param_group.get("weight_decay", 0.0) is None:
            param_group["weight_decay"] = 0.0
        add(self, param_group)

    setattr(add_with_number, MARK, True)
    torch.optim.Optimizer.add_param_group = add_with_number


PATCH = Patch(
    name="adam-weight-decay",
    fault="Adam and AdamW with weight_decay=None fail: the constructor compares it with a number, a parameter group with it passes "
    "and dies at the first step (unsupported operand type(s) for *: 'float' and 'NoneType'); it is read as 0.",
    reference="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py",
    package="torch",
    versions="",
    apply=apply,
)
