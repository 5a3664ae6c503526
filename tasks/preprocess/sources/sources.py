"""The sections of a configuration that name text, and the source of each."""

from importlib import import_module

from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.schema.sources import NOT_STATED, SourceConfig, TextConfig
from infini_llama.tasks.preprocess.sources.source import Source
from infini_llama.tasks.records.manifest import Origin, Provenance


def sections(data: DataConfig) -> dict[str, TextConfig]:
    """The sections that name text.

    It is `data` itself, or each of data.sources by its name, in the order of names.
    """
    by_name = sorted(data.sources, key=lambda source: source.name)
    return {source.name: source for source in by_name} or {"": data}


def source_of(
    section: TextConfig, name: str = "", validation_fraction: float = 0.0
) -> Source:
    """The source of a section.

    Args:
        name: of the section in data.sources; "" for `data` itself.
        validation_fraction: of the section `data`.
    """
    place = f"data.sources.{name}" if name else "data"
    module = import_module(f"{__package__}.{section.source.replace('-', '_')}")
    source: type[Source] = module.SOURCE
    return source(section, place, validation_fraction)


def describe(data: DataConfig) -> Provenance:
    """The origin of the text, for the manifest."""
    origins = list[Origin]()
    for name, section in sections(data).items():
        source = source_of(section, name)
        origin = Origin(
            source=section.source,
            name=name,
            license=source.license,
            loss_on=section.loss_on,
            facts=source.facts(),
        )
        if isinstance(section, SourceConfig):
            stated = (
                source.license if section.license == NOT_STATED else section.license
            )
            origin = changed(origin, weight=section.weight, license=stated)
        origins.append(origin)
    return Provenance(sources=tuple(origins))
