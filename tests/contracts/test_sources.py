"""Each choice of data.source and each text format with facts has its module, and the other way round."""

from importlib import import_module
from pathlib import Path
from typing import get_args

from infini_llama.configs.schema.sources import TextConfig
from infini_llama.configs.text_formats import BY_ENDING, TEXT_FORMATS
from infini_llama.tasks.preprocess import sources
from infini_llama.tasks.preprocess.sources.source import Source
from infini_llama.tasks.preprocess.sources.sources import source_of
from infini_llama.tasks.preprocess.sources.text_format import Format

MODULES = {
    path.stem: import_module(f"{sources.__name__}.{path.stem}")
    for path in Path(sources.__path__[0]).glob("*.py")
}


def test_every_source_has_a_module_and_every_module_is_a_choice():
    choices = get_args(TextConfig.model_fields["source"].annotation)
    for choice in choices:
        assert isinstance(source_of(TextConfig(source=choice)), Source)
    with_source = {
        name for name, module in MODULES.items() if hasattr(module, "SOURCE")
    }
    assert with_source == {choice.replace("-", "_") for choice in choices}


def test_facts_and_objects_of_formats_agree():
    with_formats = {
        name: module for name, module in MODULES.items() if hasattr(module, "FORMATS")
    }
    assert with_formats.keys() == {form.module for form in TEXT_FORMATS.values()}
    for name, module in with_formats.items():
        stated = {form.name for form in TEXT_FORMATS.values() if form.module == name}
        assert module.FORMATS.keys() == stated
        assert all(isinstance(reader, Format) for reader in module.FORMATS.values())


def test_an_ending_is_of_one_format():
    endings = [ending for form in TEXT_FORMATS.values() for ending in form.endings]
    assert len(endings) == len(BY_ENDING)
