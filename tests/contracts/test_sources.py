"""Each choice of data.source is a module, and each such module is a choice."""

from importlib import import_module
from pathlib import Path
from typing import get_args

from infini_llama.configs.schema.sources import TextConfig
from infini_llama.tasks.preprocess import sources
from infini_llama.tasks.preprocess.sources.source import Source
from infini_llama.tasks.preprocess.sources.sources import source_of


def test_every_source_has_a_module_and_every_module_is_a_choice():
    choices = get_args(TextConfig.model_fields["source"].annotation)
    for choice in choices:
        assert isinstance(source_of(TextConfig(source=choice)), Source)
    names = [path.stem for path in Path(sources.__path__[0]).glob("*.py")]
    modules = {name: import_module(f"{sources.__name__}.{name}") for name in names}
    with_source = {name for name, module in modules.items() if hasattr(module, "SOURCE")}
    assert with_source == {choice.replace("-", "_") for choice in choices}
