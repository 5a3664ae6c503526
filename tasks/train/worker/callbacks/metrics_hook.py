"""`train.metrics_hook`: a user's function that adds numbers to a logged step."""

import pkgutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from pydantic import TypeAdapter, ValidationError

from infini_llama.configs.errors import ConfigError
from infini_llama.model.llama import Llama
from infini_llama.tasks.records.metrics import TrainLine

ADVICE = (
    "Correct the function, or remove the key; the numbers of this step are missing."
)
Hook = Callable[[Llama, dict[str, Any]], dict[str, float]]
NUMBERS = TypeAdapter(dict[str, bool | float])


def load_hook(name: str | None) -> Hook | None:
    """The function that `module:function` names, None for None.

    Raises:
        ConfigError: there is no such module or function.
    """
    if name is None:
        return None
    try:
        hook: Any = pkgutil.resolve_name(name)
    except Exception as error:  # the module's own, too
        raise ConfigError(
            f"train.metrics_hook={name} cannot be imported ({error}); "
            "install its module, or add its folder to environment.env.PYTHONPATH."
        ) from error
    if not callable(hook):
        raise ConfigError(f"train.metrics_hook={name} is not a function.")
    return cast(Hook, hook)


@contextmanager
def _only_measured(model: Llama) -> Generator[None]:
    """A block after which training goes on as before it, whatever was done to the model's mode."""
    has_gradient = [parameter.requires_grad for parameter in model.parameters()]
    try:
        yield
    finally:
        torch.set_grad_enabled(True)
        model.train()
        for parameter, has in zip(model.parameters(), has_gradient, strict=True):
            parameter.requires_grad_(has)
            parameter.grad = None


def call_hook(hook: Hook, name: str, model: Llama, line: TrainLine) -> dict[str, float]:
    """The hook's numbers for this step.

    Raises:
        ConfigError: it returned something else.
    """
    shown = line.model_dump(exclude={"kind"}, exclude_unset=True)
    with _only_measured(model):
        try:
            numbers = hook(model, shown)
        except SystemExit as error:
            raise RuntimeError(f"it ended the process ({error})") from error
    try:
        checked = NUMBERS.validate_python(numbers, strict=True)
    except ValidationError:
        raise ConfigError(
            f"train.metrics_hook={name} returned {numbers!r}; it must return numbers by name."
        ) from None
    return {key: float(value) for key, value in checked.items()}
