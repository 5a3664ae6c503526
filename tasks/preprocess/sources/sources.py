"""The sections of a configuration that name text, and the source of each."""

from importlib import import_module

from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.configs.schema.runtime import default_home
from infini_llama.configs.schema.sources import SourceConfig, TextConfig
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.source import Inputs, Source
from infini_llama.tasks.records.manifest import Provenance


def sections(data: DataConfig) -> dict[str, TextConfig]:
    """The sections that name text.

    It is `data` itself, or each of data.sources by its name, in the order of names.
    """
    return {source.name: source for source in _by_name(data)} or {"": data}


def _by_name(data: DataConfig) -> list[SourceConfig]:
    return sorted(data.sources, key=lambda source: source.name)


def source_of(section: TextConfig, name: str = "") -> Source:
    """The source of a section.

    Args:
        name: of the section in data.sources; "" for `data` itself.
    """
    place = f"data.sources.{name}" if name else "data"
    module = import_module(f"{__package__}.{section.source.replace('-', '_')}")
    source: type[Source] = module.SOURCE
    return source(section, place)


def inputs_of(section: TextConfig, name: str = "", not_text: NotText | None = None) -> Inputs:
    """The inputs of a section.

    Args:
        name: see `source_of`.
        not_text: counts the files that are left out; None: those of the default home.

    Raises:
        ConfigError, DataError, PipelineError: see `Source.inputs`.
    """
    return source_of(section, name).inputs(not_text or NotText(default_home()))


def describe(data: DataConfig) -> Provenance:
    """Provenance of the source or sources, for the manifest."""
    if not data.sources:
        return _provenance(data)
    sources = []
    for source in _by_name(data):
        provenance = _provenance(source)
        license = source.license if source.license != "not stated" else provenance.license
        of_source = changed(
            provenance,
            name=source.name,
            weight=source.weight,
            license=license,
        )
        sources.append(of_source)
    licenses = sorted({source.license for source in sources})
    return Provenance(
        source="mixture",
        sources=tuple(sources),
        license="; ".join(licenses),
    )


def _provenance(section: TextConfig) -> Provenance:
    provenance = source_of(section).provenance()
    if section.loss_on == "all":
        return provenance
    return changed(provenance, loss_on=section.loss_on)
