"""Each format with facts has an object, and each object has facts."""

from importlib import import_module
from pathlib import Path

from infini_llama.configs.text_formats import BY_ENDING, TEXT_FORMATS
from infini_llama.tasks.preprocess import sources
from infini_llama.tasks.preprocess.sources.text_format import Format


def test_facts_and_objects_of_formats_agree():
    names = [path.stem for path in Path(sources.__path__[0]).glob("*.py")]
    modules = {name: import_module(f"{sources.__name__}.{name}") for name in names}
    with_formats = {name: module for name, module in modules.items() if hasattr(module, "FORMATS")}
    assert with_formats.keys() == {form.module for form in TEXT_FORMATS.values()}
    for name, module in with_formats.items():
        stated = {form.name for form in TEXT_FORMATS.values() if form.module == name}
        assert module.FORMATS.keys() == stated
        assert all(isinstance(reader, Format) for reader in module.FORMATS.values())


def test_an_ending_is_of_one_format():
    endings = [ending for form in TEXT_FORMATS.values() for ending in form.endings]
    assert len(endings) == len(BY_ENDING)
